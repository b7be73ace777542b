"""Cyclic Poisson sampling whose groups are drawn: each unit is in one of them by chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mfopt.sampling.base import SeparatedScheme
from mfopt.sampling.cyclic_poisson import CyclicPoisson


@dataclasses.dataclass(frozen=True)
class RandomPartition(SeparatedScheme):
    """Poisson sampling from one of S = ``separation`` groups in turn, units in a random group each.

    The draws are those of :class:`CyclicPoisson` with S groups and probability S / ``bins``. There
    an account holds for any partition; here it is for the random one, which stays secret: which
    unit is in which group must follow from the secret key alone (jax-privacy's independent
    partition). With one group it is Poisson sampling.

    >>> RandomPartition(bins=128, epochs=16, separation=16).cyclic
    CyclicPoisson(probability=0.125, bands=16, iterations=2048)
    """

    kind = "random-partition"
    mistaken_for = "a partition that is fixed or known"

    @property
    def cyclic(self) -> CyclicPoisson:
        """The scheme with any partition, whose account bounds this one's."""
        return CyclicPoisson(self.separation / self.bins, self.separation, self.iterations)

    def words(self) -> str:
        return f"{super().words()}, each unit in a random one of as many groups, which stays secret"

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        return self.cyclic.draws(population, seed)
