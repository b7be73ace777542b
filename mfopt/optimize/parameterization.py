"""Unconstrained parameters for each optimizable strategy: (strategy, n) -> start, and the way back.

The domain (entries >= 0, λ in (0, 1)) is kept by the map itself, so no optimizer can leave it:
positive numbers are exponentials, decays are logistic functions. The diagonal of Toeplitz kinds
is 1: the error does not change when C is scaled.

Two diagonals of a time-scaled C vary smoothly with time, as few parameters. log r and log d are
piecewise linear between knots that lie dense at both ends of a run, where the best C changes
fastest. Their sum p = log r + log d, the diagonal of C, and their difference q = log d - log r,
which shifts weight between early and late steps inside C, are what the error feels, p about twenty
times as much as q; each knot weighs as much as the time between its neighbours. In units in which
all of that is about equal an optimizer needs a third of the steps.

A slope of q says nothing where B can say it too: entry (t, s) of C then has a factor ρ^(t-s), as
where all λ of a BLT, or the coefficients of a Toeplitz matrix lag by lag, are multiplied by ρ. Left
free, searches wandered off along it, until the diagonals spanned 20 decades and coefficients that
stand for 0 did not any more. So q has neither slope nor mean there.

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

from mfopt.strategies import (
    BLT,
    Banded,
    BandedToeplitz,
    ClearedBLT,
    Dense,
    Strategy,
    TimeScaled,
    Toeplitz,
    WaveBLT,
)

Build = Callable[[jax.Array], Strategy]  # parameters -> strategy, differentiable
Tilted = Callable[[Any, float], Strategy]
"""(B, ρ) -> B with entry (t, s) times ρ^(t-s)."""

_FLOOR = 1e-12  # a zero entry starts here: exp() cannot reach 0, and the result is as good
# at 8 × 32 and 16 × 128: 12 knots cost up to 0.3% of the error, 48 gain nothing
KNOTS = 24
_DIFFERENCE = 4.0  # a step of q in units of a step of p
_ENDS = 0.3  # weight of the knots at the ends, in units of those in the middle
_ANGLES = np.pi * np.linspace(0, 1, KNOTS)
_UNITS = 1 / np.sqrt(np.maximum(np.sin(_ANGLES), _ENDS))


class Parameterization(NamedTuple):
    """``start`` (parameters,) and ``build``, the way to the strategy."""

    start: np.ndarray
    build: Build


def _log(coefs: np.ndarray) -> np.ndarray:
    """Logarithms of c_1.. relative to c_0."""
    return np.log(np.maximum(coefs[1:] / coefs[0], _FLOOR))


def _unit(x: jax.Array) -> jax.Array:
    return jnp.concatenate([jnp.ones(1), jnp.exp(x)])


def toeplitz(strategy: Toeplitz, n: int) -> Parameterization:
    """Logarithms of the coefficients of lag 1, 2, …, relative to the diagonal."""
    return Parameterization(_log(np.asarray(strategy.toeplitz_coefs(n))), _build_toeplitz)


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


def blt(strategy: BLT, n: int) -> Parameterization:
    """log ω and the logit of λ."""
    decay = np.clip(np.asarray(strategy.decay), _FLOOR, 1 - _FLOOR)
    scale = np.maximum(np.asarray(strategy.scale), _FLOOR)
    start = np.concatenate([np.log(scale), np.log(decay) - np.log1p(-decay)])
    return Parameterization(start, _build_blt)


def _build_blt(x: jax.Array) -> Strategy:
    scale, decay = jnp.split(x, 2)
    return BLT(jnp.exp(scale), jax.nn.sigmoid(decay))


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


def _places(n: int) -> np.ndarray:
    """Steps of the knots, shape (KNOTS,): (1 - cos πx)/2 for even x, from 0 to n - 1."""
    return (1 - np.cos(_ANGLES)) / 2 * (n - 1)


@functools.lru_cache(maxsize=16)
def _interpolation(n: int) -> np.ndarray:
    """W (n, KNOTS) with log-diagonal = W · values at the knots."""
    positions = _places(n)
    columns = [np.interp(np.arange(n), positions, row) for row in np.eye(KNOTS)]
    return np.stack(columns, axis=1)


def stretched(diagonal: np.ndarray, n: int) -> np.ndarray:
    """The same course over a run of ``n`` steps; the logarithm is linear in between."""
    positions = np.linspace(0, len(diagonal) - 1, n)
    return np.exp(np.interp(positions, np.arange(len(diagonal)), np.log(diagonal)))


def _trend(n: int) -> np.ndarray:
    """Orthonormal constant and slope over ``n`` steps, shape (n, 2)."""
    time = np.linspace(-1.0, 1.0, n) if n > 1 else np.zeros(1)
    length = max(float(np.linalg.norm(time)), 1e-300)
    return np.stack([np.full(n, n**-0.5), time / length], axis=1)


def _levelled(strategy: TimeScaled, n: int, tilted: Tilted) -> TimeScaled:
    """The same C with a q that has neither slope nor mean: B has them.

    Args:
      strategy: any.
      n: iterations.
      tilted: of the kind of its B.
    """
    log_rows, log_columns = np.log(strategy.diagonals(n))
    basis = _trend(n)
    q = log_columns - log_rows
    shift = basis @ (basis.T @ q)
    slope = (shift[-1] - shift[0]) / max(n - 1, 1)
    base = tilted(strategy.base, float(np.exp(-slope / 2)))
    # r takes exp(shift/2), d gives it away; of their product the constant part alone is left
    return TimeScaled(base, np.exp(log_rows + shift / 2), np.exp(log_columns - shift / 2))


def scaled(
    strategy: TimeScaled,
    n: int,
    parameterize: Callable[[Any, int], Parameterization],
    tilted: Tilted | None,
) -> Parameterization:
    """Parameters of B, then those of p, then those of q.

    The diagonals of ``strategy`` are met at the knots.

    Args:
      strategy: where to begin.
      n: iterations.
      parameterize: (its B, n) -> parameters of B.
      tilted: of the kind of B, which has then what q would have of slope and mean; None where B
        can have neither.
    """
    if tilted is not None:
        strategy = _levelled(strategy, n, tilted)
    base = parameterize(strategy.base, n)
    positions = np.rint(_places(n)).astype(int)
    log_rows, log_columns = np.log(strategy.diagonals(n))[:, positions]
    p, q = (log_columns + log_rows) / _UNITS, (log_columns - log_rows) / (_DIFFERENCE * _UNITS)
    build = _BuildScaled(base.build, len(base.start), n, tilted is not None)
    return Parameterization(np.concatenate([base.start, p, q]), build)


@dataclasses.dataclass(frozen=True)
class _BuildScaled:
    base: Build
    size: int
    n: int
    levelled: bool

    def __call__(self, x: jax.Array) -> Strategy:
        weights = jnp.asarray(_interpolation(self.n) * _UNITS)
        inside, p, q = jnp.split(x, [self.size, self.size + KNOTS])
        total, difference = weights @ p, _DIFFERENCE * (weights @ q)
        if self.levelled:
            basis = jnp.asarray(_trend(self.n))
            difference = difference - basis @ (basis.T @ difference)
        return TimeScaled(
            self.base(inside), jnp.exp((total - difference) / 2), jnp.exp((total + difference) / 2)
        )
