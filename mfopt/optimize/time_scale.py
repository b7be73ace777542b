"""Two diagonals that vary smoothly with time, as few parameters.

log r and log d are piecewise linear between knots that lie dense at both ends of a run, where the
best C changes fastest. Their sum p = log r + log d, the diagonal of C, and their difference
q = log d - log r, which shifts weight between early and late steps inside C, are what the error
feels, p about twenty times as much as q; each knot weighs as much as the time between its
neighbours. In units in which all of that is about equal an optimizer needs a third of the steps.

A slope of q says nothing where B can say it too: entry (t, s) of C then has a factor ρ^(t-s), as
where all λ of a BLT, or the coefficients of a Toeplitz matrix lag by lag, are multiplied by ρ. Left
free, searches wandered off along it, until the diagonals spanned 20 decades and coefficients that
stand for 0 did not any more. So q has neither slope nor mean there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.optimize.parameterization import Build, Parameterization
from mfopt.strategies import Strategy, TimeScaled

# at 8 × 32 and 16 × 128: 12 knots cost up to 0.3% of the error, 48 gain nothing
KNOTS = 24
# To 1e-4 searches ended up to 0.12% lower, to 5e-4 up to 0.33% above the best known error (64 × 8,
# ε = 8; 16 × 128, ε = 0.5; two and three seeds).
SAMPLES, STEPS, TOLERANCE = 2**13, 100, 2e-4
_DIFFERENCE = 4.0  # a step of q in units of a step of p
_ENDS = 0.3  # weight of the knots at the ends, in units of those in the middle
_ANGLES = np.pi * np.linspace(0, 1, KNOTS)
_UNITS = 1 / np.sqrt(np.maximum(np.sin(_ANGLES), _ENDS))


def places(n: int) -> np.ndarray:
    """Steps of the knots, shape (KNOTS,): (1 - cos πx)/2 for even x, from 0 to n - 1."""
    return (1 - np.cos(_ANGLES)) / 2 * (n - 1)


@functools.lru_cache(maxsize=16)
def _interpolation(n: int) -> np.ndarray:
    """W (n, KNOTS) with log-diagonal = W · values at the knots."""
    positions = places(n)
    columns = [np.interp(np.arange(n), positions, row) for row in np.eye(KNOTS)]
    return np.stack(columns, axis=1)


def stretched(diagonal: np.ndarray, n: int) -> np.ndarray:
    """The same course over a run of ``n`` steps; the logarithm is linear in between."""
    positions = np.linspace(0, len(diagonal) - 1, n)
    return np.exp(np.interp(positions, np.arange(len(diagonal)), np.log(diagonal)))


Tilted = Callable[[Any, float], Strategy]
"""(B, ρ) -> B with entry (t, s) times ρ^(t-s)."""


def _trend(n: int) -> np.ndarray:
    """Orthonormal constant and slope over ``n`` steps, shape (n, 2)."""
    time = np.linspace(-1.0, 1.0, n) if n > 1 else np.zeros(1)
    length = max(float(np.linalg.norm(time)), 1e-300)
    return np.stack([np.full(n, n**-0.5), time / length], axis=1)


def level(strategy: TimeScaled, n: int, tilted: Tilted) -> TimeScaled:
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
        strategy = level(strategy, n, tilted)
    base = parameterize(strategy.base, n)
    positions = np.rint(places(n)).astype(int)
    log_rows, log_columns = np.log(strategy.diagonals(n))[:, positions]
    p, q = (log_columns + log_rows) / _UNITS, (log_columns - log_rows) / (_DIFFERENCE * _UNITS)
    build = _Build(base.build, len(base.start), n, tilted is not None)
    return Parameterization(np.concatenate([base.start, p, q]), build)


@dataclasses.dataclass(frozen=True)
class _Build:
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
