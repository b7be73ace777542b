"""Groups without samples, by a bound of one unit and the textbook lemma."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.protocol import FreeBound

_SPARE, _LEAST = 1e-6, 1e-280  # of log δ, that is asked below; δ of one unit, at least


@dataclasses.dataclass(frozen=True)
class EqualSteps:
    """Groups of K: δ_K(ε) <= Σ_{j<K} e^(jε/K) δ(ε/K), see :mod:`.closed_form.group`."""

    unit: FreeBound
    group_size: int
    exact = False

    @property
    def method(self) -> str:
        """Method of the unit's bound, and of this one."""
        return f"{self.unit.method}; group privacy in equal steps"

    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        remove, add = self.unit.log_deltas(noise_multiplier, epsilon / self.group_size)
        correction = self._more(epsilon)
        return min(remove + correction, 0.0), min(add + correction, 0.0)

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        of_one = max(math.exp(math.log(delta) - self._more(epsilon) - _SPARE), _LEAST)
        return self.unit.noise_multiplier(epsilon / self.group_size, of_one)

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        target, guess = math.log(delta) - _SPARE, 2.0 * self.group_size

        def excess(epsilon: float) -> float:
            return max(self.log_deltas(noise_multiplier, epsilon)) - target

        return solve.smallest(excess, guess, name="epsilon", relative=1e-4, least=1e-4)

    def _more(self, epsilon: float) -> float:
        """log Σ_{j<K} e^(jε/K)."""
        steps = np.arange(self.group_size) * (epsilon / self.group_size)
        return float(scipy.special.logsumexp(steps))
