"""Text generation from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import pinned
from mfopt.training.models.model import Model


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
    def scored(arrays: tuple[Any, Any], row: Any, position: Any) -> Any:
        return logits(*arrays, row)[position].astype(jnp.float32)

    @pinned
    def following() -> np.ndarray:
        # what comes after the last token is not seen by a causal model
        row, position = np.zeros(length, np.int32), len(text[-length:]) - 1
        row[: position + 1] = text[-length:]
        return np.asarray(scored((model.params, model.frozen), row, np.int32(position)), np.float64)

    rng = np.random.default_rng(_check.seed("seed", seed))
    for _ in range(tokens):
        scores = following()
        if temperature:
            # the largest of the scores with Gumbel noise is a draw from their softmax
            scores = scores / temperature + rng.gumbel(size=scores.shape)
        token = int(np.argmax(scores))
        if token == end:
            return
        text.append(token)
        yield token
