"""What an attacker can do: bounds of its error rates, from (ε, δ) statements about one mechanism.

An attacker decides between two neighbouring data sets. Its false positive rate α and true positive
rate are those of a test of one against the other. (ε, δ)-DP in both directions allows

    TPR <= min(δ + e^ε α, 1 − e^(−ε) (1 − δ − α)),                                             (1)

and nothing smaller (Wasserman and Zhou 2010; Kairouz, Oh and Viswanath 2015). Statements at several
ε about one mechanism hold together, so that the least of their bounds does. A release of one
Gaussian that moves by at most Δ, with standard deviation σ, is Δ/σ-GDP (Dong, Roth and Su 2022):

    TPR <= Φ(Φ⁻¹(α) + Δ/σ).                                                                    (2)

**μ.** A mechanism whose losses are unbounded in another way than a Gaussian's is μ-GDP only for the
μ of its rarest, largest losses. What is reported is the least μ for which (2) holds, as far as the
statements prove, at every test both of whose error rates are at least ``smallest_rate``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.accounting.account import account
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism

SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.25, 1.5, 2.0)  # of an ε, where others are computed
_ROUNDING = 1e-12  # relative, of rates: bounds are rounded up
_POINTS = 2**14  # of the rates between which μ is bounded
_SURE = ("exact", "bound", "certified", "estimate")


class Tradeoff:
    """Upper bounds of the true positive rate at each false positive rate.

    Args:
      statements: about one mechanism at one σ, at several ε.

    Raises:
      UsageError: no statement, or statements about different things.

    >>> from mfopt.sampling import FixedOrder
    >>> made = tradeoff(Mechanism(FixedOrder(bins=10, epochs=1)), 1.0, epsilons=(0.0, 1.0, 2.0))
    >>> round(float(made.true_positive_rate(0.01)), 4), round(made.mu(), 4)
    (0.0924, 1.0)
    """

    def __init__(self, statements: Iterable[Guarantee]) -> None:
        self.statements = tuple(claim for claim in statements if math.isfinite(claim.epsilon))
        if not self.statements:
            raise _check.reject("statements", (), "must hold one with a finite ε")
        for name in ("noise_multiplier", "privacy_unit", "group_size", "adjacency"):
            if len(values := {getattr(claim, name) for claim in self.statements}) > 1:
                raise _check.reject(name, sorted(values), "differs between the statements")

    @property
    def failure_probability(self) -> float:
        """Probability over the accountants' randomness that any of the statements is wrong."""
        return min(sum(claim.failure_probability for claim in self.statements), 1.0)

    @property
    def status(self) -> str:
        """Weakest status of the statements."""
        return max((claim.status for claim in self.statements), key=_SURE.index)

    @property
    def _gaussian(self) -> float:
        """μ of a release of one Gaussian; infinite where none is known."""
        details = [claim.details for claim in self.statements if claim.noise_multiplier > 0]
        sensitivities: list[Any] = [
            facts["sensitivity"] for facts in details if "sensitivity" in facts
        ]
        return min(sensitivities, default=math.inf) / (self.statements[0].noise_multiplier or 1.0)

    def true_positive_rate(self, false_positive_rate: ArrayLike) -> np.ndarray:
        """Upper bound of the true positive rate of every attack with this false positive rate.

        Args:
          false_positive_rate: α in [0, 1], a number or an array.

        Returns:
          An array of the shape of ``false_positive_rate``.
        """
        alpha = _rates(false_positive_rate)
        rise, fall = self._by_statements(alpha)
        rate = np.minimum(rise, 1 - fall)
        if math.isfinite(self._gaussian):
            shifted = scipy.special.ndtri(alpha) + self._gaussian
            rate = np.minimum(rate, scipy.special.ndtr(shifted))
        return np.asarray(np.clip(rate * (1 + _ROUNDING), alpha, 1.0))

    def false_negative_rate(self, false_positive_rate: ArrayLike) -> np.ndarray:
        """Lower bound of the false negative rate, the trade-off function; exact where it is small.

        Args:
          false_positive_rate: as for :meth:`true_positive_rate`.
        """
        alpha = _rates(false_positive_rate)
        rise, fall = self._by_statements(alpha)
        rate = np.maximum(1 - rise, fall)
        if math.isfinite(self._gaussian):
            shifted = -scipy.special.ndtri(alpha) - self._gaussian
            rate = np.maximum(rate, scipy.special.ndtr(shifted))
        return np.asarray(np.clip(rate * (1 - _ROUNDING), 0.0, 1 - alpha))

    def _by_statements(self, alpha: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The two bounds of (1): of the true positive rate, and of the false negative rate."""
        rise, fall = np.ones_like(alpha), np.zeros_like(alpha)
        for claim in self.statements:
            rise = np.minimum(rise, claim.delta + _times(alpha, claim.epsilon))
            fall = np.maximum(fall, math.exp(-claim.epsilon) * (1 - claim.delta - alpha))
        return rise, fall

    @property
    def advantage(self) -> float:
        """Upper bound of the true positive rate less the false positive rate, of every attack."""
        bounds = [
            (2 * claim.delta * math.exp(-claim.epsilon) - math.expm1(-claim.epsilon))
            / (1 + math.exp(-claim.epsilon))
            for claim in self.statements
        ]
        bounds.append(math.erf(self._gaussian / math.sqrt(8)))
        return min(min(bounds) * (1 + _ROUNDING), 1.0)

    def mu(self, smallest_rate: float = 1e-3) -> float:
        """Smallest proven μ of (2), for tests both of whose error rates are at least this.

        Args:
          smallest_rate: in (0, 1/2).

        Returns:
          μ, rounded up; infinite where the statements exclude no error rate so small.
        """
        smallest = _check.probability("smallest_rate", smallest_rate)
        # the bound is symmetric in both error rates: up to where they are equal is enough
        alpha = np.geomspace(smallest, 0.5, _POINTS)
        miss = self.false_negative_rate(alpha)
        smaller = alpha[:-1] <= miss[:-1]
        if not np.any(smaller):
            return self._gaussian
        # between two points each error rate is at least that of one of them
        with np.errstate(divide="ignore"):
            width = -scipy.special.ndtri(alpha[:-1]) - scipy.special.ndtri(miss[1:])
        return float(min(np.max(width[smaller]) + _ROUNDING, self._gaussian))

    def describe(self, false_positive_rates: ArrayLike = ()) -> JsonObject:
        """JSON-able description, with the bounds at some false positive rates."""
        rates = np.asarray(false_positive_rates, np.float64)
        mu = self.mu()
        return {
            "epsilons": [claim.epsilon for claim in self.statements],
            "deltas": [claim.delta for claim in self.statements],
            "false_positive_rates": rates.tolist(),
            "true_positive_rates": self.true_positive_rate(rates).tolist(),
            "advantage": self.advantage,
            "mu": mu if math.isfinite(mu) else None,
            "failure_probability": self.failure_probability,
            "status": self.status,
        }


def _rates(false_positive_rate: ArrayLike) -> np.ndarray:
    alpha = np.asarray(false_positive_rate, np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        rule = "must lie in [0, 1]"
        raise _check.reject("false_positive_rate", false_positive_rate, rule)
    return alpha


def _times(alpha: np.ndarray, epsilon: float) -> np.ndarray:
    """e^ε α, at most 1, and 0 at α = 0 whatever ε is."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.minimum(np.log(alpha) + epsilon, 0.0)))


def tradeoff(
    mechanism: Mechanism,
    noise_multiplier: float,
    *,
    epsilons: Iterable[float],
    **effort: Any,
) -> Tradeoff:
    """What an attacker can do against a mechanism, by a statement at each of some ε.

    Args:
      mechanism: what is released and against whom it protects.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      epsilons: where δ is computed; each costs an account.
      effort: of :func:`mfopt.accounting.account`.

    Raises:
      FailureError: at none of them is there an answer.
    """

    def ask(epsilon: float) -> Guarantee:
        return account(mechanism, noise_multiplier=noise_multiplier, epsilon=epsilon, **effort)

    return Tradeoff(answered(ask, epsilons))


def answered(ask: Callable[[float], Guarantee], epsilons: Iterable[float]) -> list[Guarantee]:
    """The statements at those ε at which there is an answer."""
    statements, failure = [], FailureError("no ε is given")
    for epsilon in epsilons:
        try:
            statements.append(ask(epsilon))
        except FailureError as problem:
            failure = problem
    if not statements:
        raise failure
    return statements
