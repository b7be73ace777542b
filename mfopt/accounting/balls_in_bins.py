"""Balls-in-bins mechanisms behind the common interface: sampled bounds, and groups of them.

A search on frozen samples finds the number; fresh samples then bound δ from above in both
directions, each attempt at its own share of the failure probability (estimate, verify, release:
Wang, Mahloujifar, Wu, Jia, Mittal 2023). What is reported was verified, and its failure
probability is counted inside δ.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import numpy as np

from mfopt import _check
from mfopt.accounting import _chunks, dominating_pair, gaussian, solve, tilted
from mfopt.accounting.dominating_pair import DominatingPair
from mfopt.accounting.frozen import FrozenSamples
from mfopt.accounting.group import GroupProfile
from mfopt.guarantee import Guarantee, Status

SAMPLES = 2**17
_SEARCH_SAMPLES = 4096
_ATTEMPTS = 8
_BETA_SHARE = 1 / 100
_LINES = 24


class Model(abc.ABC):
    """A mechanism whose δ is estimated and bounded by sampling."""

    method: str
    status: Status

    @abc.abstractmethod
    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        """log δ̂, the larger of both directions: the same number at each call. Proves nothing."""

    @abc.abstractmethod
    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, dict[str, Any]]:
        """Upper bound of δ except with probability ``beta``, and public numbers about it."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """A σ to begin a search at."""


@dataclasses.dataclass(frozen=True)
class OneUnit(Model):
    """One unit, any C >= 0: the Monte Carlo core's estimator and certificate."""

    pair: DominatingPair
    samples: int = SAMPLES
    method = "balls-in-bins Monte Carlo, Rényi-tilted bound"
    status: Status = "certified"

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        return max(self.log_estimates(noise_multiplier, epsilon))

    def log_estimates(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """log δ̂ of the remove and of the add direction."""
        key = _chunks.seed_key(0)
        frozen = FrozenSamples(self.pair, noise_multiplier, epsilon, _SEARCH_SAMPLES, key)
        log_sigma = math.log(noise_multiplier)
        return frozen.evaluate(log_sigma).value, frozen.log_delta_add(log_sigma)

    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, dict[str, Any]]:
        remove = self.remove_bound(noise_multiplier, epsilon, beta / 2, jax.random.fold_in(key, 0))
        add = self.add_bound(noise_multiplier, epsilon, beta / 2, jax.random.fold_in(key, 1))
        numbers = {"remove": remove.value, "add": add.value, "order": remove.order,
                   "samples": remove.samples, "estimate": remove.mean}  # fmt: skip
        return max(remove.value, add.value), numbers

    def remove_bound(
        self, sigma: float, epsilon: float, beta: float, key: jax.Array
    ) -> tilted.UpperBound:
        pilot, fresh = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        order, _ = tilted.choose_order(
            self.pair, sigma, epsilon, samples=self.samples, beta=beta, key=pilot
        )
        return tilted.remove_bound(
            self.pair, sigma, epsilon, order=order, samples=self.samples, beta=beta, key=fresh
        )

    def add_bound(
        self, sigma: float, epsilon: float, beta: float, key: jax.Array
    ) -> tilted.UpperBound:
        # β is a hundredth of δ: a ceiling of that size needs no sampling
        return tilted.add_bound(
            self.pair, sigma, epsilon, samples=self.samples, beta=beta, negligible=beta, key=key
        )

    def guess(self, epsilon: float, delta: float) -> float:
        norm = math.sqrt(float(np.max(np.diagonal(np.asarray(self.pair.gram)))))
        return norm / gaussian.largest_mu(epsilon + math.log(self.pair.bins), delta)


@dataclasses.dataclass(frozen=True)
class Chain(Model):
    """K units, any C >= 0: group privacy from the whole one-unit profile.

    Points of the profile are estimated to find the best split of ε over the K steps; only the
    few points of that split are then bounded with confidence.
    """

    unit: OneUnit
    group_size: int
    method = "group privacy from the sampled balls-in-bins profile"
    status: Status = "certified"

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        return max(
            profile.log_delta(epsilon) for profile in self._profiles(noise_multiplier, epsilon)
        )

    def _profiles(self, sigma: float, epsilon: float) -> tuple[GroupProfile, GroupProfile]:
        # the steps' shares of ε lie around ε/K
        points = np.unique(np.minimum(np.linspace(0, 3, _LINES) / self.group_size, 1) * epsilon)
        both = np.array([self.unit.log_estimates(sigma, point) for point in points])
        both = np.maximum(both, -1e4)  # no sample reached it: as good as 0
        return (
            GroupProfile(points, both[:, 0], self.group_size),
            GroupProfile(points, both[:, 1], self.group_size),
        )

    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, dict[str, Any]]:
        totals = {}
        profiles = self._profiles(noise_multiplier, epsilon)
        for side, (name, profile) in enumerate(zip(("remove", "add"), profiles, strict=True)):
            lines = profile.lines_within(epsilon)
            used = sorted(set(lines))
            share = beta / 2 / len(used)
            bounding = self.unit.remove_bound if side == 0 else self.unit.add_bound
            log_bounds = {}
            for line in used:
                part = jax.random.fold_in(jax.random.fold_in(key, side), line)
                at = float(profile.epsilons[line])
                value = bounding(noise_multiplier, at, share, part).value
                log_bounds[line] = math.log(max(value, 1e-300))
            total, spent = -math.inf, 0.0
            for line in lines:
                total = float(np.logaddexp(total, spent + log_bounds[line]))
                spent += float(profile.epsilons[line])
            totals[name] = min(math.exp(min(total, 0.0)), 1.0)
        return max(totals.values()), {**totals, "samples": self.unit.samples}

    def guess(self, epsilon: float, delta: float) -> float:
        return self.unit.guess(epsilon / self.group_size, delta / self.group_size)


