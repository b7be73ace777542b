"""L-BFGS without bounds: what a step costs beside the objective is a few passes over its memory.

SciPy's L-BFGS-B takes 0.1 to 0.6 s a step for the 262,144 entries of a banded C, several times
what the objective takes. The two-loop recursion is Nocedal's (1980).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable

import numpy as np

from mfopt.optimize.objective import Evaluation

_MEMORY = 20  # steps remembered
_WINDOW = 10  # steps over which a decrease is judged: single ones vary tenfold
_SUFFICIENT, _SHORTER = 1e-4, 0.4  # decrease over that of the slope; what a refused step is cut by
_SHORTEST = 1e-10


def minimize(
    evaluate: Callable[[np.ndarray], Evaluation],
    start: np.ndarray,
    *,
    steps: int,
    tolerance: float,
) -> str:
    """Lower a smooth function from ``start``; the points are the caller's to keep.

    A point where the function is not a number counts as one that is too far.

    Args:
      evaluate: value and gradient at a point, shape (p,).
      start: where the function is finite, shape (p,).
      steps: evaluations at most.
      tolerance: mean decrease of a step, over the last ten, at which the search ends.

    Returns:
      Why it ended, in words.
    """
    point, at = start, evaluate(start)
    made, values = 1, [at.value]
    if not _finite(at):
        return "not a number at the start"
    pairs: collections.deque[tuple[np.ndarray, np.ndarray, float]] = collections.deque(
        maxlen=_MEMORY
    )
    while True:
        direction = _direction(at.gradient, pairs)
        slope = float(direction @ at.gradient)
        if slope >= 0:
            return "no direction goes down"
        length = 1.0
        while True:
            if made >= steps:
                return f"step limit {steps} reached"
            if length < _SHORTEST:
                return "no step goes down"
            step = length * direction
            after = evaluate(point + step)
            made += 1
            if _finite(after) and after.value <= at.value + _SUFFICIENT * length * slope:
                break
            length *= _SHORTER
        change = after.gradient - at.gradient
        curvature = float(step @ change)
        if curvature > 1e-12 * float(np.linalg.norm(step) * np.linalg.norm(change)):
            pairs.append((step, change, 1 / curvature))
        point, at = point + step, after
        values.append(at.value)
        if len(values) > _WINDOW and values[-1 - _WINDOW] - at.value <= _WINDOW * tolerance:
            return f"a step gains {tolerance:g} or less"


def _direction(
    gradient: np.ndarray, pairs: collections.deque[tuple[np.ndarray, np.ndarray, float]]
) -> np.ndarray:
    if not pairs:
        # nothing is known of the curvature: a step of length 1 at most
        return -gradient / max(float(np.linalg.norm(gradient)), 1.0)
    direction = -gradient
    weights = []
    for step, change, inverse in reversed(pairs):
        weights.append(inverse * float(step @ direction))
        direction -= weights[-1] * change
    step, change, inverse = pairs[-1]
    direction /= inverse * float(change @ change)
    for (step, change, inverse), weight in zip(pairs, reversed(weights), strict=True):
        direction += (weight - inverse * float(change @ direction)) * step
    return direction


def _finite(at: Evaluation) -> bool:
    return math.isfinite(at.value) and bool(np.all(np.isfinite(at.gradient)))
