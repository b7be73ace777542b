"""The LSTM language model of McMahan et al. 2018 (appendix B), as a model of ``mfopt train``.

One table embeds the words and scores the outputs, each row at norm 1 wherever it is used; the state
gives an output embedding through a projection. With 10,000 words and three further tokens the table
has 960,288 numbers, the gates 361,472, the projection 24,672: the paper's 1.35 million.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mfopt._runtime import _extras

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None


class LSTM(nnx.Module):
    """``module(tokens (L,)) -> logits (L, V)`` of the token behind each.

    Args:
      tokens: V, of the dictionary.
      embedding: numbers of a token's vector.
      state: numbers of the state.
      rngs: of the initial values.
    """

    def __init__(self, tokens: int, embedding: int, state: int, *, rngs: nnx.Rngs) -> None:
        self.state = state
        self.table = nnx.Embed(tokens, embedding, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(embedding, state, rngs=rngs)
        self.projection = nnx.Linear(state, embedding, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        raw = self.table.embedding[...]
        table = raw * jax.lax.rsqrt(jnp.sum(jnp.square(raw), axis=-1, keepdims=True) + 1e-12)
        start = jnp.zeros(self.state), jnp.zeros(self.state)
        _, states = jax.lax.scan(self.cell, start, table[tokens])
        logits: jax.Array = self.projection(states) @ table.T
        return logits


def next_word(vocab_size: int, length: int, seed: int) -> LSTM:
    """The LSTM at the paper's sizes: ``mfopt train --model mfopt.experiments.runs.lstm:next_word``.

    Args:
      vocab_size: tokens of the data's dictionary.
      length: tokens of a record; the model takes any.
      seed: of the initial values.
    """
    return LSTM(vocab_size, 96, 256, rngs=nnx.Rngs(seed))
