"""Balls-in-bins: every unit in one random batch, the same in all epochs."""

from __future__ import annotations

import dataclasses

from mfopt.sampling.base import AssignedBins


@dataclasses.dataclass(frozen=True)
class BallsInBins(AssignedBins):
    """Assign every unit once, uniformly and independently, to one of ``bins`` batches.

    Iteration t (0-based) uses batch ``t % bins``; the assignment is kept for all ``epochs`` passes
    (Choquette-Choo et al. 2024, Definition 3.1). A unit therefore takes part in exactly ``epochs``
    iterations, ``bins`` apart. This is *not* the scheme that reassigns the bins in each epoch
    (:class:`~mfopt.sampling.FreshBins`): the two have very different privacy, and their numbers
    never mix.

    >>> BallsInBins(bins=128, epochs=16).iterations
    2048
    """

    kind = "balls-in-bins"
    independent = True
    prefix_closed = True
    mistaken_for = "reassigning units in each epoch"

    def words(self) -> str:
        return (
            f"balls-in-bins, bins fixed over all epochs: {self.epochs} epochs × {self.bins} bins "
            f"= {self.iterations} iterations"
        )
