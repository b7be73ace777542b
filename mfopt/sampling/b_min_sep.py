"""b-min-sep sampling: coin flips with a rest after each participation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling._generator import generator
from mfopt.sampling.base import SeparatedScheme


@dataclasses.dataclass(frozen=True)
class BMinSep(SeparatedScheme):
    """Let each available unit take part by chance, then rest for ``separation`` − 1 steps.

    Dong and Ganesh 2026, in its stationary form: a unit begins with the rest that it would have
    after long, so that all steps have one law. The chance is that of an expected batch as large as
    one of ``bins`` bins, p = 1/(bins − separation + 1). How often a unit takes part is random,
    ``epochs`` times on average; two of its steps are at least ``separation`` apart. A separation of
    1 is Poisson sampling.

    >>> BMinSep(bins=128, epochs=16, separation=64).probability
    0.015384615384615385
    """

    kind = "b-min-sep"
    mistaken_for = "beginning with every unit available"

    @property
    def probability(self) -> float:
        """Chance that an available unit takes part in a step."""
        return 1 / (self.bins - self.separation + 1)

    def first_steps(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """First step of each of ``units`` units, shape (units,); it may lie past the end."""
        rests = np.full(self.separation, self.probability)
        rests[0] = 1.0
        cut = np.cumsum(rests / (1 + (self.separation - 1) * self.probability))
        pause = np.minimum(np.searchsorted(cut, rng.random(units), "right"), self.separation - 1)
        return pause + self.waits(units, rng)

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        population = _check.integer("population", population, at_least=0)
        current, ahead, units = -1, np.zeros(0, np.int64), np.zeros(0, np.int64)

        def drawn(step: int) -> np.ndarray:
            nonlocal current, ahead, units
            if self._step(step) < current or current < 0:
                current, ahead = -1, self.first_steps(population, generator(seed))
            while current < step:
                current += 1
                units = np.flatnonzero(ahead == current)
                waits = self.waits(len(units), generator(seed, current))
                ahead[units] += self.separation + waits
            return units

        return drawn

    def waits(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """Steps that available units wait, at most until after the end."""
        return np.minimum(rng.geometric(self.probability, units) - 1, self.iterations)
