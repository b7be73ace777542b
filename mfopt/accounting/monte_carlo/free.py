"""Bounds for bins, thrown once or afresh, that cost no sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mfopt import _check
from mfopt.accounting import solve
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.rounds import COARSE, FINE, RoundsProfile, guess
from mfopt.accounting.loss_distribution.throw import LEAST, Throw
from mfopt.errors import FailureError

_NUDGE = 1e-12  # relative, upwards: covers the rounding of the largest mode norm
_GRIDS = 1e-4  # of log δ: by less do two grids at the same σ and ε differ


@dataclasses.dataclass(frozen=True)
class Unamplified:
    """No amplification: the Gaussian mechanism of the largest mode.

    P is a mixture of the N(m_i, σ²I), and H is jointly convex, so both directions lie below the
    divergence of the longest mode from 0.

    Attributes:
      sensitivity: largest mode norm.
    """

    sensitivity: float
    method: str = "balls-in-bins, bounded without amplification: Gaussian mechanism, largest mode"
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
        return _least(excess, start, relative=1e-7)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        return self.profile(noise_multiplier).epsilon(delta)


@dataclasses.dataclass(frozen=True)
class Thrown:
    """Modes that never overlap, all of one length, thrown afresh: the losses of the throws add up.

    A composition of :class:`~mfopt.accounting.loss_distribution.throw.Throw`, an upper bound to a
    few 1e-5 in ε.

    Attributes:
      bins: b.
      throws: K, at least 2.
      squared_norm: of each mode of a throw, before division by σ².
    """

    bins: int
    throws: int
    squared_norm: float
    method: str = "fresh bins with orthogonal modes, composed losses of the throws"
    exact: bool = True

    def profile(self, noise_multiplier: float, accuracy: float = FINE) -> RoundsProfile:
        """The privacy profile at one σ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        scaled = sigma / math.sqrt(self.squared_norm) * (1 - _NUDGE)
        return RoundsProfile(Throw(self.bins), self.throws, scaled, accuracy)

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        if (plain := self._unamplified(noise_multiplier)) is not None:
            return plain.log_deltas(noise_multiplier, epsilon)
        profile = self.profile(noise_multiplier)
        return profile.log_delta(epsilon, "remove"), profile.log_delta(epsilon, "add")

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        target = math.log(delta) - _GRIDS

        def excess(sigma: float, accuracy: float) -> float:
            if (plain := self._unamplified(sigma)) is not None:
                return max(plain.log_deltas(sigma, epsilon)) - target
            return self.profile(sigma, accuracy).log_delta(epsilon) - target

        try:
            start = guess(Throw(self.bins), self.throws, epsilon, delta)
        except FailureError:  # it would take less noise than throws are known for
            return self._plain.noise_multiplier(epsilon, delta)
        return _least(excess, start * math.sqrt(self.squared_norm), relative=1e-5)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        if (plain := self._unamplified(noise_multiplier)) is not None:
            return plain.epsilon(noise_multiplier, delta)
        if self._plain.epsilon(noise_multiplier, delta) == 0:
            return 0.0  # nothing is left to compose, and the grid would be too fine
        return self.profile(noise_multiplier).epsilon(delta * math.exp(-_GRIDS))

    @property
    def _plain(self) -> Unamplified:
        return Unamplified(math.sqrt(self.throws * self.squared_norm), self.method)

    def _unamplified(self, noise_multiplier: float) -> Unamplified | None:
        """What holds where σ is so small that bins are told apart anyway; None where it is not."""
        small = noise_multiplier < LEAST * math.sqrt(self.squared_norm) * (1 + _GRIDS)
        return self._plain if small else None


def _least(excess: Callable[[float, float], float], start: float, *, relative: float) -> float:
    """The least σ without excess: a coarse grid finds the neighbourhood, the fine one decides."""
    coarse = solve.smallest(
        lambda sigma: excess(sigma, COARSE), start, name="noise multiplier", relative=1e-3
    )
    return solve.smallest(
        lambda sigma: excess(sigma, FINE),
        coarse * 0.9999,
        name="noise multiplier",
        relative=relative,
        growth=1.001,
    )


def guess_noise_multiplier(norm: float, bins: int, epsilon: float, delta: float) -> float:
    """A σ to begin a search at: the Gaussian mechanism at ε + log b.

    Args:
      norm: largest norm of a mode of C.
      bins: b.
      epsilon, delta: the target.
    """
    return norm / gaussian.largest_mu(epsilon + math.log(bins), delta)
