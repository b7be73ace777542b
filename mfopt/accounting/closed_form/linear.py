"""Releases so noisy that their likelihood ratio is nearly linear in the noise: closed form.

With Λ = P/Q let Λ - 1 = L + R under Q, where L is the part that is linear in the noise: a centred
Gaussian of variance s². Neither L nor R has a mean, and E L R = 0, since Hermite polynomials of
other degrees make up R; so E R² = E (Λ - 1)² - s². With E R² <= 4r² (Cauchy and Schwarz)

    E R₊ = E R₋ = E |R|/2 <= r,

and since (a + b)₊ is at most a₊ + b₊ and at least a₊ - b₋,

    H(P, Q) = E_Q (Λ - e^ε)₊    <= E (L - x)₊ + r,            x = e^ε - 1,
    H(Q, P) = E_Q (1 - e^ε Λ)₊  <= e^ε (E (-L - y)₊ + r),     y = 1 - e^-ε,

and H(P, Q) >= E (L - x)₊ - r. As σ grows s falls like 1/σ and r like 1/σ², so that with δ the two
ends meet, where grids of losses lose their digits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import scipy

from mfopt.accounting import solve

_ROUNDING = 1e-12  # of s and r, relative
_FAINTEST = 1e-140  # of r: what squares of it lose below the smallest float is less
_MILLS = 1e-12  # of 1 - t R(t)
_TIGHT = 1e-4  # of log δ, between bounds that need no others
# Of s, for each round: rounding errors of losses, 1e-16 each, are small against it. Of less, grids
# may lose more than their error bounds show, and their bounds are not used.
RESOLVED = 1e-12


@dataclasses.dataclass(frozen=True)
class NearlyLinear:
    """Privacy profile by the linear part of the likelihood ratio.

    Attributes:
      deviation: s, standard deviation of the linear part under Q.
      rest: r, half a bound on the root mean square of what it leaves out.
    """

    deviation: float
    rest: float

    @classmethod
    def of_rounds(cls, kinds: Sequence[tuple[int, float, float]]) -> NearlyLinear:
        """The profile of independent rounds.

        The linear part of the whole is the sum of the rounds' own, and with c_i = E (Λ - 1)² of a
        round and c of all in sum, E (Λ - 1)² of the whole is Π (1 + c_i) - 1, which is at most
        c + (1 - 1/n) c²/2 e^c.

        Args:
          kinds: of each kind of rounds, their number, the variance of a round's linear part, and
            what E (Λ - 1)² is above it at most.
        """
        rounds = sum(kind[0] for kind in kinds)
        square, excess = (sum(kind[0] * kind[i] for kind in kinds) for i in (1, 2))
        whole = square + excess
        if not whole < 1:
            return cls(math.inf, math.inf)
        pairs = 0.5 * (1 - 1 / rounds) * whole**2 * math.exp(whole)
        remainder = 0.5 * math.sqrt(pairs + excess) * (1 + _ROUNDING)
        return cls(math.sqrt(square), remainder + _FAINTEST)

    def tight(self, epsilon: float) -> bool:
        """True if the upper and the lower bound of log δ(ε) agree to the tolerance."""
        return self.log_delta(epsilon) - self.log_delta_below(epsilon) < _TIGHT

    def epsilon(self, log_delta: float) -> float:
        """An ε in [0, 1] whose δ is at most that, close to the smallest; ∞ where none is known."""
        if self.log_delta(1.0) > log_delta:
            return math.inf
        if self.log_delta(0.0) <= log_delta:
            return 0.0
        return solve.smallest(
            lambda epsilon: self.log_delta(epsilon) - log_delta,
            min(self.deviation, 1.0),
            name="epsilon",
            relative=1e-9,
            least=1e-150,
            largest=1.0,
            growth=2.0,
        )

    def epsilon_below(self, log_delta: float) -> float:
        """An ε in [0, 1] whose δ is above that, close to the largest; 0 where none is known."""
        if self.log_delta_below(0.0) <= log_delta:
            return 0.0
        ends = 0.0, 40 * self.deviation
        return solve.halved(lambda epsilon: self.log_delta_below(epsilon) > log_delta, *ends)[0]

    def log_delta(self, epsilon: float) -> float:
        """Upper bound of log δ(ε) in both directions, ε >= 0; 0 where none better is known."""
        if not self.deviation < math.inf or epsilon > 1:
            return 0.0
        remove = self._hinge(math.expm1(epsilon), 1) + self.rest
        add = math.exp(epsilon) * (self._hinge(-math.expm1(-epsilon), 1) + self.rest)
        return min(math.log(max(remove, add)) + 1e-12, 0.0)

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε), ε >= 0; -∞ where none better is known."""
        if not self.deviation < math.inf or epsilon > 1:
            return -math.inf
        lower = self._hinge(math.expm1(epsilon), -1) - self.rest
        return math.log(lower) - 1e-12 if lower > 0 else -math.inf

    def _hinge(self, x: float, side: int) -> float:
        """E (L - x)₊, rounded up (``side`` 1) or down (-1)."""
        deviation = self.deviation * (1 + side * _ROUNDING)
        if deviation == 0:
            return 0.0
        t = x / deviation
        density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
        # t R(t) in (0, 1), R Mills' ratio
        share = t * math.sqrt(math.pi / 2) * float(scipy.special.erfcx(t / math.sqrt(2)))
        return deviation * density * max(1 - share + side * _MILLS, 0.0)
