"""Executing a sampling spec: the units of each step, in fixed-shape microbatches.

The spec object is the one that the accountant was given. What is left to decide here is what to do
with batches of uneven size, and that decision has a price of its own:

* **Padding** is free: empty slots add 0, and the sum is divided by a fixed public number.
* **Truncation** to ``batch_size`` is not free, in two ways. A unit that enters a full batch pushes
  another one out, so the sum moves by up to *twice* the bound. And under a random assignment
  the others' absence would tell which batch the unit is in, which amplification needs hidden; it
  does not help that every slot is fixed independently of the data's values. (The paper's remark
  that a truncated unit is a unit with gradient 0, Choquette-Choo et al. 2024, section 5.2.1,
  covers the unit that is cut, not the unit that cuts.) Two sound ways are offered:

  - ``truncation="charge"``: compare with the run in which our unit never displaces another. The
    two differ only if the unit meets a full batch, which has a probability η that is a binomial
    tail of public numbers. The statement becomes (ε, δ + (1 + e^ε) η), for add-remove and for
    zero-out adjacency. Right for a ``batch_size`` some standard deviations above the mean.
  - ``truncation="double"``: the noise is doubled. One unit more changes each sum of the batches
    that it is in by at most two bounds, whatever it displaces, and the batches without it not at
    all: the amplified analysis applies with twice the sensitivity (add-remove adjacency). Right
    for a ``batch_size`` near the mean.

Without ``batch_size`` nothing is truncated: a batch is as many microbatches as it needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from scipy import stats

from mfopt import _check, sampling
from mfopt.training.secrets import uniform_hash

Truncation = Literal["charge", "double"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The units of one step.

    Attributes:
        units: (slots,) int64, -1 in padded slots; slots is a multiple of the microbatch size.
        drawn: units that the scheme chose.
        truncated: how many of those were cut.
    """

    units: np.ndarray
    drawn: int
    truncated: int
    microbatch: int

    @property
    def padded(self) -> int:
        """Empty slots."""
        return int(np.sum(self.units < 0))

    def microbatches(self) -> Iterator[np.ndarray]:
        """The units in blocks of the microbatch size, at least one."""
        yield from self.units.reshape(-1, self.microbatch)


