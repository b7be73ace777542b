"""Poisson sampling: each unit is included independently in every iteration."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling._generator import bernoulli, generator
from mfopt.sampling.base import Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class Poisson(Scheme):
    """Poisson sampling: a unit takes part in each iteration independently with ``probability``.

    Batches vary in size: the normalizer must be the fixed ``expected_batch(population)``.
    """

    probability: float
    iterations: int
    kind = "poisson"
    independent = True
    prefix_closed = True

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return self.probability * _check.integer("population", population)

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing."""
        population = _check.integer("population", population, at_least=0)
        return bernoulli(population, self.probability, generator(seed, self._step(step)))

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        return scipy.stats.binom(population, self.probability)
