"""The rule by which every study chooses learning rates: a grid that grows where its end is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class ChosenRate(NamedTuple):
    """Result of a grid of rates.

    Attributes:
      rate: with the least loss of those tried.
      tried: all of them, increasing.
      edge: "lowest" or "highest" where ``rate`` is an end of several, else "".
      missing: the rate to try next; None where the choice is made.
    """

    rate: float
    tried: tuple[float, ...]
    edge: str
    missing: float | None


def choose(
    rates: Sequence[float], loss: Callable[[float], float | None], *, most: int = 0
) -> ChosenRate:
    """The best rate; a grid whose end is best is extended by its last ratio.

    Args:
      rates: to begin with; one alone is no grid and stays so.
      loss: of a rate, lower is better, what is not finite worst; None where it was not run yet.
      most: rates to add.

    >>> losses = {1.0: 3.0, 2.0: 2.0, 4.0: 1.0, 8.0: 1.5}
    >>> choose((1.0, 2.0), losses.get, most=3)
    ChosenRate(rate=4.0, tried=(1.0, 2.0, 4.0, 8.0), edge='', missing=None)
    >>> del losses[4.0]
    >>> choose((1.0, 2.0), losses.get, most=3).missing
    4.0
    """
    known: dict[float, float] = {}
    for rate in rates:
        found = loss(rate)
        assert found is not None, f"{rate} of the grid was not run"
        known[rate] = _worst_if_not_finite(found)
    while True:
        tried = tuple(sorted(known))
        best = min(tried, key=known.__getitem__)
        ends = {tried[0]: "lowest", tried[-1]: "highest"} if len(tried) > 1 else {}
        edge = ends.get(best, "")
        if not edge or len(known) - len(set(rates)) >= most:
            return ChosenRate(best, tried, edge, None)
        end, inner = (tried[0], tried[1]) if edge == "lowest" else (tried[-1], tried[-2])
        further = float(f"{end * (end / inner):.6g}")
        found = loss(further)
        if found is None:
            return ChosenRate(best, tried, edge, further)
        known[further] = _worst_if_not_finite(found)


def _worst_if_not_finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
