"""Roots and minima of functions of one number; inversion that ends on the private side.

Every accountant gives δ as a decreasing function of ε and of σ. :func:`smallest` finds the
smallest argument whose value is *checked* to satisfy the target: the returned number was
itself evaluated, so no interpolation error can make it less private than asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import scipy

from mfopt._runtime import _check

_SECANTS = 12
_HALVES, _SMALLEST = 1200, 1e-300  # steps at most; width of a bracket about 0
_FARTHEST, _BACK = 0.6, 0.3  # of log x, in a step of a secant; from a value of -inf


def smallest(
    excess: Callable[[float], float],
    guess: float,
    *,
    name: str,
    relative: float = 1e-6,
    largest: float = 1e50,
    least: float = 1e-9,
    growth: float = 1.3,
    gap: str = "log δ",
) -> float:
    """The smallest x > 0, to relative width ``relative``, at which ``excess(x) <= 0``.

    Args:
      excess: decreasing in x, in any smooth scale (log δ(x) - log δ works well). It may return
        infinities; NaN is an error.
      guess: where to begin, > 0.
      name: what x is, for messages.
      relative: width of the final bracket over its upper end.
      largest, least: x is sought between these.
      growth: factor of the first step of the bracket, close to 1 for a good guess; it squares
        from step to step.
      gap: what ``excess`` is a difference of, for messages.

    Returns:
      A point at which ``excess`` was evaluated and is <= 0: the upper end of the bracket.

    Raises:
      FailureError: ``excess`` is still > 0 at ``largest``; the message gives both end values.
    """
    satisfying: list[float] = []

    @functools.cache
    def evaluate(x: float) -> float:
        over = excess(x)
        if math.isnan(over):
            raise _check.FailureError(f"the accountant gave no number at {name} = {x:g}")
        if over <= 0:
            satisfying.append(x)
        return over

    start = low = min(max(guess, least), largest)
    while evaluate(low) <= 0:
        if low <= least:
            return low
        low, growth = max(low / growth, least), min(growth**2, 100.0)
    x = low
    while not satisfying:
        if x >= largest:
            raise _check.FailureError(
                f"no {name} up to {largest:g} reaches the target: it is missed by "
                f"{evaluate(start):.3g} at {name} = {start:g} and by {evaluate(x):.3g} at "
                f"{name} = {x:g} (difference of {gap})"
            )
        low, x, growth = x, min(x * growth, largest), min(growth**2, 100.0)
        evaluate(x)
    root(evaluate, low, min(satisfying), relative=relative)
    return min(satisfying)


def about(
    excess: Callable[[float], float],
    guess: float,
    *,
    fall: float,
    relative: float,
    fall_error: float = math.inf,
) -> tuple[float, float] | None:
    """Approximate root of ``excess``, to ``relative``, and its fall there per unit of log x.

    By secants, with nothing checked: where to begin with :func:`smallest`. None if they lead
    nowhere. ``excess`` may be -inf at and near the guess.

    Args:
      excess, guess: decreasing in x > 0, and where to begin.
      fall: about how much ``excess`` falls with log x.
      relative: accuracy.
      fall_error: relative error of ``fall``: a small one makes the first value the last.
    """
    x, over = guess, excess(guess)
    if abs(over / fall) * fall_error <= relative:
        return x * math.exp(over / fall), fall
    for _ in range(_SECANTS):
        if math.isnan(over) or over == math.inf:
            return None
        step = min(max(over / fall, -_FARTHEST), _FARTHEST) if over > -math.inf else -_BACK
        # a secant over less than this would say little of the fall
        step = math.copysign(max(abs(step), relative), step)
        x *= math.exp(step)
        previous, over = over, excess(x)
        if previous == -math.inf:
            continue  # nothing is known of the fall
        if not (math.isfinite(over) and (previous - over) / step > 0):
            return None
        fall = (previous - over) / step
        # what a secant over this step misses is of second order
        if abs(over / fall) * max(abs(step), abs(over / fall)) <= 0.1 * relative:
            return x * math.exp(over / fall), fall
    return None


def root(
    function: Callable[[float], float], low: float, high: float, *, relative: float = 1e-14
) -> float:
    """Root of a monotone function between ``low`` and ``high``, by Brent's method.

    Args:
      function: of opposite signs at the ends; it may return infinities.
      low, high: two ends.
      relative: half a width of the last bracket is less than half of it.

    Returns:
      The end of the last bracket with the smaller value.

    Raises:
      FailureError: the function is no number somewhere, or has one sign at both ends.
    """

    @functools.cache
    def value(x: float) -> float:
        result = function(x)
        if math.isnan(result):
            raise _check.FailureError(f"no root: the function is not a number at {x:g}")
        return result

    if not min(value(low), value(high)) <= 0 <= max(value(low), value(high)):
        raise _check.FailureError(
            f"no root between {low:g} and {high:g}: the function is {value(low):g} and "
            f"{value(high):g} there"
        )
    return float(
        scipy.optimize.brentq(value, low, high, xtol=_SMALLEST, rtol=relative, maxiter=_HALVES)
    )


def halved(holds: Callable[[float], bool], low: float, high: float) -> tuple[float, float]:
    """Ends after 60 halvings of a bracket: ``holds`` at ``low`` once it moved, not at ``high``."""
    for _ in range(60):
        middle = 0.5 * (low + high)
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high


def lowest(function: Callable[[float], float], low: float, high: float, *, width: float) -> float:
    """Approximate minimizer of a unimodal function between ``low`` and ``high``.

    Args:
      function: falls up to its minimum, and rises from there.
      low, high: ends of the bracket, which are not evaluated.
      width: of the last bracket.

    Returns:
      The best point that was evaluated.
    """
    minimum = scipy.optimize.minimize_scalar(
        function, bounds=(low, high), method="bounded", options={"xatol": width}
    )
    return float(minimum.x)
