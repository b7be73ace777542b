"""Minimum separation: a condition on participations, without randomness."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling.base import Frozen, Scheme


@dataclasses.dataclass(frozen=True)
class MinSeparation(Scheme):
    """Any participations at least ``separation`` apart: a condition, without randomness.

    A unit takes part at most ``max_participations`` times and any two of its iterations are at
    least ``separation`` apart (b-min-separation). Who takes part when may depend on anything
    but the data's values (for instance on when devices are idle), so there is nothing to
    sample here; :meth:`check` verifies a recorded schedule.

    >>> MinSeparation(iterations=100, separation=40, max_participations=9).participations
    3
    """

    iterations: int
    separation: int
    max_participations: int
    kind = "min-separation"
    independent = False
    prefix_closed = True
    executable = False
    step_name = "round"

    @property
    def participations(self) -> int:
        """Most participations that fit: the smaller of the limit and what the spacing allows."""
        return min(self.max_participations, -(-self.iterations // self.separation))

    @property
    def expected_share(self) -> float:
        """Share of the units in a round if all take part as often as they may: the largest."""
        return self.participations / self.iterations

    def condition(self, unit: str) -> str:
        limit, separation = self.participations, self.separation
        apart = f", any two at least {separation} rounds apart" if limit > 1 < separation else ""
        return (
            f" Only {unit}s are protected that take part in at most {limit} of the "
            f"{self.iterations:,} rounds{apart}."
        )

    def check(self, steps: np.ndarray) -> None:
        """Raise :class:`UsageError` unless a unit may take part in exactly these ``steps``."""
        each, last = np.ravel(np.array(steps, dtype=object)), self.iterations - 1
        values = sorted(_check.integer("steps", step, at_least=0, at_most=last) for step in each)
        if len(values) > self.max_participations:
            raise _check.reject(
                "steps", values, f"at most {self.max_participations} participations"
            )
        if np.any(np.diff(values) < self.separation):
            rule = f"must be at least {self.separation} iterations apart"
            raise _check.reject("steps", values, rule)

    def sample(self, step: int, population: int, seed: int) -> np.ndarray:
        """Raise :class:`UsageError`: see :meth:`batch_sizes`."""
        raise self._nothing_to_draw()

    def draws(self, population: int, seed: int) -> Callable[[int], np.ndarray]:
        raise self._nothing_to_draw()

    def batch_sizes(self, step: int, population: int) -> Frozen:
        """Raise :class:`UsageError`: participations are decided elsewhere."""
        raise self._nothing_to_draw()

    def _nothing_to_draw(self) -> Exception:
        return _check.reject(
            "sampling",
            self,
            "is a condition on participations, not a random choice",
            "Use balls-in-bins, poisson, cyclic-poisson, fixed-batch or fixed-order.",
        )
