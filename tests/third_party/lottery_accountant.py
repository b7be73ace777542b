"""An accountant for the lottery, as a third party would write it.

Were the bin known, a unit that takes part moves C x by a mode of C, whose norm is at most m: one
Gaussian mechanism at σ/m. That it takes part only with probability p amplifies it. With H_ε(P, Q)
for the hockey-stick divergence at e^ε and M for the mechanism when the unit takes part,

    H_ε((1-p) Q + p M, Q) = p H_ε'(M, Q),     e^ε' = 1 + (e^ε - 1)/p,
    H_ε(Q, (1-p) Q + p M) = a H_ε''(Q, M),    a = 1 - (1-p) e^ε,  e^ε'' = p e^ε / a,

the second being 0 where a <= 0 (Balle, Barthe and Gaboardi 2018, Theorem 2 and its mirror image).
Both hold for any Q and M, so for the worst bin. Hiding the bin would give more; this is a bound.
"""

from __future__ import annotations

import dataclasses
import math

from mfopt.accounting import (
    Accountant,
    DeterministicAnalysis,
    DeterministicBound,
    Effort,
    Mechanism,
    Profile,
    sensitivity,
)
from mfopt.accounting.closed_form import gaussian
from mfopt.errors import UsageError
from mfopt.sampling import FixedOrder
from third_party.lottery import Lottery


@dataclasses.dataclass(frozen=True)
class LotteryProfile(Profile):
    """δ(ε) at one σ; ``mu`` is the norm of the largest mode over σ."""

    probability: float
    mu: float

    def log_delta(self, epsilon: float, direction: str | None = None) -> float:
        pair = {"remove": self._remove(epsilon), "add": self._add(epsilon)}
        return max(pair.values()) if direction is None else pair[direction]

    def epsilon(self, delta: float) -> float:
        """Smallest ε with δ(ε) <= ``delta``, by bisection from the private side."""
        target, low, high = math.log(delta), 0.0, gaussian.epsilon(self.mu, delta)
        if self.log_delta(0.0) <= target:
            return 0.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.log_delta(middle) <= target else (middle, high)
        return high

    def _remove(self, epsilon: float) -> float:
        p = self.probability
        inner = math.log1p(math.expm1(epsilon) / p) if epsilon < 700 else epsilon - math.log(p)
        return math.log(p) + gaussian.log_delta(self.mu, inner)

    def _add(self, epsilon: float) -> float:
        p = self.probability
        if p < 1 and epsilon >= -math.log1p(-p):
            return -math.inf
        kept = 1 - (1 - p) * math.exp(epsilon) if p < 1 else 1.0
        if kept <= 0:
            return -math.inf
        return math.log(kept) + gaussian.log_delta(self.mu, math.log(p) + epsilon - math.log(kept))


@dataclasses.dataclass(frozen=True)
class LotteryBound(DeterministicBound):
    """σ and ε follow from the profile at each σ; ``norm`` is that of the largest mode."""

    probability: float
    norm: float
    method = "lottery, amplified Gaussian mechanism"
    exact = False

    def profile(self, noise_multiplier: float, accuracy: float = 0.0) -> LotteryProfile:
        return LotteryProfile(self.probability, self.norm / noise_multiplier)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.norm / gaussian.largest_mu(epsilon, delta)


class LotteryAccountant(Accountant):
    """Any C >= 0, one unit."""

    schemes = (Lottery,)

    def check(self, mechanism: Mechanism) -> None:
        if mechanism.group_size != 1:
            raise UsageError(
                f"group_size = {mechanism.group_size}: the lottery is accounted for one unit."
            )
        if mechanism.adjacency == "replace":
            raise UsageError("adjacency = 'replace': use 'add-remove' or 'zero-out'.")

    def analysis(self, mechanism: Mechanism, effort: Effort) -> DeterministicAnalysis:
        scheme = mechanism.sampling
        norm = sensitivity(mechanism.strategy, FixedOrder(scheme.bins, scheme.epochs)).value
        bound = LotteryBound(scheme.probability, norm)
        return DeterministicAnalysis(mechanism, bound, {"mode_norm": norm})
