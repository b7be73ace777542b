"""k of n sampling: a fixed number of participations, spread over the run with a separation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling._bins import SeparatedBins
from mfopt.sampling._generator import generator


@dataclasses.dataclass(frozen=True)
class KOfN(SeparatedBins):
    """Draw exactly ``epochs`` of the n iterations for each unit, uniformly and independently.

    Any two of them are at least ``separation`` apart on a circle: the last iteration is the first
    one's neighbour, so that all iterations have one law. A separation of 1 is random allocation, k
    of n without replacement (Feldman and Shenfeld 2026; balanced iteration subsampling).

    >>> KOfN(bins=128, epochs=16, separation=64).iterations
    2048

    Attributes:
      separation: S, at most n/(epochs + 1).
    """

    kind: ClassVar[str] = "k-of-n"
    independent: ClassVar[bool] = True
    mistaken_for: ClassVar[str] = "drawing iterations epoch by epoch, or without the circle"

    @staticmethod
    def largest_separation(bins: int, epochs: int) -> int:
        return bins * epochs // (epochs + 1)

    def _too_large(self, most: int) -> tuple[str, str]:
        return (
            f"must be at most bins × epochs/(epochs + 1) ({most})",
            "As many as bins would be a fixed cycle: use a smaller separation, or balls-in-bins.",
        )

    def words(self) -> str:
        return (
            f"k of n, {self.epochs} of {self.iterations} iterations for each unit, any two at "
            f"least {self.separation} apart on a circle"
        )

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The iterations of each of ``units`` units, in order of time, shape (units, epochs)."""
        units = _check.integer("units", units, at_least=0)
        n, k = self.iterations, self.epochs
        # one participation anywhere; after it the n − kS free steps in k parts, by k − 1 borders
        places = n - k * self.separation + k - 1
        steps = np.empty((units, k), np.int32 if n < 2**30 else np.int64)
        steps[:, 0] = rng.integers(0, n, units)
        borders = steps[:, 1:]
        for j in range(k - 1):  # Floyd: a subset of ``places``, one at a time
            top = places - k + 1 + j
            drawn = rng.integers(0, top + 1, units)
            known = np.any(borders[:, :j] == drawn[:, None], axis=1)
            borders[:, j] = np.where(known, top, drawn)
        borders.sort(axis=1)
        borders += np.arange(1, k) * self.separation - np.arange(k - 1) + steps[:, :1]
        steps %= n
        steps.sort(axis=1)
        return steps

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        # units in order of their iterations
        steps = self.assign(population, generator(seed)).ravel()
        order = np.argsort(steps, kind="stable")
        border = np.searchsorted(steps[order], np.arange(self.iterations + 1))
        units = order // self.epochs

        def drawn(step: int) -> np.ndarray:
            return units[border[self._step(step)] : border[step + 1]]

        return drawn
