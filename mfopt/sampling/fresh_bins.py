"""Fresh bins: every unit in a new random batch in each epoch, or every few epochs."""

from __future__ import annotations

import dataclasses

from mfopt._runtime import _check
from mfopt.sampling.base import AssignedBins


@dataclasses.dataclass(frozen=True)
class FreshBins(AssignedBins):
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
    kind = "fresh-bins"
    independent = True
    prefix_closed = True
    mistaken_for = "reassigning units at other epochs"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        rhythm = "every epoch" if self.rethrow == 1 else f"every {self.rethrow} epochs"
        return (
            f"fresh bins, reassigned {rhythm}: {self.epochs} epochs × {self.bins} bins "
            f"= {self.iterations} iterations"
        )

    def _stream(self, throw: int) -> int:
        return throw
