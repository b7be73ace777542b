"""When a bound is believed: finite and below, for each direction on its own."""

from __future__ import annotations

import math
from collections.abc import Iterable


def accepts(bounds: Iterable[float], spent: float, delta: float) -> bool:
    """Whether every bound on δ, plus the failure probability ``spent`` so far, is <= ``delta``.

    Each bound is looked at on its own: a NaN, an infinity, a negative number, or no bound at all
    is never accepted, whatever the others are.
    """
    bounds = list(bounds)
    fair = math.isfinite(spent) and spent >= 0 and 0 < delta < 1
    return fair and bool(bounds) and all(bound >= 0 and bound + spent <= delta for bound in bounds)


def largest(bounds: Iterable[float]) -> float:
    """The largest of the directions' bounds; infinite, so never accepted, where one is no bound."""
    bounds = list(bounds)
    fair = bool(bounds) and all(math.isfinite(bound) and bound >= 0 for bound in bounds)
    return max(bounds) if fair else math.inf
