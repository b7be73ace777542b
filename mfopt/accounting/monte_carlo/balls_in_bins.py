"""Balls-in-bins mechanisms behind the common interface.

Any C >= 0: the Monte Carlo core's estimator and certificate. C = I: an exact account without
sampling (:mod:`mfopt.accounting.loss_distribution.allocation`). Groups of K: the whole one-unit
profile, and for C = I the exact mixture as an estimate beside it
(:mod:`mfopt.accounting.monte_carlo.bin_counts`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from mfopt.accounting import verify
from mfopt.accounting.chain import Chain, DeterministicUnit
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.rounds import Direction
from mfopt.accounting.monte_carlo import _chunks, dominating_pair, tilted
from mfopt.accounting.monte_carlo.bin_counts import CountModel
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.frozen import FrozenSamples
from mfopt.accounting.verified import Model, Numbers
from mfopt.guarantee import Status

SAMPLES = 2**17
_SEARCH_SAMPLES = 4096


@dataclasses.dataclass(frozen=True)
class OneUnit(Model):
    """One unit, any C >= 0: the Monte Carlo core's estimator and certificate."""

    pair: DominatingPair
    samples: int = SAMPLES
    method = "balls-in-bins Monte Carlo, Rényi-tilted bound"
    estimator = "balls-in-bins Monte Carlo, design-point importance sampling"
    status: Status = "certified"

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        return max(self.log_estimates(noise_multiplier, epsilon))

    def log_estimates(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        """log δ̂ of the remove and of the add direction, always from the same random numbers."""
        key = _chunks.seed_key(0)
        frozen = FrozenSamples(self.pair, noise_multiplier, epsilon, _SEARCH_SAMPLES, key)
        log_sigma = math.log(noise_multiplier)
        return frozen.evaluate(log_sigma).value, frozen.log_delta_add(log_sigma)

    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, Numbers]:
        first, second = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        remove = self._remove_bound(noise_multiplier, epsilon, beta / 2, first)
        add = self._add_bound(noise_multiplier, epsilon, beta / 2, second)
        numbers = {"remove": remove.value, "add": add.value, "order": remove.order,
                   "samples": remove.samples, "estimate": remove.mean}  # fmt: skip
        return verify.largest((remove.value, add.value)), numbers

    def direction_bound(
        self, direction: Direction, sigma: float, epsilon: float, beta: float, key: jax.Array
    ) -> float:
        """Upper bound of δ in one direction except with probability ``beta``."""
        bounding = self._remove_bound if direction == "remove" else self._add_bound
        return bounding(sigma, epsilon, beta, key).value

    def _remove_bound(
        self, sigma: float, epsilon: float, beta: float, key: jax.Array
    ) -> tilted.UpperBound:
        pilot, fresh = jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)
        order, _ = tilted.choose_order(
            self.pair, sigma, epsilon, samples=self.samples, beta=beta, key=pilot
        )
        return tilted.remove_bound(
            self.pair, sigma, epsilon, order=order, samples=self.samples, beta=beta, key=fresh
        )

    def _add_bound(
        self, sigma: float, epsilon: float, beta: float, key: jax.Array
    ) -> tilted.UpperBound:
        # β is a hundredth of δ: a ceiling of that size needs no sampling
        return tilted.add_bound(
            self.pair, sigma, epsilon, samples=self.samples, beta=beta, negligible=beta, key=key
        )

    def guess(self, epsilon: float, delta: float) -> float:
        return _guess(math.sqrt(float(np.max(np.diagonal(np.asarray(self.pair.gram))))),
                      self.pair.bins, epsilon, delta)  # fmt: skip


def orthogonal_norm(mechanism: Any) -> float | None:
    """The squared norm of the modes where all are orthogonal and equally long, else None.

    Raises:
      UsageError: C has negative entries (Lemma 3.2 of Choquette-Choo et al. 2024 needs C >= 0).
    """
    column = mechanism.strategy.toeplitz_column(mechanism.sampling.iterations)
    if column is not None and column[0] > 0 and not np.any(column[1:]):
        # a multiple of C = I: without a Gram matrix, for any number of bins
        return float(mechanism.sampling.epochs * column[0] ** 2)
    pair = dominating_pair.exact(mechanism.strategy, mechanism.sampling)
    return dominating_pair.orthogonal_norm(pair)


def allocation(bins: int, squared_norm: float) -> DeterministicUnit:
    """The exact one-unit profile of orthogonal modes."""

    def profile(sigma: float, accuracy: float) -> AllocationProfile:
        return AllocationProfile(bins, squared_norm / sigma**2, accuracy)

    def start(epsilon: float, delta: float) -> float:
        return _guess(math.sqrt(squared_norm), bins, epsilon, delta)

    return DeterministicUnit(profile, start)


def model(mechanism: Any, samples: int = SAMPLES) -> Model:
    """The model of a mechanism that is verified rather than computed: a general C, or a group.

    Raises:
      UsageError: C has negative entries (Lemma 3.2 of Choquette-Choo et al. 2024 needs C >= 0).
    """
    group_size, bins = mechanism.group_size, mechanism.sampling.bins
    squared_norm = orthogonal_norm(mechanism) if group_size > 1 else None
    if squared_norm is not None:
        chain = Chain(allocation(bins, squared_norm), group_size, "balls-in-bins with C = I")
        return CountModel(chain, bins, squared_norm)
    pair = dominating_pair.exact(mechanism.strategy, mechanism.sampling)
    if group_size == 1:
        return OneUnit(pair, samples)
    return Chain(OneUnit(pair, samples), group_size, "sampled balls-in-bins")


def _guess(norm: float, bins: int, epsilon: float, delta: float) -> float:
    return norm / gaussian.largest_mu(epsilon + math.log(bins), delta)
