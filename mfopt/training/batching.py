"""Executing a sampling spec: the units of each step, in fixed-shape microbatches.

The spec is the one that the accountant was given. Batches of uneven size are padded, which is free,
and never cut (``docs/training/algorithms.md``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.sampling import Scheme, UnitSampler
from mfopt.sampling.sampler import pad


@dataclasses.dataclass(frozen=True)
class Batch:
    """The units of one step.

    ``units``: (slots,) int64, -1 in padded slots; slots is a multiple of ``microbatch``.
    """

    units: np.ndarray
    microbatch: int

    def blocks(self, size: int) -> Iterator[np.ndarray]:
        """The units as microbatches (k, m), at most ``size`` of them at a time; at least one."""
        rows = self.units.reshape(-1, self.microbatch)
        for begin in range(0, len(rows), size):
            yield rows[begin : begin + size]


class Sampler:
    """Draws the batches of a run from its sampling spec.

    Args:
        scheme: the spec that was accounted for.
        population: number of units; public (it enters the default normalizer).
        seed: secret key of the draws.
        microbatch: units per compiled gradient call.
    ``drawn[step]`` are the units that the scheme chose (:class:`mfopt.sampling.UnitSampler`).
    :meth:`batch` is a pure function of the step: resuming at step t is calling it from t on.

    Raises:
        UsageError: there is nothing to draw.
    """

    def __init__(
        self,
        scheme: Scheme,
        population: int,
        seed: int,
        *,
        microbatch: int,
    ) -> None:
        drawn = UnitSampler(scheme, population, seed)
        self.scheme, self.population, self.drawn = drawn.scheme, drawn.population, drawn
        self.microbatch = _check.integer("microbatch", microbatch)

    @property
    def expected_batch(self) -> float:
        """Mean units per step over the scheme's own randomness: the default public normalizer."""
        return self.drawn.expected_batch

    def batch(self, step: int) -> Batch:
        """The units of ``step``, padded."""
        units = pad(self.drawn[step], self.microbatch, fill=-1).reshape(-1)
        return Batch(units, self.microbatch)

    def describe(self) -> JsonObject:
        """JSON-able: the scheme and the public number of units."""
        return {"scheme": self.scheme.describe(), "population": self.population}
