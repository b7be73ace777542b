"""Images and the models for them: digits that scikit-learn brings, CIFAR-10 from a folder.

The network for CIFAR-10 is that of Papernot et al. 2021 (tempered sigmoids), which the papers on
correlated noise take: six convolutions with tanh, 550,570 parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras

with _extras.required():
    from flax import nnx

CIFAR = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_PIXELS = 3 * 32 * 32


class Examples(NamedTuple):
    """``x`` (N, d), or (N, 32, 32, 3), float32 and ``y`` (N,) int32 classes."""

    x: np.ndarray
    y: np.ndarray

    def take(self, index: np.ndarray) -> Examples:
        """Return the examples at ``index``."""
        return Examples(self.x[index], self.y[index])


class Pictures(NamedTuple):
    """Data in three parts: rates are chosen on ``validation``, what is reported is on ``test``."""

    train: Examples
    validation: Examples
    test: Examples


def load(folder: str | Path | None, held_out: int) -> Pictures:
    """CIFAR-10 from the folder of its binary version, ``held_out`` of it for validation; None:
    scikit-learn's 1,797 digits of 8 × 8, half of ``held_out`` each for validation and test.
    """
    every = _digits() if folder is None else _cifar(Path(folder), CIFAR[:-1])
    _check.integer("held_out", held_out, at_least=2, at_most=len(every.y) - 1)
    order = np.random.default_rng(0).permutation(len(every.y))
    train, kept = every.take(order[held_out:]), order[:held_out]
    if folder is not None:
        return Pictures(train, every.take(kept), _cifar(Path(folder), CIFAR[-1:]))
    half = held_out // 2
    return Pictures(train, every.take(kept[:half]), every.take(kept[half:]))


def _digits() -> Examples:
    with _extras.required():
        from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    return Examples((x / 16 - 0.3).astype(np.float32), y.astype(np.int32))


def _cifar(folder: Path, files: tuple[str, ...]) -> Examples:
    """Records of a class and the pixels of each colour, which become numbers in [-1, 1]."""
    try:
        records = [np.fromfile(folder / file, np.uint8).reshape(-1, 1 + _PIXELS) for file in files]
    except (OSError, ValueError) as problem:
        rule = f"must hold the binary version of CIFAR-10 ({problem})"
        raise _check.reject("cifar", str(folder), rule) from None
    every = np.concatenate(records)
    x = every[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32)
    return Examples(x / 127.5 - 1, every[:, 0].astype(np.int32))


class Perceptron(nnx.Module):
    """One hidden layer of tanh: ``module(x (d,)) -> logits (10,)``."""

    def __init__(self, inputs: int, hidden: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(inputs, hidden, rngs=rngs)
        self.last = nnx.Linear(hidden, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits: jax.Array = self.last(jnp.tanh(self.first(x)))
        return logits


class VGG(nnx.Module):
    """Three blocks of two convolutions and a pool, a dense layer of 128: (32, 32, 3) -> (10,)."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        widths = itertools.pairwise((3, 32, 32, 64, 64, 128, 128))
        self.convolutions = nnx.List(nnx.Conv(*pair, (3, 3), rngs=rngs) for pair in widths)
        self.dense = nnx.Linear(4 * 4 * 128, 128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for number, convolution in enumerate(self.convolutions):
            x = jnp.tanh(convolution(x))
            if number % 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        logits: jax.Array = self.last(jnp.tanh(self.dense(x.reshape(-1))))
        return logits


def model(
    shape: tuple[int, ...], hidden: int, seed: int
) -> tuple[Any, Callable[[Any, jax.Array], jax.Array]]:
    """(parameters, ``apply(parameters, x)``): a perceptron for vectors, a VGG for colour images."""
    rngs = nnx.Rngs(seed)
    made = Perceptron(*shape, hidden, rngs=rngs) if len(shape) == 1 else VGG(rngs=rngs)
    graph, params = nnx.split(made)
    return params, lambda params, x: nnx.merge(graph, params)(x)
