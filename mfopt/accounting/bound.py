"""Deterministic bounds: a privacy profile at every σ, and the σ and ε that follow from it."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import poisson, rounds
from mfopt.accounting.loss_distribution.rounds import FINE, RoundsProfile
from mfopt.accounting.profile import Profile

_LEAST_GUESS = 1e-3  # σ, in norms of a column


class DeterministicBound(abc.ABC):
    """Bounds of δ in both directions at every σ, which hold with certainty.

    Attributes:
      method: in words short enough for a table.
      exact: whether the bound is the truth up to discretization.
      tolerance: relative width of σ: it is at most this much above the smallest one.
      margin: relative, that a reported σ is raised by.
    """

    method: str
    exact: bool
    tolerance: ClassVar[float] = 1e-5
    margin: ClassVar[float] = 0.0

    @abc.abstractmethod
    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> Profile:
        """The privacy profile at this σ, to a relative accuracy of ε."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """Initial σ of a search."""

    def without_noise(self, delta: float) -> str | None:
        """Reason for which no noise is needed at this δ; None where some is."""
        return None

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """Upper bounds of log H(P, Q) and log H(Q, P)."""
        profile = self.profile(noise_multiplier)
        return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        """Smallest σ at which both are <= log δ, verified by evaluation."""
        target = math.log(delta)

        def excess(sigma: float, accuracy: float) -> float:
            return self.profile(sigma, accuracy).log_delta(epsilon) - target

        return rounds.smallest_sigma(excess, self.guess(epsilon, delta), relative=self.tolerance)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        """Smallest ε at which both are <= log δ, verified by evaluation."""
        return self.profile(noise_multiplier).epsilon(delta)


@dataclasses.dataclass(frozen=True)
class GaussianBound(DeterministicBound):
    """One Gaussian release, in closed form.

    A mixture of N(m_i, σ²I) against N(0, σ²I) is bounded by the longest m_i, both ways, since
    hockey-stick divergences are jointly convex.

    Attributes:
      sensitivity: of the release, in clip norms.
    """

    sensitivity: float
    method: str = "Gaussian mechanism"
    exact: bool = False
    tolerance = 1e-12

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> gaussian.GaussianProfile:
        return gaussian.GaussianProfile(self.sensitivity / noise_multiplier)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.sensitivity / gaussian.largest_mu(epsilon, delta)

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        sigma, step = self.guess(epsilon, delta), 1e-15
        while self.profile(sigma).log_delta(epsilon) > math.log(delta):
            sigma, step = sigma * (1 + step), 2 * step
        return sigma


@dataclasses.dataclass(frozen=True)
class RoundsBound(DeterministicBound):
    """Independent rounds with a random sensitivity, by privacy loss distributions."""

    composed: poisson.Rounds
    method: str
    exact: bool

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> RoundsProfile:
        return self.composed.profile(noise_multiplier, accuracy)

    def guess(self, epsilon: float, delta: float) -> float:
        sigma = rounds.guess(self.composed.mixture, self.composed.rounds, epsilon, delta)
        return self.composed.longest * max(sigma, _LEAST_GUESS)

    def without_noise(self, delta: float) -> str | None:
        log_chance = RoundsProfile(self.composed.mixture, self.composed.rounds, 1.0).log_chance
        if log_chance > math.log(delta):
            return None
        chance = math.exp(log_chance)
        return f"no noise is needed: δ is above the chance of taking part at all, {chance:.3g}"
