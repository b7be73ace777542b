"""Base of the schemes with one batch in each epoch for every unit."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import scipy

from mfopt._runtime import _check
from mfopt.sampling.base import MOST_ITERATIONS, Scheme


@dataclasses.dataclass(frozen=True)
class BinScheme(Scheme, abstract=True):
    """Scheme in which a unit has one of ``bins`` batches in each of ``epochs`` passes."""

    bins: int
    epochs: int

    def __post_init__(self) -> None:
        self._integer("bins")
        self._integer("epochs")
        if self.iterations > MOST_ITERATIONS:
            rule = f"bins × epochs must be at most {MOST_ITERATIONS} iterations"
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

    def expected_batch(self, population: int) -> float:
        """Mean number of units in an iteration."""
        return _check.integer("population", population) / self.bins


@dataclasses.dataclass(frozen=True)
class SeparatedBins(BinScheme, abstract=True):
    """Scheme in which any two steps of a unit are at least ``separation`` apart.

    A step has the expected batch of one of ``bins`` bins.
    """

    separation: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("separation")
        most = self.largest_separation(self.bins, self.epochs)
        if self.separation > max(most, 1):
            raise _check.reject("separation", self.separation, *self._too_large(most))

    @staticmethod
    @abc.abstractmethod
    def largest_separation(bins: int, epochs: int) -> int:
        """Largest separation of a run of this size."""

    @abc.abstractmethod
    def _too_large(self, most: int) -> tuple[str, str]:
        """The rule for a separation above ``most``, and the way out."""

    def with_bins(self, bins: int) -> Self:
        separation = max(1, min(self.separation, self.largest_separation(bins, self.epochs)))
        return dataclasses.replace(self, bins=bins, separation=separation)

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        """None: a unit may take part more or less often than once in an epoch."""
        return ()

    @property
    def most_bands(self) -> int:
        return self.separation

    def batch_sizes(self, step: int, population: int) -> Any:
        self._step(step)
        return scipy.stats.binom(population, 1 / self.bins)
