"""Lower tail of a privacy loss that is sampled as it is, by its convexity in the noise.

Where a shared component is accounted for exactly (:mod:`.likelihood`), adding a unit costs
H(Q, P) = E_Q δ₂(ε + Y'), and Y' = log E_k e^(<m'_k, X> − |m'_k|²/2) is a small number with hardly
any mean mode left to shift X by. So X is drawn from Q itself: values spread little, but they reach
up to 1, and a bound that knows no more pays for that. What is above a ceiling B is bounded apart.

Y' is a convex function of the Gaussian X, so the sets {Y' <= y} are convex, and by Ehrhard's
inequality (1983) y -> Φ⁻¹(Q(Y' <= y)) is concave: below ``low`` it is at most the line through any
upper bound of it at ``low`` and any lower bound at ``high`` > ``low``. Both are read off the same
samples as the mean: the counts of Y' <= low and of Y' <= high are sums of iid numbers in [0, 1],
which Hoeffding's bound by relative entropy (1963, inequality 2.1) covers. At a cut y below ``low``
let the line be a = a(y), with slope k. For any s >= 0

    δ₂(ε + Y') <= e^(−s (ε + Y')) sup_t e^(st) δ₂(t) =: B e^(s (y − Y')),                       (1)

so what exceeds B has at most the mean that it would have, were the line the truth below the cut:

    E (δ₂(ε + Y') − B)₊ <= B E (e^(s (a − Z)/k) − 1)₊ = B (e^(τa + τ²/2) Φ(a + τ) − Φ(a)),      (2)

Z ~ N(0, 1) and τ = s/k. With s = 0 B is 1, and nothing is above it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import scipy

from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.evidence import COARSE, ROUNDING, Point, Sums, Tilt

KIND = "plain"
# In standard deviations from the mean of Y': at 16 × 128, ε from 0.5 to 8, 0.01% of δ is below the
# cut, and B is two to a hundred times the mean.
_CUT, _LOW, _HIGH = -4.5, -1.6, 0.9
_SHARE = 1 / 64  # of β, that either count is wrong with
_ORDERS, _WIDTH = (math.log(1e-3), math.log(1e4)), 1e-2  # of log s or log t that are tried


class Levels(NamedTuple):
    """Values of Y': where B is placed, and what counts are taken of."""

    cut: float
    low: float
    high: float


def uncut(point: Point) -> Tilt:
    """Samples of Q whose values are below 1: for estimates, and for what levels are placed by."""
    return placed(0.0, Levels(0.0, 0.0, 0.0), point)


def placed(order: float, levels: Levels, point: Point) -> Tilt:
    """Samples of Q with the ceiling (1) of order s at the cut."""
    log_ceiling = point.payoff.log_peak(order) - order * (point.epsilon + levels.cut)
    return Tilt(KIND, order, log_ceiling, levels)


def cut(sums: Sums, samples: int, point: Point) -> Tilt:
    """The proposal whose levels fit the mean and the spread of Y' in ``samples`` samples."""
    mean, square = (float(part) / samples for part in sums.losses[2:])
    deviation = math.sqrt(max(square - mean**2, 1e-12))
    levels = Levels(*(mean + at * deviation for at in (_CUT, _LOW, _HIGH)))
    best = lowest_order(lambda order: placed(order, levels, point).log_ceiling)
    return placed(best, levels, point)


def lowest_order(log_ceiling: Callable[[float], float]) -> float:
    """The order of about the least ceiling, which is convex in it."""
    log_order = solve.lowest(lambda x: log_ceiling(math.exp(x)), *_ORDERS, width=_WIDTH)
    return math.exp(log_order)


def with_tail(tilt: Tilt, sums: Sums, samples: int, beta: float) -> tuple[Tilt, float]:
    """``tilt`` with the mean of what is above its ceiling, by the counts of iid samples.

    Args:
      tilt: any; one that nothing exceeds stays as it is.
      sums: over its samples.
      samples: how many.
      beta: failure probability of the whole bound.

    Returns:
      It, and the part of β that is left for the bound of the mean.
    """
    if tilt.kind != KIND or tilt.order == 0:
        return tilt, beta
    share, levels = _SHARE * beta, tilt.detail
    below, inside = (float(count) / samples for count in sums.losses[:2])
    # the rounding of uniforms may move a count as it may move a mean
    at_low = scipy.special.ndtri(_largest_mean(below, samples, share) + COARSE)
    at_high = scipy.special.ndtri(1 - _largest_mean(1 - inside, samples, share) - COARSE)
    slope = (at_high - at_low) / (levels.high - levels.low)
    outside = math.inf
    if slope > 0:
        at_cut = at_low - slope * (levels.low - levels.cut)
        tau = tilt.order / slope
        raised = tau * at_cut + tau**2 / 2 + scipy.special.log_ndtr(at_cut + tau)
        above = math.exp(min(raised, 700.0)) * (1 + ROUNDING) - scipy.special.ndtr(at_cut)
        outside = float(math.exp(min(tilt.log_ceiling, 700.0)) * above)
    return tilt._replace(outside=outside), beta - 2 * share


def _largest_mean(average: float, samples: int, beta: float) -> float:
    """Upper bound of the mean of iid numbers in [0, 1], except with probability β."""
    reach = -math.log(beta) / samples

    def excess(mean: float) -> float:
        cross = scipy.special.xlogy(average, mean) + scipy.special.xlog1py(1 - average, -mean)
        own = -scipy.special.entr(average) - scipy.special.entr(1 - average)
        return float(own - cross) - reach

    if not average < 1 or not excess(1 - 2.0**-53) > 0:
        return 1.0
    return solve.root(excess, max(average, 2.0**-1000), 1 - 2.0**-53)
