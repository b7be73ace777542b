"""Unconstrained parameters for each optimizable strategy: (strategy, n) -> start, and the way back.

The domain (entries >= 0, λ in (0, 1)) is kept by the map itself, so no optimizer can leave it:
positive numbers are exponentials, decays are logistic functions. The diagonal of Toeplitz kinds
is 1: the error does not change when C is scaled.

Maps compare equal when they do the same, so that one compiled objective serves them all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._float64 import float64
from mfopt.strategies import (
    BLT,
    Banded,
    BandedToeplitz,
    ClearedBLT,
    Dense,
    Strategy,
    Toeplitz,
    WaveBLT,
)

Build = Callable[[jax.Array], Strategy]  # parameters -> strategy, differentiable
_FLOOR = 1e-12  # a zero entry starts here: exp() cannot reach 0, and the result is as good


class Parameterization(NamedTuple):
    """``start`` (parameters,) and ``build``, the way to the strategy."""

    start: np.ndarray
    build: Build


@float64
def built(build: Build, parameters: np.ndarray) -> Strategy:
    """The strategy of these parameters, of numpy arrays.

    Compiled as one: operation by operation its first call would take seconds.
    """
    point: Any = np.asarray(parameters)
    return _compiled(build)(point)


_compiled = functools.lru_cache(maxsize=16)(_quick.jit)


def _log(coefs: np.ndarray) -> np.ndarray:
    """Logarithms of c_1.. relative to c_0."""
    return np.log(np.maximum(coefs[1:] / coefs[0], _FLOOR))


def _unit(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.ones(1), jnp.exp(x)])


@float64
def toeplitz(strategy: Toeplitz, n: int) -> Parameterization:
    """Logarithms of the coefficients of lag 1, 2, …, relative to the diagonal."""
    return Parameterization(_log(np.asarray(strategy.toeplitz_coefs(n))), _build_toeplitz)


@float64
def banded_toeplitz(strategy: BandedToeplitz, n: int) -> Parameterization:
    """Logarithms of the coefficients inside the band, relative to the diagonal, made independent.

    As logarithms z_k, k >= 1, they are badly conditioned: the error feels all lags of one octave
    about alike, each of them alone the less the more there are. With x of unit covariance z has
    covariance min(j, k)/max(j, k), lags counted from 2: smooth in log k, as the best C is.
    """
    logs, lags = _log(np.asarray(strategy.coefs)[:n]), np.arange(min(len(strategy.coefs), n))
    start = np.diff((lags[1:] + 1) * logs, prepend=0.0) / _weights(len(logs))
    return Parameterization(start, _build_banded_toeplitz)


def _weights(count: int) -> np.ndarray:
    """w with (k + 1) z_k = Σ_{j<=k} w_j x_j, shape (count,): a chain of correlations k/(k + 1)."""
    weights: np.ndarray = np.sqrt(2.0 * np.arange(1, count + 1) + 1)
    weights[:1] = 2.0
    return weights


def _build_toeplitz(x: jax.Array) -> Strategy:
    return Toeplitz(_unit(x))


def _build_banded_toeplitz(x: jax.Array) -> Strategy:
    sums = jnp.cumsum(_weights(len(x)) * x)
    return BandedToeplitz(_unit(sums / (jnp.arange(len(x)) + 2)))


@float64
def blt(strategy: BLT, n: int) -> Parameterization:
    """log ω and the logit of λ."""
    decay = np.clip(np.asarray(strategy.decay), _FLOOR, 1 - _FLOOR)
    scale = np.maximum(np.asarray(strategy.scale), _FLOOR)
    start = np.concatenate([np.log(scale), np.log(decay) - np.log1p(-decay)])
    return Parameterization(start, _build_blt)


def _build_blt(x: jax.Array) -> Strategy:
    scale, decay = jnp.split(x, 2)
    return BLT(jnp.exp(scale), jax.nn.sigmoid(decay))


@float64
def cleared_blt(strategy: ClearedBLT, n: int) -> Parameterization:
    """log ω and the logit of λ; periods and blocks stay."""
    start = blt(BLT(strategy.scale, strategy.decay), n).start
    return Parameterization(start, _BuildCleared(strategy.periods, strategy.blocks))


@dataclasses.dataclass(frozen=True)
class _BuildCleared:
    periods: tuple[int, ...]
    blocks: tuple[int, ...]

    def __call__(self, x: jax.Array) -> Strategy:
        scale, decay = jnp.split(x, 2)
        return ClearedBLT(jnp.exp(scale), jax.nn.sigmoid(decay), self.periods, self.blocks)


@float64
def wave_blt(strategy: WaveBLT, n: int) -> Parameterization:
    """log ω, the logit of λ, and the wave's log w, logit of ρ and m, log θ and φ."""
    scale = np.maximum(np.append(strategy.scale, strategy.weight), _FLOOR)
    shares = np.clip(
        np.concatenate([np.asarray(strategy.decay), [strategy.damping, strategy.depth]]),
        _FLOOR,
        1 - _FLOOR,
    )
    turning = [np.log(max(float(strategy.frequency), _FLOOR)), float(strategy.phase)]
    start = [np.log(scale), np.log(shares) - np.log1p(-shares), turning]
    return Parameterization(np.concatenate(start), _BuildWave(len(strategy.scale)))


@dataclasses.dataclass(frozen=True)
class _BuildWave:
    exponentials: int

    def __call__(self, x: jax.Array) -> Strategy:
        scale, shares, turning = jnp.split(
            x, np.cumsum([self.exponentials + 1, self.exponentials + 2])
        )
        scale, shares = jnp.exp(scale), jax.nn.sigmoid(shares)
        return WaveBLT(
            scale[:-1],
            shares[:-2],
            scale[-1],
            shares[-2],
            shares[-1],
            jnp.exp(turning[0]),
            turning[1],
        )


@float64
def banded(strategy: Banded, n: int) -> Parameterization:
    """Logarithms of the entries inside the band."""
    # entries below row n have no effect and keep their start
    entries = np.asarray(strategy.entries(n))
    start = np.log(np.maximum(entries, _FLOOR)).reshape(-1)
    return Parameterization(start, _BuildBanded(entries.shape))


@dataclasses.dataclass(frozen=True)
class _BuildBanded:
    shape: tuple[int, ...]

    def __call__(self, x: jax.Array) -> Strategy:
        return Banded(jnp.exp(x).reshape(self.shape))


@float64
def dense(strategy: Dense, n: int) -> Parameterization:
    """Logarithms of all entries."""
    # a full square of parameters: the half above the diagonal has no effect, and masking it is
    # far cheaper than scattering a packed triangle
    start = np.log(np.maximum(np.asarray(strategy.materialize(n)), _FLOOR))
    start[np.triu_indices(n, 1)] = 0.0
    return Parameterization(start.reshape(-1), _BuildDense(n))


@dataclasses.dataclass(frozen=True)
class _BuildDense:
    n: int

    def __call__(self, x: jax.Array) -> Strategy:
        return Dense(jnp.tril(jnp.exp(x.reshape(self.n, self.n))))
