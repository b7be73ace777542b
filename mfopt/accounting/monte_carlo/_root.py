"""A bracketed root finder for decreasing functions, ending on the safe side."""

from __future__ import annotations

import math
from collections.abc import Callable

from mfopt.errors import FailureError

_MAX_EVALUATIONS = 200
_TRUSTED = 6  # evaluations after which every other step ignores the slope


def decreasing_root(
    function: Callable[[float], tuple[float, float]],
    start: float,
    *,
    tolerance: float = 1e-6,
    max_step: float = 0.1,
    straight: float = 0.0,
) -> float:
    """x with f(x) <= 0 and a point within ``tolerance`` below it where f > 0.

    ``function`` returns (value, slope) and is decreasing; −inf is a valid value. Newton's step
    is taken while it stays inside the bracket, else the bracket is halved, or a full step taken
    towards its open side. After a few evaluations every other step is of that kind, so a wrong
    slope cannot hold up the search.

    Args:
      function, start: of x, and where to begin.
      tolerance: between f <= 0 and f > 0.
      max_step: no step is longer.
      straight: a Newton step no longer than this is the last, and its end is not evaluated: it is
        a quarter of the tolerance beyond the tangent's root, whose error is about the square of the
        step where the slope is the function's own.

    Raises:
      FailureError: the function is not a number, or has no sign change in reach.
    """
    low, high = -math.inf, math.inf
    x = start
    for count in range(_MAX_EVALUATIONS):
        value, slope = function(x)
        if math.isnan(value):
            raise FailureError(f"calibration: the function is not a number at {x}")
        if value > 0:
            low = max(low, x)
        else:
            high = min(high, x)
        if high - low <= tolerance:
            return high
        step = -value / slope if slope < 0 and math.isfinite(value) else math.copysign(1, value)
        if slope < 0 and abs(step) <= straight and low < (end := x + step + tolerance / 4) < high:
            return end
        # overshoot by a quarter of the tolerance: the last Newton steps land on both sides of the
        # root, and no further apart than the tolerance whatever is rounded
        step += math.copysign(tolerance / 4, step) if value > 0 else -tolerance / 4
        x += max(-max_step, min(max_step, step))
        if not low < x < high or (count >= _TRUSTED and count % 2 == 0):
            x = _inside(low, high, max_step)
    raise FailureError(f"calibration: no sign change found between {low} and {high}")


def _inside(low: float, high: float, step: float) -> float:
    if math.isinf(low):
        return high - step
    if math.isinf(high):
        return low + step
    return (low + high) / 2
