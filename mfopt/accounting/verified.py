"""Searched on an estimate, verified on fresh evidence: analyses whose bound is not for searching.

A search on a cheap, repeatable estimate finds the number; then δ is bounded from above in both
directions, each attempt at its own share of the failure probability (estimate, verify, release:
Wang, Mahloujifar, Wu, Jia, Mittal 2023). What is reported was verified, and its failure
probability is counted inside δ.
"""

from __future__ import annotations

import abc
import math
from typing import Any, TypeAlias

import jax

from mfopt import _check
from mfopt.accounting import solve, verify
from mfopt.accounting.monte_carlo import _chunks
from mfopt.guarantee import Guarantee, Status

Numbers: TypeAlias = dict[str, Any]

_ATTEMPTS = 8
_BETA_SHARE = 1 / 100


class Model(abc.ABC):
    """A mechanism whose δ is estimated for searching and bounded for reporting.

    Attributes:
      method, status: of what ``bound`` gives.
      estimator: what ``log_estimate`` is.
      sampled: whether ``bound`` holds only with a probability.
    """

    method: str
    status: Status
    estimator: str
    sampled: bool = True

    @abc.abstractmethod
    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        """log δ̂, the larger of both directions: the same number at each call. Proves nothing."""

    def log_search(self, noise_multiplier: float, epsilon: float) -> float:
        """An estimate of what ``bound`` will give, to search with."""
        return self.log_estimate(noise_multiplier, epsilon)

    @abc.abstractmethod
    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, Numbers]:
        """Upper bound of δ except with probability ``beta``, and public numbers about it."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """A σ to begin a search at."""


class VerifiedAnalysis:
    """ε, δ or σ of a :class:`Model`.

    Args:
      mechanism: what is analysed.
      model: its estimate and bound.
      certify: verify what is reported; otherwise it is the model's estimate, which proves nothing.
      seed: of the verifying samples; the operating system's entropy unless pinned.
    """

    def __init__(
        self, mechanism: Any, model: Model, *, certify: bool = True, seed: int | None = None
    ) -> None:
        self.mechanism, self.model, self.certify, self.seed = mechanism, model, certify, seed
        self._search = model.log_search if certify else model.log_estimate
        self._share = _BETA_SHARE if model.sampled else 0.0

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        """The smallest ε that a few attempts verify at this σ and δ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        delta = _check.probability("delta", delta)

        def log_delta(epsilon: float) -> float:
            return self._search(sigma, epsilon)

        found = solve.smallest(
            lambda epsilon: log_delta(epsilon) - math.log(delta), 2.0, name="epsilon",
            relative=1e-3, least=1e-4, largest=1e4,
        )  # fmt: skip
        if not self.certify:
            return self._guarantee(sigma, found, delta, 0.0, {})
        epsilon, spent, numbers = self._verify(
            found, delta, log_delta, lambda at, beta, key: self.model.bound(sigma, at, beta, key)
        )
        return self._guarantee(sigma, epsilon, delta, spent, numbers)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        """The smallest σ that a few attempts verify for (ε, δ)."""
        epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)

        def log_delta(sigma: float) -> float:
            return self._search(sigma, epsilon)

        found = solve.smallest(
            lambda sigma: log_delta(sigma) - math.log(delta),
            self.model.guess(epsilon, delta), name="noise multiplier", relative=1e-3,
        )  # fmt: skip
        if not self.certify:
            return self._guarantee(found, epsilon, delta, 0.0, {})
        sigma, spent, numbers = self._verify(
            found, delta, log_delta, lambda at, beta, key: self.model.bound(at, epsilon, beta, key)
        )
        return self._guarantee(sigma, epsilon, delta, spent, numbers)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """A verified δ at this σ and ε, its failure probability included."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.epsilon("epsilon", epsilon)
        log_delta = self._search(sigma, epsilon)
        if not self.certify:
            return self._guarantee(sigma, epsilon, math.exp(min(log_delta, 0.0)), 0.0, {})
        beta = min(math.exp(max(log_delta, -600.0)) * self._share, 0.01)
        value, numbers = self.model.bound(sigma, epsilon, beta, _chunks.seed_key(self.seed))
        # no bound (infinite, or no number) says nothing: δ = 1 always holds
        total = value + beta if math.isfinite(value) and value >= 0 else 1.0
        return self._guarantee(sigma, epsilon, min(total, 1.0), beta, numbers)

    def _verify(self, found, delta, log_delta, bound):  # type: ignore[no-untyped-def]
        """Attempts at growing x until the bound plus all failure probabilities is <= δ."""
        beta, key = delta * self._share, _chunks.seed_key(self.seed)
        slope = (log_delta(found * 1.02) - log_delta(found)) / math.log(1.02)
        slope = slope if math.isfinite(slope) and slope < 0 else -1.0
        x, missed = found, math.inf
        for attempt in range(1, _ATTEMPTS + 1):
            value, numbers = bound(x, beta, jax.random.fold_in(key, attempt))
            spent = attempt * beta
            if verify.accepts([value], spent, delta):
                return x, spent, {**numbers, "attempts": attempt}
            # the next attempt starts where this one's excess would just vanish, and a bit beyond
            if not math.isfinite(value):
                raise _check.FailureError(f"not verified: there is no bound on δ at {x:.5g}")
            missed = math.log(value / (delta - (attempt + 1) * beta))
            x *= math.exp(min(1.2 * missed / -slope, 0.5) + 1e-3 * attempt)
        raise _check.FailureError(
            f"not verified: after {_ATTEMPTS} attempts the bound on δ at {x:.5g} still misses "
            f"{delta:g} by a factor {math.exp(missed):.3g}. Use more samples."
        )

    def _guarantee(
        self, sigma: float, epsilon: float, delta: float, beta: float, numbers: Numbers
    ) -> Guarantee:
        mechanism = self.mechanism
        return Guarantee(
            epsilon=epsilon,
            delta=delta,
            noise_multiplier=sigma,
            privacy_unit=mechanism.privacy_unit,
            group_size=mechanism.group_size,
            adjacency=mechanism.adjacency,
            method=self.model.method if self.certify else self.model.estimator,
            status=self.model.status if self.certify else "estimate",
            failure_probability=beta,
            details={
                "sampling": mechanism.sampling.describe(),
                "strategy": mechanism.strategy.describe(),
                **({"seed": self.seed} if self.model.sampled else {}),
                **numbers,
            },
        )
