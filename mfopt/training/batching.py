"""Executing a sampling spec: the units of each step, in fixed-shape microbatches.

The spec is the one that the accountant was given. Padding batches of uneven size is free, cutting
them to ``batch_size`` is charged to δ or doubles the noise (``docs/training/algorithms.md``).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling import Scheme, UnitSampler
from mfopt.sampling.sampler import pad
from mfopt.training.secrets import uniform_hash


@dataclasses.dataclass(frozen=True)
class Batch:
    """The units of one step: ``drawn`` of them the scheme chose, ``truncated`` of those were cut.

    ``units``: (slots,) int64, -1 in padded slots; slots is a multiple of ``microbatch``.
    """

    units: np.ndarray
    drawn: int
    truncated: int
    microbatch: int

    @property
    def padded(self) -> int:
        """Empty slots."""
        return int(np.sum(self.units < 0))

    def blocks(self, most: int) -> Iterator[np.ndarray]:
        """The units as microbatches (k, m), at most ``most`` of them at a time; at least one."""
        rows = self.units.reshape(-1, self.microbatch)
        for begin in range(0, len(rows), most):
            yield rows[begin : begin + most]


class Sampler:
    """Draws the batches of a run from its sampling spec.

    Args:
        scheme: the spec that was accounted for.
        population: number of units; public (it enters the default normalizer).
        seed: secret key of the draws.
        microbatch: units per compiled gradient call.
        batch_size: fixed number of units per step; None: no truncation.
        truncation: what is paid where ``batch_size`` can truncate: "charge", more δ
            (:func:`charged_delta`), or "double", twice the noise for add-remove adjacency.
        group_size: units that one privacy unit accounts for. The statement compares this run with
            one that has so many units more, which must not be truncated unnoticed.

    ``drawn[step]`` are the units that the scheme chose (:class:`mfopt.sampling.UnitSampler`).
    :meth:`batch` is a pure function of the step: resuming at step t is calling it from t on.

    Raises:
        UsageError: there is nothing to draw, or the scheme's batches cannot be cut to
            ``batch_size``.
    """

    def __init__(
        self,
        scheme: Scheme,
        population: int,
        seed: int,
        *,
        microbatch: int,
        batch_size: int | None = None,
        truncation: str = "charge",
        group_size: int = 1,
    ) -> None:
        _check.choice("truncation", truncation, ("charge", "double"))
        drawn = UnitSampler(scheme, population, seed)
        self.scheme, self.population, self.drawn = drawn.scheme, drawn.population, drawn
        self.microbatch = _check.integer("microbatch", microbatch)
        self.batch_size = None if batch_size is None else _check.integer("batch_size", batch_size)
        self.truncation = truncation
        self.group_size = _check.integer("group_size", group_size)
        self._seed = seed
        if self.batch_size is not None:
            scheme.check_batch_size(self.batch_size)
        if self.can_truncate:
            scheme.check_truncation()

    @property
    def expected_batch(self) -> float:
        """Mean units per step over the scheme's own randomness: the default public normalizer."""
        return self.drawn.expected_batch

    @property
    def can_truncate(self) -> bool:
        """True if a draw can exceed ``batch_size``, here or in the run with one group more."""
        # elsewhere nobody is ever added: absent units keep their numbers
        more = self.group_size if self.scheme.independent else 0
        return (
            self.batch_size is not None
            and self.scheme.largest_batch(self.population + more) > self.batch_size
        )

    @property
    def sensitivity_factor(self) -> float:
        """Largest change of a step's sum by one unit, in clip bounds: 1, or 2 for "double"."""
        # in a public order the cut units are known by their numbers: nothing is displaced
        hidden = not self.scheme.public_order
        return 2.0 if self.can_truncate and self.truncation == "double" and hidden else 1.0

    def displacement_probability(self, group_size: int = 1) -> float:
        """η: :func:`displacement_probability` of the run; 0 where nothing can be truncated."""
        if self.batch_size is None or not self.can_truncate:
            return 0.0
        return displacement_probability(self.scheme, self.population, self.batch_size, group_size)

    def batch(self, step: int) -> Batch:
        """The units of ``step``, truncated and padded."""
        drawn = self.drawn[step]
        kept = drawn
        if self.batch_size is not None and len(drawn) > self.batch_size:
            if self.scheme.public_order:
                kept = drawn[: self.batch_size]
            else:
                # a priority per (step, unit), independent of data and of the other units: one
                # unit more displaces at most one, and no unit is cut in every pass
                priority = uniform_hash(self._seed, step, drawn)
                kept = np.sort(drawn[np.argsort(priority, kind="stable")[: self.batch_size]])
        units = pad(kept, self.microbatch, slots=self.batch_size or 0, fill=-1).reshape(-1)
        return Batch(units, len(drawn), len(drawn) - len(kept), self.microbatch)

    def describe(self) -> dict[str, Any]:
        """JSON-able: the scheme and the public numbers of its execution."""
        return {
            "scheme": self.scheme.describe(),
            "population": self.population,
            "batch_size": self.batch_size,
            "truncation": self.truncation if self.can_truncate else None,
        }


def displacement_probability(
    scheme: Scheme, population: int, batch_size: int, group_size: int = 1
) -> float:
    """Bound on the chance that one of ``group_size`` units ever meets a batch filled by others.

    The units may be those that the data set has or, as adjacency goes both ways, as many more: each
    then has the whole ``population`` beside it, and the rest of the group.

    Args:
      scheme, population: the sampling, and units in the data set, without the group.
      batch_size, group_size: units of a batch, and K, units that change together.
    """
    return min(1.0, group_size * scheme.displacement(population + group_size, batch_size))


def smallest_batch_size(
    scheme: Scheme, population: int, probability: float, group_size: int = 1
) -> int:
    """Smallest ``batch_size`` whose displacement probability is at most ``probability``.

    Args:
      scheme, population, group_size: as for :func:`displacement_probability`.
      probability: largest displacement probability allowed.
    """

    def rare(batch_size: int) -> bool:
        found = displacement_probability(scheme, population, batch_size, group_size)
        return found <= probability

    most = population + group_size  # a batch that holds all displaces nobody
    return bisect.bisect_left(range(1, most), True, key=rare) + 1


def charged_delta(epsilon: float, delta: float, displacement: float) -> float:
    """δ + (1 + e^ε) η, at most 1: the statement's δ with truncation charged to it.

    H(M(D), M(D')) <= H(M̃(D), M̃(D')) + TV(M(D), M̃(D)) + e^ε TV(M(D'), M̃(D')), where M̃ is the run
    in which the unit displaces nobody and each TV distance is at most η: for add-remove and
    zero-out adjacency.
    """
    if displacement == 0.0:
        return delta
    log_price = np.logaddexp(0.0, epsilon) + math.log(displacement)
    return float(min(1.0, delta + math.exp(min(log_price, 0.0))))
