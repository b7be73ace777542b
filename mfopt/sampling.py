"""Sampling schemes: frozen public specs of who takes part in which iteration.

The same object is given to the accountant and to the data loader, so what is proven is what
is executed. A spec holds public numbers only, never data.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from mfopt import _check


@dataclasses.dataclass(frozen=True)
class BallsInBins:
    """Each unit is thrown once, uniformly and independently, into one of ``bins`` batches.

    Iteration t (0-based) uses batch ``t % bins``; the assignment is kept for all ``epochs``
    passes (Choquette-Choo et al. 2024, Definition 3.1). A unit therefore takes part in exactly
    ``epochs`` iterations, ``bins`` apart. This is *not* the scheme in which bins are thrown
    afresh in each epoch: the two have very different privacy, and their numbers never mix.

    >>> BallsInBins(bins=128, epochs=16).iterations
    2048
    """

    bins: int
    epochs: int
    kind: ClassVar[str] = "balls-in-bins"

    def __post_init__(self) -> None:
        _check.integer("bins", self.bins)
        _check.integer("epochs", self.epochs)

    @property
    def iterations(self) -> int:
        """Training iterations n = bins * epochs."""
        return self.bins * self.epochs

    def describe(self) -> dict[str, Any]:
        """JSON-able description; :func:`from_description` reads it back."""
        return {"kind": self.kind, "bins": self.bins, "epochs": self.epochs}

    def assign(self, units: int, rng: np.random.Generator) -> np.ndarray:
        """The bin of each of ``units`` units, shape (units,): the loader's random choice."""
        return rng.integers(0, self.bins, size=_check.integer("units", units, at_least=0))


SamplingScheme = BallsInBins


def from_description(description: dict[str, Any]) -> SamplingScheme:
    """The scheme that ``describe()`` gave; unknown or malformed descriptions are refused."""
    fields = dict(description)
    kind = fields.pop("kind", None)
    schemes = {BallsInBins.kind: BallsInBins}
    if kind not in schemes:
        raise _check.reject("sampling kind", kind, f"must be one of {sorted(schemes)}")
    try:
        return schemes[kind](**fields)
    except TypeError as error:
        raise _check.reject("sampling", description, f"does not describe a scheme ({error})") from None
