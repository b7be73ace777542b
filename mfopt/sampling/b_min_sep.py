"""b-min-sep sampling: coin flips with a rest after each participation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Self

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling._bins import BinScheme
from mfopt.sampling._generator import generator


@dataclasses.dataclass(frozen=True)
class BMinSep(BinScheme):
    """Let each available unit take part by chance, then rest for ``separation`` − 1 steps.

    Dong and Ganesh 2026, in its stationary form: a unit begins with the rest that it would have
    after long, so that all steps have one law. The chance is that of an expected batch as large as
    one of ``bins`` bins, p = 1/(bins − separation + 1). How often a unit takes part is random,
    ``epochs`` times on average; two of its steps are at least ``separation`` apart. A separation of
    1 is Poisson sampling.

    >>> BMinSep(bins=128, epochs=16, separation=64).probability
    0.015384615384615385

    Attributes:
      separation: S, less than ``bins`` (as many would be balls-in-bins).
    """

    separation: int = 1
    kind: ClassVar[str] = "b-min-sep"
    independent: ClassVar[bool] = True
    prefix_closed: ClassVar[bool] = True
    mistaken_for: ClassVar[str] = "beginning with every unit available"

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

    @property
    def probability(self) -> float:
        """Chance that an available unit takes part in a step."""
        return 1 / (self.bins - self.separation + 1)

    def words(self) -> str:
        return (
            f"b-min-sep, any two steps of a unit at least {self.separation} apart: {self.epochs} "
            f"epochs × {self.bins} iterations on average = {self.iterations} iterations"
        )

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
