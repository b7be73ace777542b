"""Fixed batches: a random subset of fixed size in every iteration."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling._generator import generator, subset
from mfopt.sampling.base import Adjacency, Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class FixedBatch(Scheme):
    """A uniformly random subset of exactly ``batch_size`` of ``population`` units per iteration.

    Drawn without replacement within an iteration, independently across iterations. The account
    (Ganesh 2024, Theorem 3.3) is for adding or removing units at a fixed ``batch_size``, where
    ``population`` is the size of the larger of the two data sets; it also covers larger ones.
    Under zero-out and replace the number of units does not change.
    """

    batch_size: int
    population: int
    iterations: int
    kind = "fixed-batch"
    independent = False
    prefix_closed = True
    # who is there is public, and what they contribute is not
    run_adjacency = "zero-out"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.population:
            raise _check.reject(
                "batch_size", self.batch_size, f"the population has {self.population} units"
            )

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing, shape (batch_size,)."""
        population = self._stated(self.population, population)
        return subset(population, self.batch_size, generator(seed, self._step(step)))

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        self._stated(self.population, population)
        return scipy.stats.binom(self.batch_size, 1)

    def expected_batch(self, population: int) -> float:
        """``batch_size``, exactly."""
        return float(self.batch_sizes(0, population).mean())

    def executed_adjacency(self, accounted: Adjacency) -> Adjacency:
        """Refused for an account of "add-remove"; one of "zero-out" is what a run has.

        A run has a fixed number of units, so what it protects is a unit's data. In one round that
        is within the add-remove account, which doubles the norm; but a round in which the others'
        mean equals the unit's contribution and one in which it is 0 are worst in opposite
        directions, so that what composes is a pair of its own
        (:mod:`mfopt.accounting.loss_distribution.exchange`).
        """
        if accounted != "add-remove":
            return accounted
        raise _check.reject(
            "sampling",
            self.kind,
            "an add-remove account does not cover a run with fixed batches: its number of units is "
            "fixed, and zeroing a unit's data does not compose like adding or removing it",
            "Account for 'zero-out', or use poisson or balls-in-bins sampling.",
        )
