"""Fresh bins: every unit in a new random batch in each epoch, or every few epochs."""

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
class FreshBins(BinScheme):
    """Assign every unit, uniformly and independently, to one of ``bins`` batches, again in each
    epoch.

    A unit is reassigned before every ``rethrow``-th epoch and keeps its bin until then, so it takes
    part exactly once in each epoch. ``rethrow = 1`` reassigns in every epoch: the scheme with a
    tight analysis that is closest to shuffling. ``rethrow = epochs`` assigns once, which is
    balls-in-bins: the two have very different privacy, and their numbers never mix.

    >>> FreshBins(bins=128, epochs=16).throws
    16

    Attributes:
      rethrow: epochs between two assignments; divides ``epochs``.
    """

    rethrow: int = 1
    kind: ClassVar[str] = "fresh-bins"
    independent: ClassVar[bool] = True
    prefix_closed: ClassVar[bool] = True
    mistaken_for: ClassVar[str] = "reassigning units at other epochs"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("rethrow")
        if self.epochs % self.rethrow:
            rule = f"must divide the number of epochs ({self.epochs})"
            way_out = "1 reassigns the bins in every epoch."
            raise _check.reject("rethrow", self.rethrow, rule, way_out)

    @property
    def throws(self) -> int:
        """Number of assignments in a run."""
        return self.epochs // self.rethrow

    @property
    def most_bands(self) -> int:
        return self.bins

    def words(self) -> str:
        every = "every epoch" if self.rethrow == 1 else f"every {self.rethrow} epochs"
        return (
            f"fresh bins, reassigned {every}: {self.epochs} epochs × {self.bins} bins "
            f"= {self.iterations} iterations"
        )

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units in one assignment, shape (units,)."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call."""
        epoch, place = divmod(self._step(step), self.bins)
        thrown = self.assign(population, generator(seed, epoch // self.rethrow))
        return np.flatnonzero(thrown == place)

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        # one assignment is kept, in the order that groups units by bin
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []

        def drawn(step: int) -> np.ndarray:
            epoch, place = divmod(self._step(step), self.bins)
            throw = epoch // self.rethrow
            if not kept or kept[0][0] != throw:
                bins = self.assign(population, generator(seed, throw))
                order = np.argsort(bins, kind="stable")
                border = np.searchsorted(bins[order], np.arange(self.bins + 1))
                kept[:] = [(throw, order, border)]
            _, order, border = kept[0]
            return order[border[place] : border[place + 1]]

        return drawn

    def batch_sizes(self, step: int, population: int) -> Any:
        self._step(step)
        return scipy.stats.binom(population, 1 / self.bins)

    def displacement(self, population: int, batch_size: int) -> float:
        # a unit meets one batch per assignment, with a binomial number of others in it
        one = float(scipy.stats.binom.sf(batch_size - 1, max(0, population - 1), 1 / self.bins))
        return min(1.0, self.throws * one)
