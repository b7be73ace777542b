"""Text generation from a trained model, token by token, with a cache where the model has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import pinned
from mfopt.training.models.model import Model, PyTree


def generate(
    model: Model,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    end: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Up to ``tokens`` new tokens after ``prompt``, drawn from the model's own distribution.

    The model sees its ``max_length`` latest tokens. What it says is post-processing of its
    parameters: the guarantee of the run that made it covers it. Refused are an empty prompt and a
    token that the model does not know.

    Args:
        model, prompt, tokens: a causal one with logits; at least one token; most new ones.
        temperature, seed: of the draws; the first divides the logits, and 0 takes the likeliest.
        end: a token that ends the text, and is not given.
    """
    logits = model.logits
    if logits is None:
        raise _check.reject("model", model.name, "has no logits to draw from")
    tokens = _check.integer("tokens", tokens)
    temperature = _check.non_negative("temperature", temperature)
    text, vocabulary = [int(token) for token in prompt], model.vocab_size or np.inf
    if not text or not all(0 <= token < vocabulary for token in text):
        raise _check.reject("prompt", text[:8], "must be tokens of the model, at least one")
    length = min(model.max_length or 256, len(text) + tokens)

    @jax.jit
    def scored(own: tuple[Any, Any], row: Any, at: Any, last: Any, cache: Any) -> tuple[Any, Any]:
        if model.decode is None:
            found = logits(*own, row)
        else:
            found, cache = model.decode(*own, row, at, cache)
        return found[last].astype(jnp.float32), cache

    @pinned
    def following(cache: PyTree) -> tuple[np.ndarray, PyTree]:
        if cache is None:
            # what comes after the last token is not seen by a causal model
            row, at, last = np.zeros(length, np.int32), 0, len(text[-length:]) - 1
            row[: last + 1] = text[-length:]
        else:
            row, at, last = np.array(text[-1:], np.int32), len(text) - 1, 0
        where = np.int32(at), np.int32(last)
        scores, cache = scored((model.params, model.frozen), row, *where, cache)
        # a text that has left the window moves against the positions of what is cached
        return np.asarray(scores, np.float64), cache if len(text) < length else None

    rng = np.random.default_rng(_check.seed("seed", seed))
    cache = None
    for _ in range(tokens):
        scores, cache = following(cache)
        if temperature:
            # the largest of the scores with Gumbel noise is a draw from their softmax
            scores = scores / temperature + rng.gumbel(size=scores.shape)
        token = int(np.argmax(scores))
        if token == end:
            return
        text.append(token)
        yield token
