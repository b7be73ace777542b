"""One random assignment to bins with orthogonal modes, as a round that composes: C = I, fresh bins.

A unit that is reassigned to b bins in each epoch, with independent noise, releases the pair of
balls-in-bins (:mod:`.allocation`) once for each assignment, independently of all others: the
privacy loss of the whole is the sum of theirs. A pair that dominates one assignment, on a grid of
losses, comes from upper bounds of its privacy profile h(α) = H_α(P, Q) at the points α = e^{kh} of
the grid:

1. h is convex in α, so on each cell it lies below its chord, and the chord below that of upper
   bounds. A bound above the chord of its neighbours may be lowered to it: the greatest convex
   minorant of the bounds is still above h at every α.
2. Outside the grid h is below the chord from (0, 1), since h(0) = 1, and below its last bound.
3. A convex, falling, piecewise linear profile from (0, 1) on is that of atoms at its kinks: where
   the slope rises by q, Q has mass q and P has e^{kh} q. The first slope, -1 + v, leaves Q the mass
   v where P has none; what is left at the end is P's mass of infinite loss.

Below α = 1 the profile is 1 - α + α H_{1/α}(Q, P), so with u = α H_{1/α}(Q, P), whose slopes are
those of h plus 1, tails on both sides keep their digits. One convolution of the b lognormals serves
every threshold of a *block*, those within a factor of its largest, and slopes of a convex minorant
are an isotonic regression.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import distribution
from mfopt.accounting.loss_distribution.allocation import (
    AllocationProfile,
    linear_part,
    log_excess,
    summed_allowance,
)
from mfopt.accounting.loss_distribution.convolution import Composition
from mfopt.accounting.loss_distribution.distribution import LARGEST_WINDOW, LossDistribution
from mfopt.accounting.loss_distribution.mixture import Nodes, Resolution, Round
from mfopt.accounting.loss_distribution.tilting import LOG_WINDOW_TAIL

LEAST = 0.08  # σ, in norms of a mode: with less, losses of an assignment are beyond floats
_FAINT = 1e-290
_NODES = 300  # on either side of 0, for planning
_PART = 0.45  # of the grid's spacing: the lognormals' grid adds a fifth of the grid's own variance
_MOST_CELLS = 1 << 19  # of one lognormal
_MOST_CELLS_BELOW = 1 << 20  # in a lower bound, where cells near 0 can only round down
_FEW_CELLS = 1 << 13  # of one lognormal, for planning
_ROUNDING = 1e-7  # relative, of a block's lesser thresholds: above, a block of their own is taken
_ROUGH = 0.1  # the same for planning
_LARGEST_LOSS = 300.0
_ALONE = 4.0  # loss
_MERGED = 1 / 8  # of the grid's spacing
_LOG_RARE = math.log(1e-8)  # Q-mass of outcomes whose largest lognormal alone is counted
_FAR_STEP = 1e-3  # the least width of their cells, in log: differences of tails keep their digits
_FAR_ROUNDING = 1e-9  # relative, of tails in closed form
_CLEAR = 4.0  # times its error, a mass that a lower bound counts


@dataclasses.dataclass(frozen=True)
class BinAssignment(Round):
    """One unit in one of b ``bins``, orthogonal modes of norm 1, chosen uniformly: a round."""

    plural = "assignments to bins"
    bins: int

    largest = 1.0

    @property
    def components(self) -> int:
        return min(self.bins, 2)

    @property
    def mean(self) -> float:
        return 1 / math.sqrt(self.bins)  # the norm of the mean mode

    @property
    def log_chance(self) -> float:
        return 0.0  # a unit always takes part

    def log_square(self, noise_multiplier: float) -> float:
        """log(1 + χ²): E_Q Λ² = 1 + (e^g - 1)/b."""
        gram = noise_multiplier**-2
        return math.log1p(math.expm1(gram) / self.bins) if gram < 700 else math.inf

    def linear(self, noise_multiplier: float) -> tuple[float, float]:
        """See :meth:`.Round.linear`: the mean of √g z over the bins."""
        return linear_part(self.bins, noise_multiplier**-2)

    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        """(loss, log Q-mass, slope) at nodes, losses increasing; for planning.

        Raises:
          FailureError: σ < :data:`LEAST`.
        """
        if noise_multiplier < LEAST:
            raise _check.FailureError(
                f"σ = {noise_multiplier:.4g} norms of a mode is beyond numerical range: it must be "
                f"at least {LEAST:g}. Use more noise, or a smaller ε."
            )
        return _nodes(self.bins, noise_multiplier, log_tail)

    def discretize(
        self, noise_multiplier: float, step: float, resolution: Resolution
    ) -> LossDistribution:
        # there are no cells of x: the spacing does not matter
        low, high = _reach(self.bins, noise_multiplier, resolution.log_tail)
        start = min(math.floor(max(resolution.ends[0], low) / step), -1)
        stop = max(math.ceil(min(resolution.ends[1], high) / step), 1)
        if stop - start >= LARGEST_WINDOW:
            raise _check.FailureError(
                f"the privacy loss of one assignment spans {(stop - start) * step:.3g}, too wide "
                f"for a grid of spacing {step:.3g}; use more noise"
            )
        index = np.arange(start, stop + 1)
        gram, losses = noise_multiplier**-2, step * index
        allowance = _MOST_CELLS, _ROUNDING, resolution.log_tail
        above = log_hinges(self.bins, gram, losses[losses >= 0], "remove", allowance)
        below = log_hinges(self.bins, gram, -losses[losses <= 0], "add", allowance)
        log_q, infinite, reverse = _kinks(losses, above, below)
        with np.errstate(under="ignore"):
            mass = np.exp(log_q + losses)
        kept = mass > _FAINT
        # Q-mass whose P-mass floats do not carry has no atom to sit on
        faint = float(np.exp(log_q[~kept]).sum())
        infinite += float(mass[~kept].sum())
        return LossDistribution(step, index[kept], mass[kept], infinite, reverse + faint)

    def discretize_below(
        self,
        noise_multiplier: float,
        step: float,
        resolution: Resolution,
        *,
        add: bool,
        rounds: int,
    ) -> LossDistribution:
        # of the sum of the lognormals by cells: Λ is its value, known, over b; where the largest of
        # them is beyond a cut, of that one by cells: a transform rounds such masses away
        high = _reach(self.bins, noise_multiplier, resolution.log_tail)[1]
        top = self.bins * math.exp(min(high, resolution.ends[1], _LARGEST_LOSS))
        profile = AllocationProfile(self.bins, noise_multiplier**-2)
        rare = (
            -float(scipy.special.ndtri_exp(_LOG_RARE - math.log(self.bins)))
            - 0.5 / noise_multiplier
        )
        cut = top if add else min(top, math.exp(min(rare / noise_multiplier, 700.0)))
        width = max(_PART * step * math.sqrt(self.bins), cut / _MOST_CELLS_BELOW)
        single = profile._one(cut, width, "add" if add else "remove", True)
        composed = Composition(((single, self.bins),)).convolve(0.0)
        ratio = (composed.step / self.bins) * np.abs(composed.start + np.arange(composed.law.size))
        positive = ratio > 0
        law, ratio = composed.law[positive] * math.exp(composed.log_scale), ratio[positive]
        # points that are close are told apart no more: the error of a sum grows with its root
        place = np.floor(np.log(ratio) / (_MERGED * step))
        starts = np.flatnonzero(np.diff(place, prepend=np.nan) != 0)
        q, p = (np.add.reduceat(mass, starts) for mass in (law, law * ratio))
        count = np.diff(np.append(starts, law.size))
        # l2 norm of what the transform rounds away, and what its window wraps around
        error = composed.rounding / math.sqrt(composed.law.size) * np.sqrt(count)
        error += 2 * math.exp(-LOG_WINDOW_TAIL)
        in_p = np.maximum.reduceat(ratio, starts) * error
        kept = q > _CLEAR * error
        # no more than there is under the law that gains from them, no less under the other
        masses = (q - error, p + in_p) if add else (p - in_p, q + error)
        # one against a small Λ is left out
        cuts = np.linspace(
            math.log(cut), math.log(top), math.ceil(math.log(top / cut) / max(step, _FAR_STEP)) + 1
        )
        beyond = (np.zeros(1), np.zeros(1)) if add else profile.chances_beyond(cuts)
        far_p, far_q = (-np.diff(chances, append=0.0) for chances in beyond)
        mass_p = np.append(masses[0][kept], far_p * (1 - _FAR_ROUNDING))
        mass_q = np.append(masses[1][kept], far_q * (1 + _FAR_ROUNDING))
        return distribution.from_below(step, mass_p, mass_q, rounds)


def _kinks(
    losses: np.ndarray, log_above: np.ndarray, log_below: np.ndarray
) -> tuple[np.ndarray, float, float]:
    """(log Q-mass at each loss, P-mass at +∞, Q-mass at -∞) of a pair that dominates.

    From bounds at the losses >= 0 (remove) and <= 0 (add). The losses increase, and 0 is among
    them, neither the first nor the last.
    """
    positive, negative = losses[losses > 0], losses[losses < 0]
    above = np.exp(np.append(min(log_above[0], log_below[-1]), log_above[1:]))
    below = np.exp(negative + log_below[:-1])  # u, losses increasing
    at_right, at_left = np.exp([0.0, *positive]), np.exp([*negative, 0.0])
    below = np.append(below, above[0])
    # slopes of u, from the chord to (0, 0) on, and of h
    up, wide = np.diff(below, prepend=0.0), np.diff(at_left, prepend=0.0)
    down, far = np.diff(above), np.diff(at_right)
    rising = scipy.optimize.isotonic_regression(up / wide, weights=wide).x
    falling = scipy.optimize.isotonic_regression(down / far, weights=far).x
    rising, falling = np.clip(rising, 0.0, 1.0), np.clip(falling, -1.0, 0.0)
    # slopes of h go on rising across 0: pools on both sides that do not are made one
    joined = np.append(rising - 1, falling), np.append(wide, far)
    slopes = scipy.optimize.isotonic_regression(joined[0], weights=joined[1]).x
    pooled = slopes == slopes[rising.size]
    if pooled[rising.size - 1]:
        rising[pooled[: rising.size]] = slopes[rising.size] + 1
        falling[pooled[rising.size :]] = slopes[rising.size]
    at_zero = falling[0] - (rising[-1] - 1)
    q = np.concatenate([np.diff(rising), [max(at_zero, 0.0)], np.diff(falling), [-falling[-1]]])
    with np.errstate(divide="ignore"):
        return np.log(q), float(above[-1]), float(rising[0])


# --- many thresholds of one sum ------------------------------------------------------------------


def log_hinges(
    bins: int,
    gram: float,
    epsilons: np.ndarray,
    direction: Literal["remove", "add"],
    allowance: tuple[int, float, float] = (_MOST_CELLS, _ROUNDING, -math.inf),
) -> np.ndarray:
    """Upper bounds of log H_{e^ε} at each ε >= 0, in any order, shape of ``epsilons``.

    What the transform rounds away is a part of each bound. Where single lognormals reach as far as
    the sum does (many bins, little noise of one), the saddle point of the sum leaves 1% of a faint
    value to it, and no block of its own would do better.

    Args:
      bins, gram: b, and g = |m|²/σ².
      epsilons: where; what they are apart says how fine the lognormals' grid is.
      direction: "remove" or "add".
      allowance: cells of one lognormal, with fewer of which the bounds are looser; the relative
        rounding that a bound may have without a convolution of its own; and log of the rounding
        that any bound may have so: what each truncation may lose.
    """
    profile = AllocationProfile(bins, gram)
    most_cells, rounding, log_faint = allowance
    allowed = math.log(rounding), log_faint
    order = np.argsort(epsilons)
    if direction == "remove":
        order = order[::-1]  # thresholds b e^{±ε}, the largest first
    sorted_ = np.asarray(epsilons, dtype=float)[order]
    values = np.empty(sorted_.shape)
    spacings = np.abs(np.gradient(sorted_)) if sorted_.size > 1 else np.full(1, 1e-3)
    sign = 1.0 if direction == "remove" else -1.0
    start, ratio = 0, math.log(2)
    while start < sorted_.size:
        if sorted_[start] > _LARGEST_LOSS:  # closed forms, rough and far out
            values[start] = profile.log_delta(float(sorted_[start]), direction)
            start += 1
            continue
        end = start + int(np.searchsorted(np.abs(sorted_ - sorted_[start])[start:], ratio, "right"))
        resolution = float(np.min(spacings[start:end]))
        served = _block(profile, sorted_[start:end], sign, resolution, most_cells, allowed)
        if not served.size:
            if end - start > 1:
                ratio /= 2
                continue
            # a threshold by itself: its own convolution
            served = np.array([profile.log_delta(float(sorted_[start]), direction)])
        else:
            ratio = math.log(2)
        values[start : start + served.size] = served
        start += served.size
    result = np.empty(values.shape)
    result[order] = np.minimum(values, 0.0)
    return result


def _block(
    profile: AllocationProfile,
    epsilons: np.ndarray,
    sign: float,
    resolution: float,
    most_cells: int,
    allowed: tuple[float, float],
) -> np.ndarray:
    """Bounds at the first of the thresholds, as many as one law is good for; none if it is not."""
    bins = profile.bins
    thresholds = bins * np.exp(sign * epsilons)
    top, bottom = float(thresholds[0]), float(thresholds[-1])
    step = _PART * resolution * bottom / math.sqrt(bins)
    step = max(min(step, top / 64), top / most_cells)
    direction: Literal["remove", "add"] = "remove" if sign > 0 else "add"
    summand = profile._one(top, step, direction, False)
    if summand.mass.size == 0:  # no X is so small
        return np.full(thresholds.shape, -math.inf)
    total = Composition(((summand, bins),))
    centre = sign * math.sqrt(top * bottom)
    if centre >= total.largest:
        return np.empty(0)
    composed = total.convolve(total.tilt_for_epsilon(centre))
    if composed.high <= sign * (bottom if sign > 0 else top):  # the window ends below all of them
        return np.empty(0)
    inside, rounding, lost = log_excess(composed, sign * thresholds)
    values = np.logaddexp.reduce([inside, rounding, lost]) + summed_allowance(composed)
    if sign > 0:
        with np.errstate(divide="ignore"):
            tail, error = profile.beyond(math.log(top), epsilons)
            values = np.logaddexp(values, math.log(bins) + np.log(tail + error))
    to_profile = (epsilons if sign < 0 else 0.0) - math.log(bins)
    values, rounding = values + to_profile, rounding + to_profile
    limit = np.maximum(values + allowed[0], allowed[1])
    good = (sign * thresholds >= composed.low) & (rounding <= limit)
    return values[: thresholds.size if np.all(good) else int(np.argmin(good))]


# --- planning ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _reach(bins: int, noise_multiplier: float, log_tail: float) -> tuple[float, float]:
    """Losses (least, most) beyond which Q and P have no more than about e^log_tail."""
    profile = AllocationProfile(bins, noise_multiplier**-2, 1e-2)
    ends = []
    for direction in ("add", "remove"):
        high = 4 * math.log1p(_deviation(bins, noise_multiplier))
        while high < 2 * _LARGEST_LOSS and profile.log_delta(high, direction) > log_tail:
            high = min(1.5 * high, 2 * _LARGEST_LOSS)  # beyond it floats do not hold e^loss
        ends.append(high)
    return -ends[0], ends[1]


def _deviation(bins: int, noise_multiplier: float) -> float:
    """Standard deviation of Λ under Q."""
    return math.sqrt(math.expm1(min(noise_multiplier**-2, 300.0)) / bins)


@functools.lru_cache(maxsize=16)
def _nodes(bins: int, noise_multiplier: float, log_tail: float) -> Nodes:
    low_end, high_end = _reach(bins, noise_multiplier, log_tail)
    gram = noise_multiplier**-2
    # even in the middle of the law, in proportion to the loss far out
    middle = min(_deviation(bins, noise_multiplier), high_end, -low_end) / 4
    low, high = math.asinh(low_end / middle), math.asinh(high_end / middle)
    x = np.concatenate([np.linspace(low, 0, _NODES + 1), np.linspace(0, high, _NODES + 1)[1:]])
    losses = middle * np.sinh(x)
    losses[_NODES] = 0.0
    right = losses[_NODES:]
    is_near = right <= _ALONE
    log_above = np.empty(right.shape)
    rough = _FEW_CELLS, _ROUGH, log_tail
    log_above[is_near] = log_hinges(bins, gram, right[is_near], "remove", rough)
    # far out one lognormal decides, the others at their mean: good enough to plan with
    shifted = [math.log(bins * math.expm1(e) + 1) for e in right[~is_near]]
    log_above[~is_near] = [gaussian.log_delta(math.sqrt(gram), e) for e in shifted]
    log_below = log_hinges(bins, gram, -losses[: _NODES + 1], "add", rough)
    log_q, _, _ = _kinks(losses, log_above, log_below)
    kept = log_q > -690
    return losses[kept], log_q[kept], np.zeros(int(np.count_nonzero(kept)))