class SampledAnalysis:
    """ε, δ or σ of a :class:`Model`, found by a search and verified on fresh samples.

    Args:
      mechanism: what is analysed.
      model: its estimator and bound.
      seed: of the verifying samples; the operating system's entropy unless pinned.
    """

    def __init__(self, mechanism: Any, model: Model, seed: int | None = None) -> None:
        self.mechanism, self.model, self.seed = mechanism, model, seed

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        """The smallest ε that a few attempts verify at this σ and δ."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        delta = _check.probability("delta", delta)

        def log_estimate(epsilon: float) -> float:
            return self.model.log_estimate(sigma, epsilon)

        found = solve.smallest(
            lambda epsilon: log_estimate(epsilon) - math.log(delta), 2.0, name="epsilon",
            relative=1e-3, least=1e-4, largest=1e4,
        )  # fmt: skip
        epsilon, spent, numbers = self._verify(
            found, delta, log_estimate, lambda at, beta, key: self.model.bound(sigma, at, beta, key)
        )
        return self._guarantee(sigma, epsilon, delta, spent, numbers)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        """The smallest σ that a few attempts verify for (ε, δ)."""
        epsilon, delta = _check.positive("epsilon", epsilon), _check.probability("delta", delta)

        def log_estimate(sigma: float) -> float:
            return self.model.log_estimate(sigma, epsilon)

        found = solve.smallest(
            lambda sigma: log_estimate(sigma) - math.log(delta),
            self.model.guess(epsilon, delta), name="noise multiplier", relative=1e-3,
        )  # fmt: skip
        sigma, spent, numbers = self._verify(
            found, delta, log_estimate,
            lambda at, beta, key: self.model.bound(at, epsilon, beta, key),
        )  # fmt: skip
        return self._guarantee(sigma, epsilon, delta, spent, numbers)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """A verified δ at this σ and ε, its failure probability included."""
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.positive("epsilon", epsilon)
        estimate = math.exp(max(self.model.log_estimate(sigma, epsilon), -600.0))
        beta = min(estimate * _BETA_SHARE, 0.01)
        value, numbers = self.model.bound(sigma, epsilon, beta, _chunks.seed_key(self.seed))
        return self._guarantee(sigma, epsilon, min(value + beta, 1.0), beta, numbers)

    def _verify(self, found, delta, log_estimate, bound):  # type: ignore[no-untyped-def]
        """Attempts at growing x until the bound plus all failure probabilities is <= δ."""
        beta, key = delta * _BETA_SHARE, _chunks.seed_key(self.seed)
        slope = (log_estimate(found * 1.02) - log_estimate(found)) / math.log(1.02)
        slope = slope if math.isfinite(slope) and slope < 0 else -1.0
        x, missed = found * 1.001, math.inf
        for attempt in range(1, _ATTEMPTS + 1):
            value, numbers = bound(x, beta, jax.random.fold_in(key, attempt))
            spent = attempt * beta
            if value + spent <= delta:
                return x, spent, {**numbers, "attempts": attempt}
            # the next attempt starts where this one's excess would just vanish, and a bit beyond
            missed = math.log(value / (delta - (attempt + 1) * beta))
            x *= math.exp(min(1.2 * max(missed, 1e-3) / -slope, 0.5) + 1e-3 * attempt)
        raise _check.FailureError(
            f"not verified: after {_ATTEMPTS} attempts the bound on δ at {x:.5g} still misses "
            f"{delta:g} by a factor {math.exp(missed):.3g}. Use more samples."
        )

    def _guarantee(
        self, sigma: float, epsilon: float, delta: float, beta: float, numbers: dict[str, Any]
    ) -> Guarantee:
        mechanism = self.mechanism
        return Guarantee(
            epsilon=epsilon, delta=delta, noise_multiplier=sigma,
            privacy_unit=mechanism.privacy_unit, group_size=mechanism.group_size,
            adjacency=mechanism.adjacency, method=self.model.method, status=self.model.status,
            failure_probability=beta,
            details={
                "sampling": mechanism.sampling.describe(),
                "strategy": mechanism.strategy.describe(), "seed": self.seed, **numbers,
            },
        )  # fmt: skip


def model(mechanism: Any, samples: int = SAMPLES) -> Model:
    """The model of a balls-in-bins mechanism: one unit, or a group of K.

    Raises:
      UsageError: C has negative entries (Lemma 3.2 of Choquette-Choo et al. 2024 needs C >= 0).
    """
    pair = dominating_pair.exact(mechanism.strategy, mechanism.sampling)
    unit = OneUnit(pair, samples)
    if mechanism.group_size == 1:
        return unit
    return Chain(unit, mechanism.group_size)
