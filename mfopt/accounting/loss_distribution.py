"""Discretized privacy losses and their composition, with every rounding on the private side.

A pair of distributions (P, Q) is replaced by a discrete pair on the grid of losses
``step * k`` that *dominates* it: mass whose loss lies between two grid points is split over
the two so that both its P-mass and its Q-mass stay what they are (the "connect the dots"
discretization of Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, here as a balayage). One
discrete pair serves both directions: seen from Q, the atom of P-mass p at loss l is an atom of
mass p e^{-l} at loss -l.

Composition is a convolution, done by FFT on a finite window after exponential tilting, so that
δ keeps its digits however small it is. What the window loses is bounded by Chernoff's
inequality and added to δ; what wraps around into the window can only raise it.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from scipy import fft, optimize, special

from mfopt import _check

# Tilted mass that may lie outside the FFT window on either side: e^-32 = 1e-14.
_LOG_WINDOW_TAIL = 32.0
_LARGEST_WINDOW = 1 << 25
_EPS = float(np.finfo(np.float64).eps)
# Relative accuracy of one round's masses, counted once a round on the private side.
_MASS_ACCURACY = 1e-13
# Masses below this are no longer accurate (close to the smallest normal float).
_FAINT = 1e-290


@dataclasses.dataclass(frozen=True)
class LossDistribution:
    """A discrete pair (P, Q) by the loss of its atoms.

    Attributes:
      step: grid spacing of the loss.
      index: shape (N,), increasing integers; atom i has loss ``step * index[i]``.
      mass: shape (N,), P-mass of the atoms; the Q-mass is ``mass * exp(-loss)``.
      infinite: P-mass where Q has none (loss +∞), all truncation included.
      reverse_infinite: Q-mass where P has none: the same for the other direction.
      smoothing: shape (N,), P-mass times the variance that the discretization added near the
        atom: what the error of the discretization is judged by.
    """

    step: float
    index: np.ndarray
    mass: np.ndarray
    infinite: float
    reverse_infinite: float
    smoothing: np.ndarray

    @property
    def losses(self) -> np.ndarray:
        """Loss of each atom, shape (N,)."""
        return self.step * self.index

    def reverse(self) -> LossDistribution:
        """The pair (Q, P): the other adjacency direction."""
        mass = np.exp(np.log(self.mass) - self.losses)[::-1]
        kept = mass > _FAINT
        smoothing = (self.smoothing / self.mass)[::-1][kept] * mass[kept]
        return LossDistribution(
            self.step,
            -self.index[::-1][kept],
            mass[kept],
            self.reverse_infinite + float(mass[~kept].sum()),
            self.infinite,
            smoothing,
        )

    def log_moment(self, tilt: float) -> float:
        """κ(θ) = log Σ mass e^{θ loss}, of one round, over the finite atoms."""
        return float(special.logsumexp(tilt * self.losses, b=self.mass))


def from_cells(
    step: float, loss: np.ndarray, mass_p: np.ndarray, mass_q: np.ndarray
) -> LossDistribution:
    """The discrete pair that dominates (P, Q) cut into cells of increasing loss.

    Args:
      step: grid spacing.
      loss: shape (J + 1,), increasing: the loss at the borders of the J cells, where the loss
        inside cell j is known to lie in [loss[j], loss[j+1]]. -inf and +inf are allowed at the
        ends.
      mass_p, mass_q: shape (J,), P- and Q-mass of the cells.
    """
    # Where the P-mass is below what floats can carry, the Q-mass has no atom to sit on: it becomes
    # an infinite loss of the other direction.
    faint = mass_p < _FAINT
    faint_p, faint_q = float(mass_p[faint].sum()), float(mass_q[faint].sum())
    mass_p, mass_q = np.where(faint, 0.0, mass_p), np.where(faint, 0.0, mass_q)
    lower, upper = loss[:-1], loss[1:]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        width = upper - lower
        # The one split over the two borders that keeps both masses. An open cell needs no other
        # formula: below -inf there is no P-mass to place, at +inf the Q-mass stays behind.
        to_upper = (mass_p - np.exp(np.log(mass_q) + lower)) / -np.expm1(-width)
    to_upper = np.where(width > 0, np.clip(to_upper, 0.0, mass_p), mass_p)
    at_border = np.zeros(loss.shape)
    at_border[1:] += to_upper
    at_border[:-1] += mass_p - to_upper
    share = np.divide(to_upper, mass_p, out=np.zeros_like(mass_p), where=mass_p > 0)
    spread = np.zeros(loss.shape)
    spread[1:] = to_upper * (1 - share) * np.where(np.isfinite(width), width, 0.0) ** 2
    infinite = faint_p + (float(at_border[-1]) if np.isposinf(loss[-1]) else 0.0)
    reverse_infinite = faint_q
    if np.isneginf(loss[0]) and mass_p[0] > 0:
        carried = math.exp(math.log(mass_p[0]) - loss[1])
        reverse_infinite += max(float(mass_q[0]) - carried, 0.0)
    finite = np.isfinite(loss) & (at_border > 0)
    return _to_grid(
        step, loss[finite], at_border[finite], spread[finite], infinite, reverse_infinite
    )


def from_atoms(
    step: float, loss: np.ndarray, mass: np.ndarray, infinite: float = 0.0,
    reverse_infinite: float = 0.0,
) -> LossDistribution:  # fmt: skip
    """The grid version of a discrete pair with P-mass ``mass`` at ``loss``, shapes (N,)."""
    return _to_grid(step, loss, mass, np.zeros_like(mass), infinite, reverse_infinite)


def _to_grid(
    step: float,
    loss: np.ndarray,
    mass: np.ndarray,
    spread: np.ndarray,
    infinite: float,
    reverse_infinite: float,
) -> LossDistribution:
    position = loss / step
    below = np.floor(position)
    above_lower = (position - below) * step
    share = np.expm1(-above_lower) / math.expm1(-step)  # of the P-mass, to the upper grid point
    index = below.astype(np.int64)
    first = int(index.min())
    size = int(index.max()) - first + 2
    if size > _LARGEST_WINDOW:
        raise _check.FailureError(
            f"the privacy loss of one round spans {size * step:.3g}, too wide for a grid of "
            f"spacing {step:.3g}; ask for a lower accuracy or use more noise"
        )
    offset = index - first
    variance = mass * above_lower * (step - above_lower) + spread
    total = np.bincount(offset, mass * (1 - share), size)
    total += np.bincount(offset + 1, mass * share, size)
    smooth = np.bincount(offset, variance, size)
    kept = np.flatnonzero(total > _FAINT)
    return LossDistribution(
        step, kept + first, total[kept], infinite, reverse_infinite, smooth[kept]
    )


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
        if size > _LARGEST_WINDOW:
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


def normal_masses(borders: np.ndarray) -> np.ndarray:
    """Standard normal probability of consecutive intervals, accurate in both tails."""
    from_below = special.ndtr(-np.abs(borders))
    lower, upper = from_below[:-1], from_below[1:]
    left, right = borders[:-1], borders[1:]
    inside = 1 - lower - upper  # an interval that contains 0
    return np.where(right <= 0, upper - lower, np.where(left >= 0, lower - upper, inside))
