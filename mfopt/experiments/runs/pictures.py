"""Digits that scikit-learn brings, and a model for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None


class Examples(NamedTuple):
    """``x`` (N, d) float32 and ``y`` (N,) int32 classes."""

    x: np.ndarray
    y: np.ndarray


class Pictures(NamedTuple):
    """Data in three parts: rates are chosen on ``validation``, what is reported is on ``test``."""

    train: Examples
    validation: Examples
    test: Examples


def load(held_out: int) -> Pictures:
    """scikit-learn's 1,797 digits of 8 × 8, half of ``held_out`` each for validation and test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as problem:
        raise _extras.missing(problem) from None
    x, y = load_digits(return_X_y=True)
    _check.integer("held_out", held_out, at_least=2, at_most=len(y) - 1)
    order, half = np.random.default_rng(0).permutation(len(y)), held_out // 2
    x, y = (x / 16 - 0.3).astype(np.float32), y.astype(np.int32)
    parts = order[held_out:], order[:half], order[half:held_out]
    return Pictures(*(Examples(x[part], y[part]) for part in parts))


class Perceptron(nnx.Module):
    """One hidden layer of tanh: ``module(x (d,)) -> logits (10,)``."""

    def __init__(self, inputs: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(inputs, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits: jax.Array = self.last(jnp.tanh(self.first(x)))
        return logits


def model(inputs: int, hidden: int, seed: int) -> tuple[Any, Callable[..., jax.Array]]:
    """(parameters of a :class:`Perceptron`, ``apply(parameters, x (inputs,))``)."""
    graph, params = nnx.split(Perceptron(inputs, hidden, rngs=nnx.Rngs(seed)))
    return params, lambda params, x: nnx.merge(graph, params)(x)
