"""Deterministic bounds for bins assigned once or reassigned, without samples."""

from __future__ import annotations

import dataclasses
import math

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.bound import DeterministicBound, GaussianBound
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.assignment import LEAST, BinAssignment
from mfopt.accounting.loss_distribution.rounds import FINE, RoundsProfile, guess
from mfopt.errors import FailureError

ROUNDING = 2.0**-40  # relative: σ is nudged up so that no later rounding can lower it
_NUDGE = 1e-12  # relative, upwards: covers the rounding of the largest mode norm
_FAINT = 1e-4  # χ of all assignments, below which no grid is fine enough for losses


@dataclasses.dataclass(frozen=True)
class Orthogonal(DeterministicBound):
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
    tolerance = 1e-7
    margin = ROUNDING

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> AllocationProfile:
        """The privacy profile at one σ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        return AllocationProfile(self.bins, self.squared_norm / sigma**2, accuracy)

    def guess(self, epsilon: float, delta: float) -> float:
        return guess_noise_multiplier(math.sqrt(self.squared_norm), self.bins, epsilon, delta)


class _FaintProfile(RoundsProfile):
    """A profile by bounds in closed form alone: no grid is fine enough for its losses.

    One more than other rounds have, by the variance χ² of the likelihood ratio Λ under Q: since
    2 u₊ = u + |u| and E|u| <= (E u²)^½,

        H(Q, P) = E_Q (1 - e^ε Λ)₊ <= ½ e^ε ((χ² + x²)^½ - x),    x = 1 - e^-ε,
        H(P, Q) = E_Q (Λ - e^ε)₊   <= ½ ((χ² + y²)^½ - y),        y = e^ε x, which is no more.
    """

    _resolved = False

    def epsilon(self, delta: float) -> float:
        target = math.log(_check.probability("delta", delta))
        if self._log_ceiling(0.0) <= target:
            return 0.0
        return solve.smallest(
            lambda epsilon: self._log_ceiling(epsilon) - target,
            gaussian.epsilon(self._largest_mu, delta),
            name="epsilon",
            relative=1e-9,
            least=1e-15,
        )

    def _log_ceiling(self, epsilon: float) -> float:
        exponent = self.rounds * self.mixture.log_square(self.noise_multiplier)
        square, x = max(math.expm1(exponent), 1e-300), -math.expm1(-epsilon)
        half = math.log(square / (math.hypot(math.sqrt(square), x) + x) / 2)
        return min(super()._log_ceiling(epsilon), half + epsilon + 1e-12)


@dataclasses.dataclass(frozen=True)
class ReassignedBins(DeterministicBound):
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
    ) -> RoundsProfile | gaussian.GaussianProfile:
        """The privacy profile at one σ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        scaled = sigma / math.sqrt(self.squared_norm) * (1 - _NUDGE)
        if scaled < LEAST:  # too little noise for grids: without amplification
            return gaussian.GaussianProfile(math.sqrt(self.throws) / scaled)
        assignment = BinAssignment(self.bins)
        faint = self.throws * assignment.log_square(scaled) <= _FAINT**2
        kind = _FaintProfile if faint else RoundsProfile
        return kind(assignment, self.throws, scaled, accuracy)

    def guess(self, epsilon: float, delta: float) -> float:
        try:
            sigma = guess(BinAssignment(self.bins), self.throws, epsilon, delta)
        except FailureError:  # it would take less noise than assignments are known for
            norm = math.sqrt(self.throws * self.squared_norm)
            return guess_noise_multiplier(norm, self.bins, epsilon, delta)
        return sigma * math.sqrt(self.squared_norm)


def unamplified(norm: float, method: str, exact: bool = False) -> GaussianBound:
    """Bound without amplification: the Gaussian mechanism of the longest mode.

    Args:
      norm: of the longest mode.
      method, exact: as of the bound.
    """
    return GaussianBound(norm * (1 + _NUDGE), method, exact)


def guess_noise_multiplier(norm: float, bins: int, epsilon: float, delta: float) -> float:
    """Initial σ of a search: the Gaussian mechanism at ε + log b.

    Args:
      norm: largest norm of a mode of C.
      bins: b.
      epsilon, delta: the target.
    """
    return norm / gaussian.largest_mu(epsilon + math.log(bins), delta)
