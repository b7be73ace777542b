"""Groups of K units of any mechanism, from the whole profile of one: the best valid split of ε.

Points of a coarse one-unit profile choose the split over the K steps with the least δ_K; only the
few points of that split are then bounded. See :mod:`mfopt.accounting.closed_form.group` for the
formula, and :mod:`mfopt.accounting.monte_carlo.sampled_chain` where the profile is sampled.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import numpy as np
import scipy

from mfopt.accounting.closed_form.group import GroupProfile, Profile
from mfopt.accounting.loss_distribution.rounds import COARSE, FINE
from mfopt.accounting.model import LARGEST_EPSILON, Bounds, Estimate, LossModel, Plan
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.protocol import DIRECTIONS
from mfopt.errors import FailureError
from mfopt.guarantee import Status

_LINES = 384  # shares of ε that a split may use
_KNOTS = math.log(1.25)  # between the ε of two knots, in log
_LEAST_EPSILON = 1e-6  # of a knot
_ROUNDING = 1e-12  # of ε: the sum of a split's is not above it
_FAINT, _FAINTEST = -1e3, math.log(1e-300)  # log of an estimate of 0, and the least of a bound's


@dataclasses.dataclass(frozen=True)
class DeterministicUnit:
    """A deterministic one-unit profile.

    Attributes:
      profile: (σ, accuracy) -> the profile.
      start: (ε, δ) -> a σ to begin a search at.
    """

    profile: Callable[[float, float], Profile]
    start: Callable[[float, float], float]

    def log_estimates(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """log δ of the remove and of the add direction, on a coarse grid."""
        log_delta = functools.partial(self.profile(noise_multiplier, COARSE).log_delta, epsilon)
        return log_delta("remove"), log_delta("add")


class Chain(LossModel):
    """Groups of K units.

    Args:
      unit: the one-unit profile.
      group_size: K.
      name: what the unit's profile is, for the record.
    """

    status: Status = "bound"
    sampled = False

    def __init__(self, unit: DeterministicUnit, group_size: int, name: str) -> None:
        self.unit, self.group_size = unit, group_size
        self.method = f"group privacy from the whole profile of {name}"
        self.estimator = f"group privacy from the estimated profile of {name}"
        self._shares = np.unique(np.minimum(np.linspace(0, 2.5, _LINES) / group_size, 1.0))
        self._knot = functools.lru_cache(maxsize=256)(self._values)  # of σ, and a knot's number

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        return max(self._split(side, noise_multiplier, epsilon)[2] for side in (0, 1))

    def bounds(
        self, noise_multiplier: float, epsilon: float, plan: Plan | None, trial: Trial
    ) -> Bounds:
        fine = self.unit.profile(noise_multiplier, FINE)
        splits = [self._split(side, noise_multiplier, epsilon) for side in (0, 1)]

        def bound(side: int, split: int) -> float:
            shares, spent, _ = splits[split]
            points, places = np.unique(shares, return_inverse=True)
            logs = [fine.log_delta(float(point) * epsilon, DIRECTIONS[side]) for point in points]
            log_total = scipy.special.logsumexp(spent + np.maximum(logs, _FAINTEST)[places])
            return math.exp(min(float(log_total), 0.0))

        remove, add = bound(0, 0), bound(1, 1)
        # a curve may be far off where the losses of a direction end
        return Bounds(remove, add if add <= remove else min(add, bound(1, 0)), {})

    def find_epsilon(
        self, noise_multiplier: float, delta: float, key: jax.Array, start: float = 2.0
    ) -> Estimate:
        # a group's δ is at least one unit's, at each ε that a search looks at
        log_delta, _ = self.unit.log_estimates(noise_multiplier, LARGEST_EPSILON)
        if log_delta > math.log(delta) + 1e-3:  # another grid may give a bit less
            raise FailureError(
                f"group privacy: no ε up to {LARGEST_EPSILON:g} at σ = {noise_multiplier:g}. "
                "Ask for a larger σ or δ."
            )
        return super().find_epsilon(noise_multiplier, delta, key, start)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.unit.start(epsilon / self.group_size, delta / self.group_size)

    def _values(self, sigma: float, knot: int) -> tuple[float, float]:
        return self.unit.log_estimates(sigma, epsilon_at(knot))

    def _split(
        self, side: int, sigma: float, epsilon: float
    ) -> tuple[np.ndarray, np.ndarray, float]:
        at = self._shares, self.group_size, epsilon
        return best_split(*at, lambda knot: self._knot(sigma, knot)[side])


def best_split(
    shares: np.ndarray, group_size: int, epsilon: float, value: Callable[[int], float]
) -> tuple[np.ndarray, np.ndarray, float]:
    """The split of least δ on the curve through values at knots about ε/K.

    Args:
      shares: of ε that a step may take, increasing.
      group_size, epsilon: K and ε.
      value: log δ of one unit at the knot of this number (:func:`epsilon_at`).

    Returns:
      Its shares of ε, shape (K,), ε_1 + … + ε_{j-1} at each, and log δ of the group.
    """
    points = np.log(np.maximum(shares * epsilon, _LEAST_EPSILON)) / _KNOTS
    low, high = (middle(group_size, epsilon) + step for step in (-1, 1))
    while True:  # more knots where a split ends at the last of them
        knots = np.arange(low, high + 1)
        known = np.flatnonzero((points >= low) & (points <= high))
        values = np.nan_to_num([value(int(knot)) for knot in knots], posinf=0.0, neginf=_FAINT)
        curve = scipy.interpolate.PchipInterpolator(np.exp(knots * _KNOTS), values)
        logs = np.minimum(curve(np.exp(points[known] * _KNOTS)), 0.0)
        lines = GroupProfile(shares[known] * epsilon, logs, group_size).lines_within(epsilon)
        if 0 < known[0] == known[np.min(lines)]:
            low -= len(knots) // 3
        elif known[np.max(lines)] == known[-1] < len(points) - 1:
            high += len(knots) // 3
        else:
            found = shares[known[lines]]
            found = found * (1 - _ROUNDING) / max(np.sum(found), _ROUNDING)  # all that there is
            spent = epsilon * (np.cumsum(found) - found)
            logs = curve(np.clip(found * epsilon, *np.exp(knots[[0, -1]] * _KNOTS)))
            log_total = scipy.special.logsumexp(spent + np.minimum(logs, 0.0))
            return found, spent, min(float(log_total), 0.0)


def middle(group_size: int, epsilon: float) -> int:
    """The number of the knot next to ε/K."""
    return round(math.log(max(epsilon / group_size, _LEAST_EPSILON)) / _KNOTS)


def epsilon_at(knot: int) -> float:
    """The ε of a knot."""
    return math.exp(knot * _KNOTS)
