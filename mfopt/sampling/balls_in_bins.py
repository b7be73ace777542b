"""Balls-in-bins: every unit in one random batch, the same in all epochs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling._bins import BinScheme
from mfopt.sampling._generator import generator


@dataclasses.dataclass(frozen=True)
class BallsInBins(BinScheme):
    """Assign every unit once, uniformly and independently, to one of ``bins`` batches.

    Iteration t (0-based) uses batch ``t % bins``; the assignment is kept for all ``epochs`` passes
    (Choquette-Choo et al. 2024, Definition 3.1). A unit therefore takes part in exactly ``epochs``
    iterations, ``bins`` apart. This is *not* the scheme that reassigns the bins in each epoch
    (:class:`~mfopt.sampling.FreshBins`): the two have very different privacy, and their numbers
    never mix.

    >>> BallsInBins(bins=128, epochs=16).iterations
    2048
    """

    kind: ClassVar[str] = "balls-in-bins"
    independent: ClassVar[bool] = True
    prefix_closed: ClassVar[bool] = True
    mistaken_for: ClassVar[str] = "reassigning units in each epoch"

    def words(self) -> str:
        return (
            f"balls-in-bins, bins fixed over all epochs: {self.epochs} epochs × {self.bins} bins "
            f"= {self.iterations} iterations"
        )

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units, shape (units,): the loader's random choice."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call.

        A loader that runs through all steps draws ``assign(population, generator(seed))`` once
        instead: it is the same assignment.
        """
        bin_of_step = self._step(step) % self.bins
        return np.flatnonzero(self.assign(population, generator(seed)) == bin_of_step)

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        # one assignment serves all steps; kept in the order that groups units by bin
        bins = self.assign(population, generator(seed))
        order = np.argsort(bins, kind="stable")
        border = np.searchsorted(bins[order], np.arange(self.bins + 1))

        def drawn(step: int) -> np.ndarray:
            place = self._step(step) % self.bins
            return order[border[place] : border[place + 1]]

        return drawn

    def batch_sizes(self, step: int, population: int) -> Any:
        self._step(step)
        return scipy.stats.binom(population, 1 / self.bins)

    def displacement(self, population: int, batch_size: int) -> float:
        # a unit meets one batch in all epochs, with a binomial number of others in it
        return float(scipy.stats.binom(max(0, population - 1), 1 / self.bins).sf(batch_size - 1))
