"""Composition of discretized losses.

A convolution, done by FFT on a finite window after exponential tilting, so that δ keeps its
digits however small it is. What the window loses is bounded by Chernoff's inequality and added to
δ; what wraps around into the window can only raise it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import fft, optimize, special

from mfopt import _check
from mfopt.accounting.loss_distribution.distribution import LARGEST_WINDOW, LossDistribution

# Tilted mass that may lie outside the FFT window on either side: e^-32 = 1e-14.
_LOG_WINDOW_TAIL = 32.0
_EPS = float(np.finfo(np.float64).eps)
# Relative accuracy of one round's masses, counted once a round on the private side.
_MASS_ACCURACY = 1e-13


@dataclasses.dataclass(frozen=True)
class Composition:
    """Rounds that compose, possibly of several kinds, on one grid; one direction.

    Attributes:
      parts: (distribution of one round, number of rounds), all with the same ``step``.
    """

    parts: tuple[tuple[LossDistribution, int], ...]

    def __post_init__(self) -> None:
        if len({part.step for part, _ in self.parts}) != 1:
            raise _check.reject("parts", len(self.parts), "all need one grid spacing")

    @property
    def step(self) -> float:
        return self.parts[0][0].step

    def reverse(self) -> Composition:
        """The other direction."""
        return Composition(tuple((part.reverse(), count) for part, count in self.parts))

    @functools.cached_property
    def log_finite(self) -> float:
        """log of the P-mass with finite total loss."""
        return sum(count * math.log1p(-part.infinite) for part, count in self.parts)

    @property
    def infinite(self) -> float:
        """P-mass with infinite total loss, a part of every δ."""
        return -math.expm1(self.log_finite)

    @functools.cached_property
    def largest(self) -> float:
        """The largest finite total loss."""
        return float(sum(count * part.losses[-1] for part, count in self.parts))

    def log_moment(self, tilt: float) -> float:
        """κ(θ) of the composition: log E e^{θ Y} over the finite losses."""
        return sum(count * part.log_moment(tilt) for part, count in self.parts)

    def tilted_moments(self, tilt: float) -> tuple[float, float, float]:
        """Mean and variance of Y under the law tilted by θ, and the variance due to the grid."""
        mean = variance = added = 0.0
        for part, count in self.parts:
            losses = part.losses
            log_weight = tilt * losses + np.log(part.mass)
            weight = np.exp(log_weight - log_weight.max())
            total = weight.sum()
            added += count * float((weight / part.mass) @ part.smoothing) / total
            weight /= total
            centre = float(weight @ losses)
            mean += count * centre
            variance += count * float((weight * np.abs(losses - centre)) @ np.abs(losses - centre))
        return mean, variance, added

    def tilt_for_epsilon(self, epsilon: float) -> float:
        """θ >= 0 whose tilted mean is ``epsilon`` (0 if the mean is larger): the saddle point.

        1 where no loss reaches ``epsilon``: nothing is to be resolved there.
        """
        if epsilon >= self.largest:
            return 1.0
        return _increasing_root(lambda tilt: self.tilted_moments(tilt)[0] - epsilon)

    def tilt_for_delta(self, log_delta: float) -> float:
        """θ >= 0 whose Chernoff bound on P(Y > tilted mean) is about ``log_delta``."""

        def excess(tilt: float) -> float:
            mean, variance, _ = self.tilted_moments(tilt)
            # the prefactor of the tail: E of (1 - e^{-y}) over a lattice-free exponential tail
            factor = math.log(max(tilt * (1 + tilt) * math.sqrt(max(variance, 1e-300)), 1.0) + 1.0)
            return -(self.log_moment(tilt) - tilt * mean - factor) + log_delta

        return _increasing_root(excess)

    def convolve(self, tilt: float) -> ComposedLosses:
        """The composed losses on a window, tilted by ``tilt`` >= 0."""
        base = self.log_moment(tilt)
        _, variance, added = self.tilted_moments(tilt)
        spread = math.sqrt(max(variance, self.step**2))
        highest = self.largest
        lowest = sum(count * part.losses[0] for part, count in self.parts)
        high = min(self._chernoff(tilt, base, spread, +1), highest)
        low = max(self._chernoff(tilt, base, spread, -1), lowest)
        start = math.floor(low / self.step)
        needed = math.ceil(high / self.step) - start + 1
        size = fft.next_fast_len(max(needed, 16), real=True)
        if size > LARGEST_WINDOW:
            raise _check.FailureError(
                f"composing needs a window of {size} grid points of {self.step:.3g}; "
                "ask for a lower accuracy"
            )
        # Wrapping one round into the window commutes with cyclic convolution.
        spectrum: np.ndarray = np.ones(size // 2 + 1, dtype=np.complex128)
        rounds = 0
        shift = 0
        for part, count in self.parts:
            weight = np.exp(tilt * part.losses + np.log(part.mass) - part.log_moment(tilt))
            wrapped = np.bincount((part.index - part.index[0]) % size, weight, size)
            spectrum *= fft.rfft(wrapped, overwrite_x=True) ** count
            shift += int(part.index[0]) * count
            rounds += count
        # rounding of the transform and of the power, as an l1 distance of the tilted law
        power_norm = math.sqrt(2 * float(np.sum(np.abs(spectrum) ** (2 - 2 / max(rounds, 1)))))
        rounding = 2 * _EPS * (rounds + 1) * (math.log2(size) + 4) * power_norm
        law = fft.irfft(spectrum, size, overwrite_x=True)
        # law[k] is the mass of all losses step * (shift + k + m size); place them from start on
        law = np.roll(law, -((start - shift) % size))
        np.maximum(law, 0.0, out=law)
        end = start + size
        beyond = end * self.step > highest
        lost = -math.inf if beyond else self._log_upper_tail(tilt, spread, end)
        return ComposedLosses(
            step=self.step, start=start, law=law, tilt=tilt, log_scale=base,
            log_lost=lost, infinite=self.infinite,
            rounding=rounding, allowance=_MASS_ACCURACY * rounds,
            epsilon_error=0.5 * (1 + tilt) * added, largest=highest,
        )  # fmt: skip

    def _chernoff(self, tilt: float, base: float, spread: float, side: int) -> float:
        """A loss beyond which the tilted law has mass at most e^-32, above or below."""

        def bound(s: float) -> float:
            return (self.log_moment(tilt + side * s) - base + _LOG_WINDOW_TAIL) / s

        return side * walk_down(bound, math.sqrt(2 * _LOG_WINDOW_TAIL) / spread)

    def _log_upper_tail(self, tilt: float, spread: float, end: int) -> float:
        """Chernoff bound on log P(Y >= step * end), untilted."""

        def bound(s: float) -> float:
            return self.log_moment(tilt + s) - (tilt + s) * self.step * end

        return walk_down(bound, math.sqrt(2 * _LOG_WINDOW_TAIL) / spread)

    def log_delta_bound(self, epsilon: float, tilt: float, *, infinite: bool = True) -> float:
        """Chernoff bound of log δ(ε), without any convolution; valid for every tilt >= 0.

        Without ``infinite`` the mass of infinite loss is left out: an estimate, no bound.
        """
        log_delta = self.log_moment(tilt) - tilt * epsilon + _log_ceiling(tilt)
        if infinite and self.infinite > 0:
            log_delta = float(np.logaddexp(log_delta, math.log(self.infinite)))
        return min(log_delta, 0.0)


def _log_ceiling(tilt: float) -> float:
    """log of the largest value of e^{-θ y} (1 - e^{-y}) over y > 0."""
    return float(special.xlogy(tilt, tilt) - special.xlog1py(1 + tilt, tilt))


def walk_down(function, start: float) -> float:  # type: ignore[no-untyped-def]
    """Smallest value met by walking from ``start`` in factors of 2 downhill."""
    best = function(start)
    for factor in (0.5, 2.0):
        at = start
        for _ in range(20):
            at *= factor
            value = function(at)
            if not value < best:
                break
            best = value
    return best


def _increasing_root(function) -> float:  # type: ignore[no-untyped-def]
    """Root >= 0 of an increasing function to 1%, 0 if it is >= 0 there, capped at 1e6."""
    if function(0.0) >= 0:
        return 0.0
    low, high = 0.0, 1.0
    while function(high) < 0:
        low, high = high, 4 * high
        if high > 1e6:
            return low
    return float(optimize.brentq(function, low, high, xtol=1e-290, rtol=1e-2, maxiter=2000))


@dataclasses.dataclass(frozen=True)
class ComposedLosses:
    """A composed loss on its window; gives upper bounds of δ(ε) for ε inside the window.

    P(Y = step*(start + k)) = law[k] e^{log_scale - tilt * loss}, up to ``rounding`` in l1 norm
    of ``law``, up to the mass e^log_lost beyond the window, and up to a factor e^allowance.
    ``epsilon_error`` estimates by how much the discretization raised ε; ``largest`` is the
    largest finite loss.
    """

    step: float
    start: int
    law: np.ndarray
    tilt: float
    log_scale: float
    log_lost: float
    infinite: float
    rounding: float
    allowance: float
    epsilon_error: float
    largest: float

    def log_delta(self, epsilon: float) -> float:
        """Upper bound of log δ(ε), finite far below the smallest float.

        0 (that is, δ = 1) for ε below the window: the losses between ε and it are not known.
        """
        first = math.floor(epsilon / self.step) + 1 - self.start
        if first < 0:
            return 0.0
        if epsilon >= self.largest:
            return math.log(self.infinite) if self.infinite > 0 else -math.inf
        reference = self.log_scale - self.tilt * epsilon
        total = 0.0
        if first < self.law.size:
            above = self.step * (self.start + np.arange(first, self.law.size)) - epsilon
            with np.errstate(under="ignore"):
                total = float(self.law[first:] @ (np.exp(-self.tilt * above) * -np.expm1(-above)))
        rounding = self.rounding * math.exp(_log_ceiling(self.tilt))
        terms = [reference + math.log(total + rounding), self.log_lost]
        if self.infinite > 0:
            terms.append(math.log(self.infinite))
        return min(float(special.logsumexp(terms)) + self.allowance, 0.0)
