"""The LSTM language model of McMahan et al. 2018 (appendix B) and how its guesses are counted.

One table embeds the words and scores the outputs, each row at norm 1 wherever it is used; the
state of 256 gives an output embedding of 96 through a projection. With 10,000 words and the
three tokens that are none the table has 960,288 numbers, the four gates 361,472, the projection
24,672: 1,346,432 in 11 parameter vectors, the paper's 1.35M.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras
from mfopt.experiments.runs import SPECIAL
from mfopt.experiments.runs.functional import Apply, Params, functional

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

_GATES = ("input", "forget", "cell", "output")


class LSTM(nnx.Module):
    """``module(tokens (L,)) -> logits (L, words + 3)``: of the word behind each token.

    Args:
      words: of the dictionary; tokens words, words + 1, words + 2 are UNK, BOS and EOS.
      embedding: numbers of a word's vector.
      state: numbers of the state.
      rngs: of the initial values.
    """

    def __init__(self, words: int, embedding: int, state: int, *, rngs: nnx.Rngs) -> None:
        tokens = _check.integer("words", words) + SPECIAL
        self.state = _check.integer("state", state)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (tokens, embedding)))
        width = embedding + state
        for gate in _GATES:
            kernel = jax.random.normal(rngs.params(), (width, state)) / np.sqrt(width)
            # a forget gate that begins open: what is read is kept
            bias = jnp.full((state,), 1.0 if gate == "forget" else 0.0)
            setattr(self, gate, nnx.Dict(kernel=nnx.Param(kernel), bias=nnx.Param(bias)))
        kernel = jax.random.normal(rngs.params(), (state, embedding)) / np.sqrt(state)
        self.projection = nnx.Dict(
            kernel=nnx.Param(kernel), bias=nnx.Param(jnp.zeros((embedding,)))
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        raw = self.table[...]
        length = jnp.sqrt(jnp.sum(jnp.square(raw), axis=-1, keepdims=True) + 1e-12)
        table = raw / length
        kernel = jnp.concatenate([getattr(self, gate)["kernel"][...] for gate in _GATES], axis=1)
        bias = jnp.concatenate([getattr(self, gate)["bias"][...] for gate in _GATES])
        # what comes from the words does not wait for the state: one product for all of them
        inward, back = kernel[: table.shape[1]], kernel[table.shape[1] :]
        given = table[tokens] @ inward + bias

        def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
            hidden, memory = carry
            take, keep, new, show = jnp.split(x + hidden @ back, 4)
            memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
            hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
            return (hidden, memory), hidden

        start = jnp.zeros(self.state), jnp.zeros(self.state)
        _, hidden = jax.lax.scan(step, start, given)
        out = hidden @ self.projection["kernel"][...] + self.projection["bias"][...]
        logits: jax.Array = out @ table.T
        return logits


def model(words: int = 10_000, embedding: int = 96, state: int = 256, *, seed: int = 0) -> Any:
    """(parameters, ``apply(params, tokens)``) of an :class:`LSTM`; by default the paper's.

    Args:
      words: of the dictionary.
      embedding: numbers of a word's vector.
      state: numbers of the state.
      seed: of the initial values.
    """
    found: tuple[Params, Apply] = functional(LSTM(words, embedding, state, rngs=nnx.Rngs(seed)))
    return found


class NextWord:
    """The loss of rows of (inputs, targets) under ``apply``; hashable, as compiled code asks."""

    def __init__(self, apply: Apply) -> None:
        self.apply = apply

    def __call__(self, params: Params, rows: Any, mask: jax.Array) -> jax.Array:
        """Mean over real targets in nats; a row is (inputs, targets) of (L,), target -1 is none."""
        inputs, targets = rows
        logits = jax.vmap(lambda tokens: self.apply(params, tokens))(inputs.astype(jnp.int32))
        real = (targets >= 0) & mask[..., None]
        label = jnp.maximum(targets, 0).astype(jnp.int32)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], -1)[..., 0]
        return -jnp.sum(jnp.where(real, chosen, 0.0)) / jnp.maximum(jnp.sum(real), 1)


def top_one(logits: jax.Array, targets: jax.Array, words: int) -> tuple[jax.Array, jax.Array]:
    """(right, counted) guesses. A target outside the dictionary counts and is always wrong.

    Args:
      logits: (..., words + 3).
      targets: (...), -1 where there is none.
      words: of the dictionary; words + 2, the end of a post, is a token like a word.
    """
    guess = jnp.argmax(logits, axis=-1)
    right = (guess == targets) & (targets != words)
    return jnp.sum(right), jnp.sum(targets >= 0)


def head_words(logits: Any, heads: tuple[int, ...], guesses: int = 10) -> np.ndarray:
    """Histogram of a model's best guesses among the n most frequent words: counts of 0..guesses.

    Args:
      logits: (places, words + 3), words by falling frequency.
      heads: the n's.
      guesses: best guesses examined.

    Returns: (len(heads), guesses + 1), places counted (McMahan et al. 2018, Table 3).
    """
    best = np.argsort(-np.asarray(logits), axis=-1)[:, :guesses]
    return np.array(
        [np.bincount((best < head).sum(axis=1), minlength=guesses + 1) for head in heads]
    )
