"""L-BFGS whose curvature can be handed from one function to the next; what a step costs is little.

A search by tangents asks for the minima of many models that differ by little: the first step of
each knows what those before have learned, and each may end early. SciPy's L-BFGS-B begins anew for
every function, takes 0.1 to 0.6 s a step for the 262,144 entries of a banded C, several times what
their objective takes, and a quarter of a second to import.

The two-loop recursion is Nocedal's (1980), the steps fulfil the weak Wolfe conditions, and bounds
are kept by projection (Bertsekas 1982).
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[[np.ndarray], tuple[Any, ...]]
Box = tuple[np.ndarray, np.ndarray]

_SUFFICIENT, _FLATTER = 1e-4, 0.9  # shares of the slope: of a decrease, of what is left after it
_SHORTER = 0.1, 0.5  # least and largest share that a refused step is cut to
_LONGER = 4.0  # times, where the function falls on as steeply
_SHORTEST, _TRIES = 1e-10, 30  # length of a step, and points along one direction
_CONVEX = 1e-12  # least cosine between a step and the change of the gradient


class Curvature:
    """What pairs (step, change of the gradient) tell of a Hessian.

    Args:
      most: pairs that are kept, the last ones.
    """

    def __init__(self, most: int = 20) -> None:
        # (step, change, sᵀy)
        self._pairs: collections.deque[tuple[np.ndarray, np.ndarray, float]] = collections.deque(
            maxlen=most
        )

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def forget(self) -> None:
        """All pairs."""
        self._pairs.clear()

    def learn(self, step: np.ndarray, change: np.ndarray) -> None:
        """Take in a pair, unless the function is not convex along it."""
        if (along := _convex(step, change)) > 0:
            self._pairs.append((step, change, along))

    def descent(self, gradient: np.ndarray, free: np.ndarray | None = None) -> np.ndarray:
        """The quasi-Newton step, in the parameters that are ``free`` (all by default)."""
        way, known = -gradient, list(self._pairs)
        if free is not None and not np.all(free):
            way, pairs = way * free, [(step * free, change * free) for step, change, _ in known]
            known = [(*pair, along) for pair in pairs if (along := _convex(*pair)) > 0]
        if not known:
            # nothing is known of the curvature: a step of length 1 at most
            return way / max(float(np.linalg.norm(way)), 1.0)
        weights = []
        for step, change, along in reversed(known):
            weights.append(float(step @ way) / along)
            way -= weights[-1] * change
        _, change, along = known[-1]
        way *= along / float(change @ change)
        for (step, change, along), weight in zip(known, reversed(weights), strict=True):
            way += (weight - float(change @ way) / along) * step
        return way


def _convex(step: np.ndarray, change: np.ndarray) -> float:
    """sᵀy where it is clearly positive, else 0."""
    along = float(step @ change)
    return along if along > _CONVEX * math.sqrt(float(step @ step) * float(change @ change)) else 0


def minimize(
    function: Function,
    start: np.ndarray,
    *,
    steps: int,
    tolerance: float,
    window: int = 10,
    box: Box | None = None,
    curvature: Curvature | None = None,
) -> str:
    """Lower a smooth function from ``start``; the points are the caller's to keep.

    A point where the function is not a number counts as one that is too far.

    Args:
      function: (value, gradient, …) at a point, shape (p,).
      start: where the function is finite, shape (p,).
      steps: evaluations at most.
      tolerance: mean decrease of a step, over the last ``window``, at which the search ends.
      window: steps over which a decrease is judged: of some functions single ones vary tenfold.
      box: least and largest parameters, shapes (p,).
      curvature: what is known of it, which is added to.

    Returns:
      Why it ended, in words.
    """
    curvature = Curvature() if curvature is None else curvature
    point, (value, gradient, *_) = start, function(start)
    made, values = 1, [value]
    if not _finite(value, gradient):
        return "not a number at the start"
    while made < steps:
        free = None if box is None else ~_held(point, gradient, box)
        way = curvature.descent(gradient, free)
        found = None
        if float(way @ gradient) < 0:
            line = _Line(function, point, value, gradient, way, box, steps - made)
            found, made = line.lower(), made + line.made
        if found is None:
            if made >= steps:
                break
            if not curvature:
                return "no step goes down"
            curvature.forget()  # of another function, or of another place: once more without
            continue
        after, value, turned = found
        curvature.learn(after - point, turned - gradient)
        point, gradient = after, turned
        values.append(value)
        if len(values) > window and values[-1 - window] - value <= window * tolerance:
            return f"a step gains {tolerance:g} or less"
    return f"step limit {steps} reached"


class _Line:
    """A search along one direction.

    Attributes:
      made: evaluations.
    """

    def __init__(
        self,
        function: Function,
        point: np.ndarray,
        value: float,
        gradient: np.ndarray,
        way: np.ndarray,
        box: Box | None,
        steps: int,
    ) -> None:
        self._function, self._box, self._steps = function, box, min(steps, _TRIES)
        self._point, self._value, self._gradient, self._way = point, value, gradient, way
        self.made = 0

    def lower(self) -> tuple[np.ndarray, float, np.ndarray] | None:
        """The last (point, value, gradient) that was lower, flatter as well if all goes well."""
        found = None
        length, near, far = 1.0, 0.0, math.inf  # such a point lies between near and far
        slope = float(self._gradient @ self._way)
        while self.made < self._steps and length > _SHORTEST:
            other = self._point + length * self._way
            if self._box is not None:
                other = np.clip(other, *self._box)
            value, gradient, *_ = self._function(other)
            self.made += 1
            moved = other - self._point
            lower = value <= self._value + _SUFFICIENT * float(self._gradient @ moved)
            if not (_finite(value, gradient) and lower):
                far = length
                # where the parabola through value and slope here and the value there is lowest
                rise = value - self._value - length * slope
                lowest = -slope * length**2 / (2 * rise) if rise > 0 else 0.0
                least, largest = (near + share * (far - near) for share in _SHORTER)
                length = min(max(lowest, least), largest) if math.isfinite(rise) else least
                continue
            found = other, float(value), gradient
            way = self._way
            if self._box is not None:  # the slope of what no bound has stopped
                way = way * ((other > self._box[0]) & (other < self._box[1]))
            if float(gradient @ way) >= _FLATTER * float(self._gradient @ way):
                break
            near = length
            length = _LONGER * length if math.isinf(far) else (near + far) / 2
        return found


def _held(point: np.ndarray, gradient: np.ndarray, box: Box) -> np.ndarray:
    """Which parameters a bound holds."""
    low, high = box
    held: np.ndarray = ((point <= low) & (gradient > 0)) | ((point >= high) & (gradient < 0))
    return held


def _finite(value: float, gradient: np.ndarray) -> bool:
    return math.isfinite(value) and bool(np.all(np.isfinite(gradient)))
