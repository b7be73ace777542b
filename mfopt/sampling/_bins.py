"""Base of the schemes with one batch in each epoch for every unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

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
            raise _check.reject(
                "bins, epochs",
                (self.bins, self.epochs),
                f"bins × epochs must be at most {MOST_ITERATIONS} iterations",
            )

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
