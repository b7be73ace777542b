"""Truncated Poisson sampling: Poisson sampling with a maximum batch size."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy

from mfopt.sampling._generator import generator, subset
from mfopt.sampling.base import Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class TruncatedPoisson(Scheme):
    """Poisson sampling with batches truncated to ``batch_size`` uniformly chosen units.

    This bounds memory. A unit in a full batch displaces another one, which the account charges
    for; it needs the size of the larger data set, ``population``.

    >>> TruncatedPoisson(0.9, batch_size=3, population=10, iterations=5).sample(0, 10, 1).size
    3
    """

    probability: float
    batch_size: int
    population: int
    iterations: int
    kind = "truncated-poisson"
    independent = False
    prefix_closed = True
    # a unit that is gone makes room for another in a full batch
    run_adjacency = "zero-out"

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing; at most ``batch_size``."""
        rng = generator(seed, self._step(step))
        count = int(rng.binomial(self._stated(self.population, population), self.probability))
        # a uniform subset of a uniform subset
        return subset(self.population, min(count, self.batch_size), rng)

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        count = self._stated(self.population, population)
        limit = min(self.batch_size, count)
        law = scipy.stats.binom(count, self.probability)
        values = np.arange(limit + 1)
        chances = np.append(law.pmf(values[:-1]), law.sf(limit - 1))
        return scipy.stats.rv_discrete(values=(values, chances / chances.sum()))

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return float(self.batch_sizes(0, population).mean())

    @property
    def full(self) -> float:
        """Probability that the others alone fill a batch."""
        other_units = scipy.stats.binom(self.population - 1, self.probability)
        return float(other_units.sf(self.batch_size - 1))

    @property
    def kept(self) -> float:
        """Probability that a unit takes part if the others alone fill the batch."""
        full = self.full
        if full == 0:
            return 0.0
        everybody = scipy.stats.binom(self.population, self.probability)
        share = float(everybody.sf(self.batch_size)) * self.batch_size / self.population
        return min(share / full, self.probability)
