"""Fixed order: the index of a unit determines its batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling.base import Adjacency, BinScheme, Frozen


@dataclasses.dataclass(frozen=True)
class FixedOrder(BinScheme):
    """The same participation pattern as balls-in-bins, but the bins are not random.

    Unit i belongs to batch ``i % bins``. There is no amplification: the accountant covers
    the worst bin. Any order that was chosen independently of the data is allowed.

    >>> FixedOrder(bins=3, epochs=2).sample(step=4, population=8, seed=0)
    array([1, 4, 7])
    """

    kind = "fixed-order"
    independent = False
    prefix_closed = True
    public_order = True
    step_name = "iteration"

    def sample(self, step: int, population: int, seed: int = 0) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing; ``seed`` is not used."""
        population = _check.integer("population", population, at_least=0)
        return np.arange(self._step(step) % self.bins, population, self.bins)

    def batch_sizes(self, step: int, population: int) -> Frozen:
        return scipy.stats.binom(self.sample(step, population).size, 1)

    def executed_adjacency(self, accounted: Adjacency) -> Adjacency:
        # numbers decide the batches: who leaves keeps the number, and the data is taken away,
        # which changes C x by as much as in the account
        return "zero-out" if accounted == "add-remove" else accounted
