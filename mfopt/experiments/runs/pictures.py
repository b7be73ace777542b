"""Image data and the models for it: digits that scikit-learn brings, CIFAR-10 from a folder.

The network for CIFAR-10 is that of Papernot et al. 2021 (tempered sigmoids), which
the papers on correlated noise take: six convolutions with tanh, 550,570 parameters.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras
from mfopt.experiments.runs import cifar
from mfopt.experiments.runs.functional import Apply, Params, functional

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None


class Examples(NamedTuple):
    """``x`` (N, ...) float32 and ``y`` (N,) int32 classes."""

    x: np.ndarray
    y: np.ndarray

    def take(self, index: Any) -> Examples:
        """Return the examples at ``index``."""
        return Examples(self.x[index], self.y[index])


class Pictures(NamedTuple):
    """Data in three parts: rates are chosen on ``validation``, what is reported is on ``test``."""

    train: Examples
    validation: Examples
    test: Examples


def digits(held_out: int = 400) -> Pictures:
    """scikit-learn's 1,797 digits of 8 × 8, half of ``held_out`` each for validation and test."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as problem:
        raise _extras.missing(problem) from None
    x, y = load_digits(return_X_y=True)
    everything = Examples((x / 16 - 0.3).astype(np.float32), y.astype(np.int32))
    return _parts(everything, _check.integer("held_out", held_out, at_least=2, at_most=len(y) - 1))


def blobs(examples: int = 6000, held_out: int = 2000, *, seed: int = 0) -> Pictures:
    """Ten classes in 16 dimensions made here, each two Gaussian clouds: no line divides them."""
    random = np.random.default_rng(_check.seed("seed", seed))
    centres = 0.5 * random.normal(size=(10, 2, 16))
    total = _check.integer("examples", examples) + held_out
    y, cloud = random.integers(10, size=total), random.integers(2, size=total)
    x = centres[y, cloud] + 0.35 * random.normal(size=(total, 16))
    return _parts(Examples(x.astype(np.float32), y.astype(np.int32)), held_out)


def cifar10(folder: str | Path, held_out: int = 5000) -> Pictures:
    """CIFAR-10 from the folder with its python batches; pixels in [-1, 1], (N, 32, 32, 3).

    Raises:
      UsageError: a file is missing, damaged, or holds anything else than arrays.
    """
    *train, test = (Examples(*cifar.batch(Path(folder) / name)) for name in cifar.FILES)
    everything = Examples(*(np.concatenate(part) for part in zip(*train, strict=True)))
    order = np.random.default_rng(0).permutation(len(everything.y))
    _check.integer("held_out", held_out, at_most=len(order) - 1)
    return Pictures(everything.take(order[held_out:]), everything.take(order[:held_out]), test)


def _parts(everything: Examples, held_out: int) -> Pictures:
    order = np.random.default_rng(0).permutation(len(everything.y))
    half = held_out // 2
    return Pictures(
        *(everything.take(o) for o in (order[held_out:], order[:half], order[half:held_out]))
    )


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
        widths = (3, 32, 32, 64, 64, 128, 128)
        for i, (before, after) in enumerate(itertools.pairwise(widths)):
            setattr(self, f"conv_{i}", nnx.Conv(before, after, (3, 3), padding="SAME", rngs=rngs))
        self.dense = nnx.Linear(4 * 4 * 128, 128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(6):
            x = jnp.tanh(getattr(self, f"conv_{i}")(x))
            if i % 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        logits: jax.Array = self.last(jnp.tanh(self.dense(x.reshape(-1))))
        return logits


def model(shape: tuple[int, ...], hidden: int, seed: int) -> tuple[Params, Apply]:
    """The model for one input of ``shape``: a perceptron for vectors, the VGG for colour images."""
    rngs = nnx.Rngs(seed)
    if shape == (32, 32, 3):
        return functional(VGG(rngs=rngs))
    return functional(Perceptron(int(np.prod(shape)), hidden, rngs=rngs))
