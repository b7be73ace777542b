"""Base of the schemes with one batch in each epoch for every unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.sampling._generator import generator
from mfopt.sampling.base import MOST_ITERATIONS, Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class BinScheme(Scheme, abstract=True):
    """Scheme in which a unit has one of ``bins`` batches in each of ``epochs`` passes."""

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.iterations > MOST_ITERATIONS:
            rule = f"their product must be at most {MOST_ITERATIONS}"
            raise _check.reject("bins, epochs", (self.bins, self.epochs), rule)

    @property
    def iterations(self) -> int:
        """Training iterations n = bins * epochs."""
        return self.bins * self.epochs

    def with_bins(self, bins: int) -> Self:
        """The scheme with so many bins."""
        return dataclasses.replace(self, bins=bins)

    @property
    def epoch_ends(self) -> Sequence[int]:
        """Last step of each epoch: every unit has a batch in each."""
        return range(self.bins - 1, self.iterations, self.bins)

    @property
    def most_bands(self) -> int | None:
        """Most bands of a C that is accounted for; None where any C is."""
        return None

    @property
    def throws(self) -> int:
        """Number of draws that a unit's steps take, at most: one in each epoch."""
        return self.epochs

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return _check.integer("population", population) / self.bins

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Indices of the units of iteration ``step``, increasing. O(population) a call or more."""
        return self.draws(population, seed)(step)

    def batch_sizes(self, step: int, population: int) -> Frozen:
        self._step(step)
        return scipy.stats.binom(population, 1 / self.bins)


@dataclasses.dataclass(frozen=True)
class SeparatedScheme(BinScheme, abstract=True):
    """Scheme with random participations, any two of a unit ``separation`` iterations apart or more.

    A unit takes part ``epochs`` times on average, and is drawn whatever the others do.

    Attributes:
      separation: S, less than ``bins`` (as many would be balls-in-bins).
    """

    separation: int = 1
    independent: ClassVar[bool] = True
    prefix_closed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separation > max(self.bins - 1, 1):
            rule = f"must be less than the number of bins ({self.bins})"
            way_out = "With as many, a unit takes part in a fixed cycle: use balls-in-bins."
            raise _check.reject("separation", self.separation, rule, way_out)

    def with_bins(self, bins: int) -> Self:
        separation = max(1, min(self.separation, bins - 1))
        return dataclasses.replace(self, bins=bins, separation=separation)

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """None: a unit may take part more or less often than once in an epoch."""
        return ()

    @property
    def most_bands(self) -> int:
        return self.separation

    def words(self) -> str:
        return (
            f"{self.kind}, any two steps of a unit at least {self.separation} apart: {self.epochs} "
            f"epochs × {self.bins} iterations on average = {self.iterations} iterations"
        )


@dataclasses.dataclass(frozen=True)
class AssignedBins(BinScheme, abstract=True):
    """Scheme that assigns every unit, uniformly and independently, to one of ``bins`` batches, once
    or again every few epochs."""

    @property
    def throws(self) -> int:
        """Number of assignments in a run."""
        return 1

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units in one assignment, shape (units,)."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        # one assignment is kept, in the order that groups units by bin
        assigned: list[tuple[int, np.ndarray, np.ndarray]] = []
        lasts = self.epochs // self.throws

        def drawn(step: int) -> np.ndarray:
            epoch, bin_index = divmod(self._step(step), self.bins)
            throw = epoch // lasts
            if not assigned or assigned[0][0] != throw:
                bins = self.assign(population, generator(seed, self._stream(throw)))
                order = np.argsort(bins, kind="stable")
                border = np.searchsorted(bins[order], np.arange(self.bins + 1))
                assigned[:] = [(throw, order, border)]
            _, order, border = assigned[0]
            return order[border[bin_index] : border[bin_index + 1]]

        return drawn

    def _stream(self, throw: int) -> int | None:
        """Number of the generator of an assignment; None for that of a run's only one."""
        return None
