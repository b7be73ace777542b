"""Exponential tilting of a sum of independent losses: saddle points and Chernoff's bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mfopt.accounting import solve

# Tilted mass that may lie outside the FFT window on either side: e^-32 = 1e-14.
LOG_WINDOW_TAIL = 32.0
_ROUGH = 1e-2  # relative accuracy of an order
_SHORT = 1 << 14  # below it einsum takes longer to begin than to sum


class _RoundLaw(Protocol):
    """Law of the loss of one round: losses, increasing, and the log of their masses."""

    @property
    def losses(self) -> np.ndarray: ...

    @property
    def log_mass(self) -> np.ndarray: ...


class Tilting:
    """A sum of independent losses, by the law of each and how often it occurs.

    Attributes:
      parts: (law of one round, number of rounds), of each kind.
    """

    parts: tuple[tuple[_RoundLaw, int], ...]

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite total loss."""
        return float(sum(count * part.losses[-1] for part, count in self.parts))

    @functools.cached_property
    def least(self) -> float:
        """The least finite total loss."""
        return float(sum(count * part.losses[0] for part, count in self.parts))

    def log_moment(self, tilt: float) -> float:
        """κ(θ) of the composition: log E e^{θ Y} over the finite losses."""
        return sum(
            count * log_sum_exp(tilt * part.losses + part.log_mass) for part, count in self.parts
        )

    def tilted_moments(self, tilt: float) -> tuple[float, float]:
        """Mean and variance of Y under the law tilted by θ."""
        mean = variance = 0.0
        for part, count in self.parts:
            weight = tilted(part, tilt)
            centre = dot(weight, part.losses)
            mean += count * centre
            variance += count * dot(weight, (part.losses - centre) ** 2)
        return mean, variance

    def tilt_for_epsilon(self, epsilon: float) -> float:
        """θ >= 0 whose tilted mean is ``epsilon`` (0 if the mean is larger): the saddle point.

        1 where no loss reaches ``epsilon``: nothing is to be resolved there.
        """
        if epsilon >= self.largest:
            return 1.0
        return _increasing_root(lambda tilt: self.tilted_moments(tilt)[0] - epsilon)

    def chernoff(self, tilt: float, side: int, finest: float = 1e-12) -> float:
        """A loss beyond which the tilted law has mass at most e^-32, above or below.

        ``finest`` is the least standard deviation that differs from 0.
        """
        base = self.log_moment(tilt)
        spread = math.sqrt(max(self.tilted_moments(tilt)[1], finest**2))

        def bound(s: float) -> float:
            return (self.log_moment(tilt + side * s) - base + LOG_WINDOW_TAIL) / s

        return side * walk_down(bound, math.sqrt(2 * LOG_WINDOW_TAIL) / spread)


def log_sum_exp(exponents: np.ndarray) -> float:
    """log Σ e^x, shape (N,): scipy's takes up to twenty times as long where N is small."""
    peak = float(exponents.max())
    return peak + math.log(np.exp(exponents - peak).sum()) if math.isfinite(peak) else peak


def tilted(part: _RoundLaw, tilt: float) -> np.ndarray:
    """The law of one round tilted by θ, of sum 1, shape (N,)."""
    exponents = tilt * part.losses + part.log_mass
    weight: np.ndarray = np.exp(exponents - exponents.max())
    weight /= weight.sum()
    return weight


def dot(weights: np.ndarray, values: np.ndarray) -> float:
    """Σ left · right, shapes (N,), in this thread.

    A BLAS wakes its threads for it, and waiting for them took longer than the sum.
    """
    if weights.size <= _SHORT:
        return float((weights * values).sum())
    return float(np.einsum("i,i->", weights, values))


def log_ceiling(tilt: float) -> float:
    """log of the largest value of e^{-θ y} (1 - e^{-y}) over y > 0."""
    return -tilt * math.log1p(1 / tilt) - math.log1p(tilt) if tilt > 0 else 0.0


def walk_down(function: Callable[[float], float], start: float) -> float:
    """Smallest value met by walking from ``start`` in factors of 2 downhill."""
    best = function(start)
    for factor in (0.5, 2.0):
        point = start
        for _ in range(20):
            point *= factor
            value = function(point)
            if not value < best:
                break
            best = value
    return best


def _increasing_root(function: Callable[[float], float]) -> float:
    """Root >= 0 of an increasing function to 1%, 0 if it is >= 0 there, capped at 1e12."""

    def value(x: float) -> float:
        result = function(x)
        return math.inf if math.isnan(result) else result  # beyond what floats tell apart

    if value(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while value(high) < 0:
        low, high = high, 4 * high
        if high > 1e12:
            return low
    return solve.root(value, low, high, relative=_ROUGH)
