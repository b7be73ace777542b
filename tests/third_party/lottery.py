"""A sampling scheme as a third party would write it: a lottery for places in balls-in-bins.

Every unit draws once whether it takes part in the run at all. Those that do are thrown into one of
``bins`` batches, which is used in every epoch. Nothing of mfopt is edited: importing this file
registers the scheme for files, loaders and the command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import stats

from mfopt.errors import UsageError
from mfopt.sampling import Scheme, generator


@dataclasses.dataclass(frozen=True)
class Lottery(Scheme):
    """Each unit takes part with ``probability``, then in one of ``bins`` batches of each epoch.

    >>> Lottery(probability=0.25, bins=8, epochs=2).expected_batch(320)
    10.0
    """

    probability: float
    bins: int
    epochs: int
    kind = "third-party-lottery"
    independent = True

    def __post_init__(self) -> None:
        if not isinstance(self.probability, float | int) or not 0 < self.probability <= 1:
            raise UsageError(f"probability = {self.probability!r}: must lie in (0, 1].")
        object.__setattr__(self, "probability", float(self.probability))
        for name in ("bins", "epochs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} = {value!r}: must be a whole number of at least 1.")

    @property
    def iterations(self) -> int:
        return self.bins * self.epochs

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        return self.draws(population, seed)(step)

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        rng = generator(seed)
        bin_of = rng.integers(0, self.bins, population)
        bin_of[rng.random(population) >= self.probability] = -1

        def drawn(step: int) -> np.ndarray:
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < self.length:
                raise UsageError(f"step = {step!r}: must lie in 0..{self.length - 1}.")
            return np.flatnonzero(bin_of == step % self.bins)

        return drawn

    def batch_sizes(self, step: int, population: int):
        return stats.binom(population, self.probability / self.bins)
