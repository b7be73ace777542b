"""Executing a sampling spec: the units of each step, in fixed-shape microbatches.

The spec is the one that the accountant was given. Batches of uneven size are padded, which is free,
and never cut (``docs/training/algorithms.md``).
"""

from __future__ import annotations

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.sampling import Scheme, UnitSampler
from mfopt.sampling.sampler import pad


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

    def batch(self, step: int) -> np.ndarray:
        """The units of ``step``, int64 (microbatches, microbatch), at least one; -1: nobody."""
        return pad(self.drawn[step], self.microbatch, fill=-1)

    def describe(self) -> JsonObject:
        """JSON-able: the scheme and the public number of units."""
        return {"scheme": self.scheme.describe(), "population": self.population}
