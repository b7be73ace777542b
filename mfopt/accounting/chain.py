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
from typing import Any

import jax
import numpy as np
import scipy

from mfopt.accounting.closed_form.group import GroupProfile, Profile
from mfopt.accounting.loss_distribution.rounds import COARSE, FINE
from mfopt.accounting.model import LARGEST_EPSILON, Bounds, Found, LossModel, Plan
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.protocol import DIRECTIONS
from mfopt.errors import FailureError
from mfopt.guarantee import Status

_LINES = 384  # points of the profile that a split may use
_DEEP, _POINTS = -50.0, 14  # where an interpolated curve ends, in log δ, and its points


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
        self._curve = functools.lru_cache(maxsize=1)(self._interpolated)  # of σ; searches move on

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        profiles = self._profiles(noise_multiplier, epsilon)
        return max(total(*split(profile, epsilon), profile.log_deltas) for profile in profiles)

    def bounds(
        self, noise_multiplier: float, epsilon: float, plan: Plan | None, trial: Trial
    ) -> Bounds:
        fine, found = self.unit.profile(noise_multiplier, FINE), []
        for side, profile in enumerate(self._profiles(noise_multiplier, epsilon)):
            lines, spent = split(profile, epsilon)
            log_bounds = profile.log_deltas.copy()
            for line in np.unique(lines):
                log_bound = fine.log_delta(float(profile.epsilons[line]), DIRECTIONS[side])
                log_bounds[line] = max(log_bound, math.log(1e-300))
            found.append(min(math.exp(total(lines, spent, log_bounds)), 1.0))
        return Bounds(found[0], found[1], {})

    def find_epsilon(
        self, noise_multiplier: float, delta: float, key: jax.Array, start: float = 2.0
    ) -> Found:
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

    def _profiles(self, sigma: float, epsilon: float) -> list[GroupProfile]:
        reach, curve = self._curve(sigma)
        # the shares of the steps lie around ε/K
        points = np.unique(np.minimum(np.linspace(0, 2.5, _LINES) / self.group_size, 1) * epsilon)
        # log δ is concave out there: its tangent is above it
        beyond = np.maximum(points - reach, 0.0)[:, None] * curve.derivative()(reach)
        both = np.maximum(curve(np.minimum(points, reach)) + beyond, -1e4)
        return [GroupProfile(points, both[:, side], self.group_size) for side in (0, 1)]

    def _interpolated(self, sigma: float) -> tuple[float, Any]:
        """Largest ε and an interpolant of log δ(ε) of both directions, for searching only."""
        values = functools.cache(functools.partial(self.unit.log_estimates, sigma))
        reach = 1.0
        while values(reach)[0] > _DEEP and reach < 1e4:
            reach *= 2
        while values(reach / 2)[0] < _DEEP and reach > 1e-4:
            reach /= 2
        at = reach * np.linspace(0, 1, _POINTS) ** 2
        found = [np.maximum(values(float(point)), 20 * _DEEP) for point in at]
        return reach, scipy.interpolate.PchipInterpolator(at, found)


def split(profile: GroupProfile, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """(points of the split that ``profile`` chooses, ε_1 + … + ε_{j-1} at each), (K,) both."""
    lines = profile.lines_within(epsilon)
    return lines, np.cumsum(profile.epsilons[lines]) - profile.epsilons[lines]


def total(lines: np.ndarray, spent: np.ndarray, log_deltas: np.ndarray) -> float:
    """log Σ_j e^{ε_1 + … + ε_{j-1}} δ(ε_j) over a split."""
    return min(float(scipy.special.logsumexp(spent + log_deltas[lines])), 0.0)
