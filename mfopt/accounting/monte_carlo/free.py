"""Deterministic bounds for bins assigned once or reassigned, without samples."""

from __future__ import annotations

import dataclasses
import math

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.linear import NearlyLinear
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.assignment import LEAST, BinAssignment
from mfopt.accounting.loss_distribution.rounds import (
    FINE,
    Direction,
    RoundsProfile,
    guess,
    smallest_sigma,
)
from mfopt.errors import FailureError

_NUDGE = 1e-12  # relative, upwards: covers the rounding of the largest mode norm
_FAINT = 1e-4  # χ of all assignments, below which losses are no matter for a grid
_GRIDS = 1e-4  # of log δ: by less do two grids at the same σ and ε differ


@dataclasses.dataclass(frozen=True)
class Unamplified:
    """Bound without amplification: the Gaussian mechanism of the largest mode.

    P is a mixture of the N(m_i, σ²I), and H is jointly convex, so both directions lie below the
    divergence of the longest mode from 0, whose norm is the ``sensitivity``.
    """

    sensitivity: float
    method: str = "bounded without amplification: Gaussian mechanism"
    exact: bool = False

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        found = gaussian.log_delta(self._up / noise_multiplier, epsilon)
        return found, found

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        sigma, target = self._up / gaussian.largest_mu(epsilon, delta), math.log(delta)
        step = 1e-15
        while max(self.log_deltas(sigma, epsilon)) > target:
            sigma, step = sigma * (1 + step), 2 * step
        return sigma

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        return gaussian.epsilon(self._up / noise_multiplier, delta)

    @property
    def _up(self) -> float:
        return self.sensitivity * (1 + _NUDGE)


@dataclasses.dataclass(frozen=True)
class Orthogonal:
    """Modes that never overlap, all of one length (C = I): a sum of independent lognormals.

    :class:`~mfopt.accounting.loss_distribution.allocation.AllocationProfile` bounds its profile
    from above to a few 1e-5 in ε.

    Attributes:
      bins: b.
      squared_norm: of each mode, before division by σ².
    """

    bins: int
    squared_norm: float
    method: str = "balls-in-bins with orthogonal modes, sum of lognormals"
    exact: bool = True

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> AllocationProfile:
        """The privacy profile at one σ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        return AllocationProfile(self.bins, self.squared_norm / sigma**2, accuracy)

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        profile = self.profile(noise_multiplier)
        return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        target = math.log(delta)

        def excess(sigma: float, accuracy: float) -> float:
            profile = self.profile(sigma, accuracy)
            both = profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")
            return max(both) - target

        start = guess_noise_multiplier(math.sqrt(self.squared_norm), self.bins, epsilon, delta)
        return smallest_sigma(excess, start, relative=1e-7)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        return self.profile(noise_multiplier).epsilon(delta)


@dataclasses.dataclass(frozen=True)
class ReassignedBins:
    """Orthogonal modes of one length, reassigned in rounds: the losses of the rounds add up.

    A composition of :class:`~mfopt.accounting.loss_distribution.assignment.BinAssignment`, an upper
    bound to a few 1e-5 in ε.

    Attributes:
      bins, throws: b, and K, at least 2.
      squared_norm: of each mode of an assignment, before division by σ².
    """

    bins: int
    throws: int
    squared_norm: float
    method: str = "fresh bins with orthogonal modes, composed losses of the assignments"
    exact: bool = True

    def profile(
        self, noise_multiplier: float, accuracy: float = FINE
    ) -> RoundsProfile | ClosedProfile:
        """The privacy profile at one σ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        if (closed := self._closed(sigma)) is not None:
            return ClosedProfile(closed, sigma)
        scaled = sigma / math.sqrt(self.squared_norm) * (1 - _NUDGE)
        return RoundsProfile(BinAssignment(self.bins), self.throws, scaled, accuracy)

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        profile = self.profile(noise_multiplier)
        return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        target = math.log(delta) - _GRIDS

        def excess(sigma: float, accuracy: float) -> float:
            return self.profile(sigma, accuracy).log_delta(epsilon) - target

        try:
            start = guess(BinAssignment(self.bins), self.throws, epsilon, delta)
        except FailureError:  # it would take less noise than assignments are known for
            return self._plain.noise_multiplier(epsilon, delta)
        return smallest_sigma(excess, start * math.sqrt(self.squared_norm), relative=1e-5)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        profile = self.profile(noise_multiplier)
        grids = 0.0 if isinstance(profile, ClosedProfile) else _GRIDS
        return profile.epsilon(delta * math.exp(-grids))

    @property
    def _plain(self) -> Unamplified:
        return Unamplified(math.sqrt(self.throws * self.squared_norm), self.method)

    def _closed(self, noise_multiplier: float) -> Unamplified | Spread | None:
        """Closed form for small σ (no amplification) or large σ (grids too coarse), else None."""
        if noise_multiplier < LEAST * math.sqrt(self.squared_norm) * (1 + _GRIDS):
            return self._plain
        spread = Spread(self.bins, self.throws, self.squared_norm, self._plain)
        return spread if spread.log_square(noise_multiplier) <= 2 * math.log(_FAINT) else None