class Sampler:
    """Draws the batches of a run from its sampling spec.

    Args:
        scheme: the spec that was accounted for.
        population: number of units; public (it enters the default normalizer).
        seed: secret key of the draws.
        microbatch: units per compiled gradient call.
        batch_size: fixed number of units per step; None: no truncation.
        truncation: see the module's text. Only read where ``batch_size`` can truncate.

    :meth:`batch` is a pure function of the step: resuming at step t is calling it from t on.
    """

    def __init__(
        self,
        scheme: Any,
        population: int,
        seed: int,
        *,
        microbatch: int,
        batch_size: int | None = None,
        truncation: Truncation = "charge",
    ) -> None:
        if not hasattr(scheme, "sample"):
            raise _check.reject(
                "sampling", scheme, "is a condition on participations, not a random choice",
                "Use balls-in-bins, poisson, cyclic-poisson, fixed-batch or fixed-order.",
            )  # fmt: skip
        if truncation not in ("charge", "double"):
            raise _check.reject("truncation", truncation, "must be 'charge' or 'double'")
        self.scheme = scheme
        self.population = _check.integer("population", population)
        self.microbatch = _check.integer("microbatch", microbatch)
        self.batch_size = None if batch_size is None else _check.integer("batch_size", batch_size)
        self.truncation = truncation
        self._seed = seed
        exact = scheme.batch_size if isinstance(scheme, sampling.FixedBatch) else None
        if exact is not None and self.batch_size not in (None, exact):
            raise _check.reject(
                "batch_size", self.batch_size, f"the fixed-batch scheme draws exactly {exact}"
            )
        self._bins: np.ndarray | None = None
        if isinstance(scheme, sampling.BallsInBins):
            # one draw serves all steps; kept in the order that groups units by bin
            bins = scheme.assign(self.population, sampling.generator(seed))
            self._order = np.argsort(bins, kind="stable")
            self._bins = np.searchsorted(bins[self._order], np.arange(scheme.bins + 1))

    @property
    def expected_batch(self) -> float:
        """Mean units per step over the scheme's own randomness: the default public normalizer."""
        scheme = self.scheme
        if isinstance(scheme, sampling.BallsInBins | sampling.FixedOrder):
            return self.population / scheme.bins
        if isinstance(scheme, sampling.FixedBatch):
            return float(scheme.batch_size)
        return scheme.expected_batch(self.population)

    @property
    def can_truncate(self) -> bool:
        """Whether some draw of the scheme exceeds ``batch_size``."""
        if self.batch_size is None or isinstance(self.scheme, sampling.FixedBatch):
            return False
        if isinstance(self.scheme, sampling.FixedOrder):
            return -(-self.population // self.scheme.bins) > self.batch_size
        return self.batch_size < self.population

    @property
    def sensitivity_factor(self) -> float:
        """How many clip bounds one unit can move a step's sum by: 1, or 2 for "double"."""
        # in a fixed order the cut units are known by their numbers: nothing is displaced
        public = isinstance(self.scheme, sampling.FixedOrder)
        return 2.0 if self.can_truncate and self.truncation == "double" and not public else 1.0

    def displacement_probability(self, group_size: int = 1) -> float:
        """η: an upper bound on the chance that a group of units ever displaces another unit.

        A binomial tail of public numbers, summed over the units of the group and, where batches
        are drawn afresh, over their participations. 0 where nothing can be truncated.
        """
        if not self.can_truncate or isinstance(self.scheme, sampling.FixedOrder):
            return 0.0
        assert self.batch_size is not None
        return displacement_probability(self.scheme, self.population, self.batch_size, group_size)

    def drawn(self, step: int) -> np.ndarray:
        """The units that the scheme chose for ``step``: equal to ``scheme.sample``."""
        if self._bins is None:
            return self.scheme.sample(step, self.population, self._seed)
        _check.integer("step", step, at_least=0)
        if step >= self.scheme.iterations:
            return self.scheme.sample(step, self.population, self._seed)  # raises
        place = step % self.scheme.bins
        return self._order[self._bins[place] : self._bins[place + 1]]

    def batch(self, step: int) -> Batch:
        """The units of ``step``, truncated and padded."""
        drawn = self.drawn(step)
        kept = drawn
        if self.batch_size is not None and len(drawn) > self.batch_size:
            if isinstance(self.scheme, sampling.FixedOrder):
                kept = drawn[: self.batch_size]
            else:
                # a priority per (step, unit), independent of data and of the other units: one
                # unit more displaces at most one, and no unit is cut in every pass
                priority = uniform_hash(self._seed, step, drawn)
                kept = np.sort(drawn[np.argsort(priority, kind="stable")[: self.batch_size]])
        slots = len(kept) if self.batch_size is None else self.batch_size
        slots = max(1, -(-slots // self.microbatch)) * self.microbatch
        units = np.full(slots, -1, dtype=np.int64)
        units[: len(kept)] = kept
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
    scheme: Any, population: int, batch_size: int, group_size: int = 1
) -> float:
    """Chance that one of ``group_size`` units ever meets a batch that others have filled.

    For balls-in-bins a unit meets one batch in all epochs, with Binomial(population - 1, 1/bins)
    others in it. For (cyclic) Poisson sampling the chance that it takes part is included, and the
    participations are summed.
    """
    others = max(0, population - 1)
    if isinstance(scheme, sampling.BallsInBins):
        meetings, rate = 1.0, 1.0 / scheme.bins
    elif isinstance(scheme, sampling.Poisson):
        meetings, rate = scheme.iterations * scheme.probability, scheme.probability
    elif isinstance(scheme, sampling.CyclicPoisson):
        meetings = scheme.rounds * scheme.probability
        rate = scheme.probability / scheme.bands
    else:
        raise _check.reject("sampling", scheme.kind, "has no random batch size")
    tail = float(stats.binom.sf(batch_size - 1, others, rate))
    return min(1.0, group_size * meetings * tail)


def smallest_batch_size(
    scheme: Any, population: int, probability: float, group_size: int = 1
) -> int:
    """The least ``batch_size`` whose displacement probability is at most ``probability``."""
    low, high = 0, population  # a batch of the whole population displaces nobody
    while high - low > 1:
        middle = (low + high) // 2
        if displacement_probability(scheme, population, middle, group_size) <= probability:
            high = middle
        else:
            low = middle
    return high


def charged_delta(epsilon: float, delta: float, displacement: float) -> float:
    """δ + (1 + e^ε) η, at most 1: the statement's δ with truncation charged to it.

    H(M(D), M(D')) <= H(M̃(D), M̃(D')) + TV(M(D), M̃(D)) + e^ε TV(M(D'), M̃(D')), where M̃ is the run
    in which the unit displaces nobody and each TV distance is at most η.
    """
    if displacement == 0.0:
        return delta
    log_price = np.logaddexp(0.0, epsilon) + math.log(displacement)
    return float(min(1.0, delta + math.exp(min(log_price, 0.0))))
