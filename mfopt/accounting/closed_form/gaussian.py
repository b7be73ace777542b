"""The Gaussian mechanism in closed form, stable at any δ.

N(μ, 1) against N(0, 1), with μ = sensitivity / noise standard deviation, has
δ(ε) = Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) in both directions (Balle and Wang 2018, Theorem 8).
The difference loses every digit in the tail; written with the Mills ratio R(x) = (1-Φ(x))/φ(x)
it is φ(a) (R(a) - R(a + μ)), a = ε/μ - μ/2, which keeps them, and has a logarithm for any ε.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.profile import Direction, Profile

_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)
_smallest = functools.partial(
    solve.smallest, relative=1e-14, least=1e-300, largest=1e300, growth=4.0
)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(80)


def log_delta(mu: float, epsilon: float) -> float:
    """log δ(ε) of N(μ, 1) against N(0, 1); -inf only where δ is 0 or log δ overflows.

    Accurate to about 1e-13 relative in δ for ε >= 0 and any μ > 0.

    >>> round(math.exp(log_delta(1.0, 1.0)), 12)
    0.126936737507
    """
    a = epsilon / mu - mu / 2
    density = -0.5 * a * a - _LOG_ROOT_TWO_PI
    if a < -5:
        # far inside: 1 less than 2e-6, so nothing cancels, however large μ and ε are
        return math.log(scipy.special.ndtr(-a) - math.exp(density) * _mills(epsilon / mu + mu / 2))
    if a > 1e8:
        return density + math.log(mu) - 2 * math.log(a) if mu < a else density - math.log(a)
    return density + math.log(_mills_difference(a, mu))


def _mills_difference(a: float, mu: float) -> float:
    """R(a) - R(a + μ) = ∫_0^∞ e^{-a t - t²/2} (1 - e^{-μ t}) dt for a >= -5: all terms >= 0."""
    if mu > 0.5 * max(1.0, abs(a)):
        return _mills(a) - _mills(a + mu)
    # the integrand is below 1e-17 of its peak past the end of the interval
    end = min(9.5 + max(-a, 0.0), 45 / a if a > 0 else math.inf)
    t = 0.5 * end * (_NODES + 1)
    values = np.exp(-a * t - 0.5 * t * t) * -np.expm1(-mu * t)
    return float(0.5 * end * _WEIGHTS @ values)


def _mills(x: float) -> float:
    return float(math.sqrt(math.pi / 2) * scipy.special.erfcx(x / math.sqrt(2)))


def epsilon(mu: float, delta: float) -> float:
    """Smallest ε >= 0 with δ(ε) <= ``delta``, rounded up by a few units of the last place."""
    target = math.log(delta)
    if log_delta(mu, 0.0) <= target:
        return 0.0
    return _smallest(
        lambda epsilon: log_delta(mu, epsilon) - target, mu * mu / 2 + mu, name="epsilon"
    )


def largest_mu(epsilon: float, delta: float) -> float:
    """Largest μ with δ(ε) <= ``delta``, rounded down by a few units of the last place."""
    target = math.log(delta)
    return 1 / _smallest(
        lambda sigma: log_delta(1 / sigma, epsilon) - target, 1.0, name="noise multiplier"
    )


@dataclasses.dataclass(frozen=True)
class GaussianProfile(Profile):
    """Privacy profile of a release of sensitivity ``mu`` noise deviations, alike both ways."""

    mu: float

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """log δ(ε), the same in both directions, finite far below the smallest float."""
        return log_delta(self.mu, _check.non_negative("epsilon", epsilon))

    def epsilon(self, delta: float) -> float:
        """Smallest ε with δ(ε) <= ``delta``."""
        return epsilon(self.mu, _check.probability("delta", delta))

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε): the closed form's own rounding."""
        log_delta = self.log_delta(epsilon)
        return log_delta - 1e-12 * max(abs(log_delta), 1.0)

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        """Lower bound of the smallest ε with δ(ε) <= ``delta``."""
        return self.epsilon(delta) * (1 - 1e-12)
