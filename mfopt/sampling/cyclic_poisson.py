"""Cyclic Poisson sampling: Poisson sampling from one group of units at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling._generator import bernoulli, generator
from mfopt.sampling.base import Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class CyclicPoisson(Scheme):
    """Poisson sampling from one of ``bands`` groups in turn, for a C with ``bands`` bands.

    Every unit belongs to one of ``bands`` groups. Iteration t takes each unit of group
    ``t % bands`` independently with ``probability``, the others not at all
    (Choquette-Choo et al. 2023, banded factorizations; section 5.1.1 of the 2024 paper). A
    unit's participations are at least ``bands`` apart, so that a banded C never mixes two of
    them. ``probability`` is the sampling probability *within the group*: ``bands`` times the rate
    batch / population that plain Poisson sampling would have.

    >>> CyclicPoisson(probability=0.04, bands=4, iterations=2000).expected_batch(50_000)
    500.0
    """

    probability: float
    bands: int
    iterations: int
    kind = "cyclic-poisson"
    independent = True
    prefix_closed = True
    bands_are_groups = True

    @property
    def rounds(self) -> int:
        """Most iterations that a unit can take part in: iterations / bands, rounded up."""
        return -(-self.iterations // self.bands)

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration, over the assignment to groups as well."""
        return self.probability * _check.integer("population", population) / self.bands

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The group of each of ``units`` units, shape (units,), drawn independently.

        A unit's group does not depend on the other units, so adding or removing one moves no
        other. The guarantee holds for any assignment with this property.
        """
        return rng.integers(0, self.bands, size=_check.integer("units", units, at_least=0))

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call."""
        return self.draws(population, seed)(step)

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        group_of = self.assign(population, generator(seed))

        def drawn(step: int) -> np.ndarray:
            members = np.flatnonzero(group_of == self._step(step) % self.bands)
            return members[bernoulli(len(members), self.probability, generator(seed, step))]

        return drawn

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        return scipy.stats.binom(population, self.probability / self.bands)