@dataclasses.dataclass(frozen=True)
class ClosedProfile:
    """Profile of a bound in closed form at one σ."""

    bound: Unamplified | Spread
    noise_multiplier: float

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε), the larger of both directions unless one is named."""
        remove, add = self.bound.log_deltas(self.noise_multiplier, epsilon)
        return max(remove, add) if direction is None else remove if direction == "remove" else add

    def epsilon(self, delta: float) -> float:
        """Smallest ε with δ(ε) <= ``delta``."""
        return self.bound.epsilon(self.noise_multiplier, delta)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Assignments to orthogonal bins by the variance of their likelihood ratio Λ alone.

    E_Q Λ = 1 and E_Q (Λ - 1)² = χ² = (1 + (e^g - 1)/b)^K - 1, g the squared norm of a mode over σ².
    Since 2 u₊ = u + |u| and E|u| <= (E u²)^½,

        H(P, Q) = E_Q (Λ - e^ε)₊      <= ½ ((χ² + x²)^½ - x),      x = e^ε - 1,
        H(Q, P) = E_Q (1 - e^ε Λ)₊    <= ½ e^ε ((χ² + x²)^½ - x),  x = 1 - e^-ε.

    Attributes:
      bins, throws: b and K.
      squared_norm: of each mode of an assignment, before division by σ².
      plain: the same without amplification: the lesser of the two is taken.
    """

    bins: int
    throws: int
    squared_norm: float
    plain: Unamplified

    def log_square(self, noise_multiplier: float) -> float:
        """log χ²; infinite where it is above e."""
        gram = self.squared_norm / noise_multiplier**2 * (1 + _NUDGE)
        exponent = self.throws * math.log1p(math.expm1(min(gram, 1.0)) / self.bins)
        return math.log(max(math.expm1(exponent), 1e-300)) if gram < 1 > exponent else math.inf

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        plain = self.plain.log_deltas(noise_multiplier, epsilon)
        log_square = self.log_square(noise_multiplier)

        def half(x: float) -> float:
            # ½ χ²/((χ² + x²)^½ + x)
            return log_square - math.log(2 * (math.hypot(math.exp(log_square / 2), x) + x)) + 1e-12

        if epsilon > 1 or math.isinf(log_square):
            return plain
        remove, add = half(math.expm1(epsilon)), epsilon + half(-math.expm1(-epsilon))
        sigma = noise_multiplier / math.sqrt(self.squared_norm) * (1 - _NUDGE)
        nearly = NearlyLinear.of(self.throws, *BinAssignment(self.bins).linear(sigma))
        linear = nearly.log_delta(epsilon)
        return min(remove, plain[0], linear), min(add, plain[1], linear)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        target = math.log(delta)

        def excess(epsilon: float) -> float:
            return max(self.log_deltas(noise_multiplier, epsilon)) - target

        if excess(0.0) <= 0:
            return 0.0
        plain = self.plain.epsilon(noise_multiplier, delta)
        return min(plain, solve.smallest(excess, plain, name="epsilon", relative=1e-9, least=1e-15))


def guess_noise_multiplier(norm: float, bins: int, epsilon: float, delta: float) -> float:
    """Initial σ of a search: the Gaussian mechanism at ε + log b.

    Args:
      norm: largest norm of a mode of C.
      bins: b.
      epsilon, delta: the target.
    """
    return norm / gaussian.largest_mu(epsilon + math.log(bins), delta)
