"""Two diagonals that vary smoothly with time, as few parameters.

log r and log d are piecewise linear between knots that lie dense at both ends of a run, where the
best C changes fastest. Their sum p = log r + log d, the diagonal of C, and their difference
q = log d - log r, which shifts weight between early and late steps inside C, are what the error
feels, p about twenty times as much as q; each knot weighs as much as the time between its
neighbours. In units in which all of that is about equal an optimizer needs a third of the steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _check
from mfopt._float64 import float64
from mfopt.optimize.parameterization import Parameterization
from mfopt.strategies import Strategy, TimeScaled

# by `mfopt bench defaults`: 12 knots cost up to 0.3% of the error, 48 gain nothing
KNOTS = 24
SAMPLES, STEPS, TOLERANCE = 2**13, 40, 5e-5
_DIFFERENCE = 4.0  # a step of q in units of a step of p
_ENDS = 0.3  # weight of the knots at the ends, in units of those in the middle


def places(knots: int, n: int) -> np.ndarray:
    """Steps of the knots, shape (knots,): (1 - cos πx)/2 for even x, from 0 to n - 1."""
    return (1 - np.cos(np.pi * np.linspace(0, 1, knots))) / 2 * (n - 1)


@functools.lru_cache(maxsize=16)
def _interpolation(knots: int, n: int) -> np.ndarray:
    """W (n, knots) with log-diagonal = W · values at the knots."""
    at = places(knots, n)
    columns = [np.interp(np.arange(n), at, row) for row in np.eye(knots)]
    return np.stack(columns, axis=1)


@functools.lru_cache(maxsize=16)
def _units(knots: int) -> np.ndarray:
    return 1 / np.sqrt(np.maximum(np.sin(np.pi * np.linspace(0, 1, knots)), _ENDS))


@dataclasses.dataclass(frozen=True)
class Scaling:
    """What the diagonals may do.

    Attributes:
      knots: knots of each, at least 2.
      rows: whether r is free as well; d always is.
    """

    knots: int = KNOTS
    rows: bool = True

    def __post_init__(self) -> None:
        _check.integer("knots", self.knots, at_least=2)


@float64
def scaled(
    strategy: TimeScaled, n: int, base: Parameterization, scaling: Scaling
) -> Parameterization:
    """Parameters of B, then those of p, then those of q.

    The diagonals of ``strategy`` are met at the knots.

    Args:
      strategy: where to begin.
      n: iterations.
      base: parameters of its B.
      scaling: what the diagonals may do.
    """
    at = np.rint(places(scaling.knots, n)).astype(int)
    log_rows, log_columns = (np.log(np.asarray(x))[at] for x in strategy.diagonals(n))
    units = _units(scaling.knots)
    parts = [base.start, (log_columns + log_rows) / units]
    if scaling.rows:
        parts.append((log_columns - log_rows) / (_DIFFERENCE * units))
    return Parameterization(np.concatenate(parts), _Build(base.build, len(base.start), n, scaling))


@dataclasses.dataclass(frozen=True)
class _Build:
    base: Callable[[jax.Array], Strategy]
    size: int
    n: int
    scaling: Scaling

    def __call__(self, x: jax.Array) -> Strategy:
        knots = self.scaling.knots
        weights = jnp.asarray(_interpolation(knots, self.n) * _units(knots))
        inside, p, q = jnp.split(x, [self.size, self.size + knots])
        total = weights @ p
        if not self.scaling.rows:
            return TimeScaled(self.base(inside), columns=jnp.exp(total))
        difference = _DIFFERENCE * (weights @ q)
        return TimeScaled(
            self.base(inside), jnp.exp((total - difference) / 2), jnp.exp((total + difference) / 2)
        )
