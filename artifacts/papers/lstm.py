"""The LSTM language model of McMahan et al. 2018 (appendix B), as a model of ``mfopt train``.

One table of width 96 embeds the words and scores the outputs, each row at norm 1 wherever it is
used; the state of 256 gives an output embedding through a projection. With 10,000 words and three
further tokens: 960,288 numbers of the table, 361,472 of the gates, 24,672 of the projection.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

EMBEDDING, STATE = 96, 256


class NextWord(nnx.Module):
    """``module(tokens (L,)) -> logits (L, V)`` of the token behind each.

    ``mfopt train --model lstm:NextWord`` makes it where this folder is on the path.

    Args:
      vocab_size: tokens V of the data's dictionary.
      length: tokens of a record; the model takes any.
      seed: of the initial values.
    """

    def __init__(self, vocab_size: int, length: int, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.table = nnx.Embed(vocab_size, EMBEDDING, rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(EMBEDDING, STATE, rngs=rngs)
        self.projection = nnx.Linear(STATE, EMBEDDING, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        raw = self.table.embedding[...]
        table = raw * jax.lax.rsqrt(jnp.sum(jnp.square(raw), axis=-1, keepdims=True) + 1e-12)
        start = jnp.zeros(STATE), jnp.zeros(STATE)
        _, states = jax.lax.scan(self.cell, start, table[tokens])
        logits: jax.Array = self.projection(states) @ table.T
        return logits
