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

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.closed_form import group
from mfopt.accounting.loss_distribution.rounds import COARSE, FINE
from mfopt.accounting.model import LARGEST_EPSILON
from mfopt.accounting.monte_carlo.protocol import DIRECTIONS
from mfopt.accounting.profile import Direction, Profile
from mfopt.errors import FailureError

_WIDTH = 1e-4  # relative, of σ and ε
_LINES = 384  # shares of ε that a split may use
_KNOTS = math.log(1.25)  # between the ε of two knots, in log
_LEAST_EPSILON = 1e-6  # of a knot
_ROUNDING = 1e-12  # of ε: the sum of a split's is not above it
_FAINT, _FAINTEST = -1e3, math.log(1e-300)  # log of an estimate of 0, and the least of a bound's


@dataclasses.dataclass(frozen=True)
class GroupBound(DeterministicBound):
    """Groups of K units.

    Attributes:
      unit: bound of one unit.
      group_size: K.
      name: what the unit's profile is, for the record.
    """

    unit: DeterministicBound
    group_size: int
    name: str
    exact = False
    tolerance = _WIDTH

    @property
    def method(self) -> str:  # type: ignore[override]
        return f"group privacy from the whole profile of {self.name}"

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> _GroupedProfile:
        return _GroupedProfile(self.unit, self.group_size, noise_multiplier, accuracy)

    def without_noise(self, delta: float) -> str | None:
        # at most K δ by the split that leaves ε to the last step
        return self.unit.without_noise(delta / self.group_size)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.unit.guess(epsilon / self.group_size, delta / self.group_size)


@dataclasses.dataclass(frozen=True)
class _GroupedProfile(Profile):
    """Profile of a group by that of one unit: a split on a coarse grid, bounded on a fine one."""

    unit: DeterministicBound
    group_size: int
    noise_multiplier: float
    accuracy: float = FINE

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε), ε >= 0, the larger of both directions unless one is named."""
        if direction == "remove":
            return self._bound(epsilon, "remove", "remove")
        # a curve may be far off where the losses of a direction end
        remove = self._bound(epsilon, "remove", "remove") if direction is None else -math.inf
        add = self._bound(epsilon, "add", "add")
        if not add <= remove:
            add = min(add, self._bound(epsilon, "add", "remove"))
        return float(np.max([remove, add]))  # what is no number stays none

    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0 with δ(ε) <= ``delta``, to relative 1e-4.

        Raises:
          FailureError: there is none in the range of the search.
        """
        target = math.log(delta)
        # a group's δ is at least one unit's; another grid may give a bit less
        if self._coarse.log_delta(LARGEST_EPSILON, "remove") > target + 1e-3:
            raise FailureError(
                f"group privacy: no ε up to {LARGEST_EPSILON:g} at σ = {self.noise_multiplier:g}. "
                "Ask for a larger σ or δ."
            )
        search = functools.partial(
            solve.smallest, name="epsilon", least=_WIDTH, largest=LARGEST_EPSILON
        )
        estimate = search(lambda epsilon: self._estimate(epsilon) - target, 2.0, relative=1e-3)
        return search(
            lambda epsilon: self.log_delta(epsilon) - target,
            estimate,
            relative=_WIDTH,
            growth=1.001,
        )

    def _estimate(self, epsilon: float) -> float:
        """About log δ(ε), by the coarse grid's curve alone."""
        return max(self._split(epsilon, direction)[2] for direction in DIRECTIONS)

    def _bound(self, epsilon: float, direction: Direction, split: Direction) -> float:
        """Upper bound of one direction's log δ(ε), by the best split of another or the same."""
        shares, spent, _ = self._split(epsilon, split)
        points, places = np.unique(shares, return_inverse=True)
        logs = [self._fine.log_delta(float(point) * epsilon, direction) for point in points]
        log_total = scipy.special.logsumexp(spent + np.maximum(logs, _FAINTEST)[places])
        return min(float(log_total), 0.0)

    def _split(self, epsilon: float, direction: Direction) -> tuple[np.ndarray, np.ndarray, float]:
        shares = np.unique(np.minimum(np.linspace(0, 2.5, _LINES) / self.group_size, 1.0))
        return best_split(
            shares, self.group_size, epsilon, lambda knot: self._knot(knot, direction)
        )

    @functools.cached_property
    def _fine(self) -> Profile:
        return self.unit.profile(self.noise_multiplier, self.accuracy)

    @functools.cached_property
    def _coarse(self) -> Profile:
        return self.unit.profile(self.noise_multiplier, COARSE)

    @functools.cached_property
    def _knot(self) -> Callable[[int, Direction], float]:
        """log δ of one unit at the knot of this number, in one direction: computed once."""
        return functools.cache(lambda knot, side: self._coarse.log_delta(epsilon_at(knot), side))


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
        inside = np.flatnonzero((points >= low) & (points <= high))
        values = np.nan_to_num([value(int(knot)) for knot in knots], posinf=0.0, neginf=_FAINT)
        curve = scipy.interpolate.PchipInterpolator(np.exp(knots * _KNOTS), values)
        logs = np.minimum(curve(np.exp(points[inside] * _KNOTS)), 0.0)
        lines = group.best_split(shares[inside] * epsilon, logs, group_size, epsilon)
        if 0 < inside[0] == inside[np.min(lines)]:
            low -= len(knots) // 3
        elif inside[np.max(lines)] == inside[-1] < len(points) - 1:
            high += len(knots) // 3
        else:
            best_shares = shares[inside[lines]]
            best_shares = (
                best_shares * (1 - _ROUNDING) / max(np.sum(best_shares), _ROUNDING)
            )  # all that there is
            spent = epsilon * (np.cumsum(best_shares) - best_shares)
            logs = curve(np.clip(best_shares * epsilon, *np.exp(knots[[0, -1]] * _KNOTS)))
            log_total = scipy.special.logsumexp(spent + np.minimum(logs, 0.0))
            return best_shares, spent, min(float(log_total), 0.0)


def middle(group_size: int, epsilon: float) -> int:
    """The number of the knot next to ε/K."""
    return round(math.log(max(epsilon / group_size, _LEAST_EPSILON)) / _KNOTS)


def epsilon_at(knot: int) -> float:
    """The ε of a knot."""
    return math.exp(knot * _KNOTS)
