"""The search by tangents: rounds of steps, and when a step or a round is not believed.

What a tangent is, and why its minimum is a good next point, is told in
:mod:`mfopt.optimize.tangent`; here only values and models are known.
"""

from __future__ import annotations

import contextlib
import functools
import math
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from threadpoolctl import ThreadpoolController

from mfopt.optimize import quasi_newton
from mfopt.optimize.drivers import Trace
from mfopt.optimize.objective import Evaluation
from mfopt.optimize.tangent import Model, Tangent, Touchable

# Tangents of each round: short at first, while C still moves far and the shifts must follow.
_ROUNDS = (2, 2, 4, 8, 16, 32)
REACH = 5.0  # of a step, in each parameter
# Of log σ, at a mode norm of 1, in a round. With 400 epochs first steps went to 0.45, from where
# searches took a third more tangents.
DRIFT = 0.35
_WILD = 0.1  # relative increase of the error beyond which a step tells nothing but that it was long
_SHORTER = 4  # times, after a step that did not lower the error
_RESOLVED = 3  # tolerances: a promise that another placement of the shifts makes as well
_INNER = 150  # evaluations of one model at most
_PAIRS = 30  # steps whose curvature is remembered, from model to model
# The end of a minimization, which takes most of its evaluations, adds less than a tangent is off
# by: so many evaluations have to bring this share of what all of them did.
_WINDOW, _ADDED = 5, 0.05
_LOST = 0.3  # decrease of the error that no tangent is believed in
# Increase of the error, once the shifts are placed where a round has ended, by which it has found
# what they did not see. Two placements differ by 0.01% under balls-in-bins, 0.8% with bins thrown
# afresh at ε = 8, where a search once ended 5% high.
_UNSEEN = 0.01

_beside = ThreadPoolExecutor(1, "libraries")


def minimize(
    objective: Touchable,
    start: np.ndarray,
    trace: Trace,
    *,
    steps: int,
    tolerance: float,
    reach: float = REACH,
    drift: float = DRIFT,
    sigma: float = math.nan,
) -> None:
    """At most ``steps`` tangents, in rounds; between rounds the frozen shifts follow.

    The search ends where a round promises and gains less than another placement of the shifts would
    change: the first one only where its shifts were placed by a σ that is known. A round that ends
    higher than an earlier one, once the shifts are placed where it ended, is taken back.

    Args:
      objective: what is minimized.
      start: parameters, shape (p,).
      trace: is told of every tangent, and keeps the best.
      steps: tangents at most.
      tolerance: relative change of the error that the samples resolve.
      reach: of the first step, in each parameter.
      drift: of log σ, at a mode norm of 1, from where the shifts were placed: beyond it they are
        not believed. A search that begins near its end needs no more, and would otherwise find
        what stale shifts do not see.
      sigma: at the start, or about that, where a search on other samples ended there.
    """
    search = _Search(objective, start, trace, steps, tolerance, reach, drift)
    with contextlib.ExitStack() as until_the_end:
        for number, length in enumerate(_ROUNDS):
            if search.spent or not search.place(math.nan if number else sigma):
                break
            if not number:
                until_the_end.enter_context(_one_thread())
            nothing_more = search.follow(length)
            if nothing_more and (number > 0 or not math.isnan(sigma)):
                trace.status = f"tangents: converged to a relative {tolerance:g}"
                return
        trace.status = "tangents: no further decrease that the samples confirm"
        if search.spent:
            trace.status = f"step limit {steps} reached"
        search.look_back()


def _one_thread() -> contextlib.AbstractContextManager[object]:
    """NumPy's BLAS by one thread, for some hundred products of small matrices a tangent.

    Several would wait for one another, and then, without sleeping, for more: whoever let them work
    between two tangents would take a core from the samples of the next one.
    """
    limited: contextlib.AbstractContextManager[object]
    limited = _blas().result().limit(limits=1, user_api="blas")
    return limited


class _Search:
    """Where a minimization stands."""

    def __init__(
        self,
        objective: Touchable,
        start: np.ndarray,
        trace: Trace,
        steps: int,
        tolerance: float,
        reach: float,
        drift: float,
    ) -> None:
        self._objective, self._trace, self._steps = objective, trace, steps
        self._tolerance, self._reach, self._drift = tolerance, reach, drift
        self._curvature = quasi_newton.Curvature(_PAIRS)
        self._point = start
        self._begin_anew(reach)
        self._anchor: Tangent  # at the point
        self._lowest: _Placed | None = None

    @property
    def spent(self) -> bool:
        """Whether no tangent is left."""
        return len(self._trace.history) >= self._steps

    def place(self, sigma: float) -> bool:
        """Place the shifts where the last round ended, or where it began if that was lower.

        Args:
          sigma: what is known of it there.

        Returns:
          False where no tangent was left to go back.
        """
        self._objective.refresh(self._point, sigma)
        _blas()  # all that a model calls are loaded by now
        self._trace.restart()  # another estimate: values before and after do not compare
        self._touch()
        lowest = self._lowest
        if lowest is not None and lowest.unseen(self._anchor.at):
            if self.spent:
                return False
            self._begin_anew(_widest(self._point - lowest.point) / _SHORTER)
            self._point = lowest.point
            self._objective.refresh(self._point)
            self._touch()
        at = self._anchor.at
        if math.isfinite(at.value) and (lowest is None or at.value < lowest.at.value):
            self._lowest = _Placed(at, self._point)
        return True

    def follow(self, length: int) -> bool:
        """A round of tangents, ``length`` at most: whether it promised and gained too little."""
        placed = self._anchor.at
        for count in range(length):
            value = self._anchor.at.value
            model = self._bend.added(self._anchor.model, self._point)
            least, reached = _minimum(
                model, self._point, self._width, value, self._tolerance, self._curvature
            )
            resolved = _RESOLVED * self._tolerance
            if value - least < (self._tolerance if count else resolved):
                # is it what the bends forbid? The next round begins without
                self._begin_anew(self._reach)
                return (count == 0 or placed.value > value) and placed.value - value < resolved
            if self.spent:
                break
            self._go(reached, placed)
        return False

    def look_back(self) -> None:
        """Take back what the last round found, where no shifts have been placed, if it is lost."""
        trace, lowest = self._trace, self._lowest
        if lowest is None or trace.best is None or np.array_equal(trace.best, lowest.point):
            return
        self._objective.refresh(trace.best)
        if lowest.unseen(self._objective.tangent(trace.best).at):
            trace.best = np.array(lowest.point)
            trace.take(lowest.at)

    def _begin_anew(self, width: float) -> None:
        """Forget what was learned of bends and of lengths."""
        self._bend, self._width = _Bend(), width

    def _touch(self) -> None:
        self._anchor = self._objective.tangent(self._point)
        self._trace.record(self._point, self._anchor.at)

    def _go(self, reached: np.ndarray, placed: Evaluation) -> None:
        """On to ``reached`` if it is lower; learn from it either way."""
        there, width = self._objective.tangent(reached), _widest(reached - self._point)
        if _strayed(placed, there.at, self._drift):
            self._trace.record(reached, there.at._replace(value=math.nan))
            self._width = width / _SHORTER
            return
        self._trace.record(reached, there.at)
        lower = there.at.value < self._anchor.at.value
        # a curvature read far outside the tangent's range would forbid all further steps
        near = there.at.value < self._anchor.at.value + _WILD
        if lower or (near and np.all(np.isfinite(there.at.gradient))):
            change = there.at.gradient - self._anchor.model(reached)[1]
            self._bend.learn(reached - self._point, change)
        if lower:
            self._point, self._anchor = reached, there
            self._width = min(2 * self._width, REACH)
        else:
            # shorter also where a bend was learned: one of many does not make a long step right
            self._width = width / _SHORTER


def _widest(step: np.ndarray) -> float:
    return float(np.max(np.abs(step)))


class _Placed(NamedTuple):
    """A value on shifts that were placed where it is, and where."""

    at: Evaluation
    point: np.ndarray

    def unseen(self, there: Evaluation) -> bool:
        """Whether such a value elsewhere is much higher, or no number."""
        return not there.value <= self.at.value + _UNSEEN


def _strayed(placed: Evaluation, there: Evaluation, drift: float) -> bool:
    """Whether log σ at a mode norm of 1 is further than ``drift`` from where it was; NaN is."""
    before, after = (at.noise_multiplier / at.mode_norm for at in (placed, there))
    return not abs(math.log(after) - math.log(before)) <= drift


class _Bend:
    """What the tangents lack: how log σ bends in C, a matrix K >= 0 learned on the way.

    Where a step s ends, the samples' gradient less the tangent's is about K s. Symmetric rank-one
    updates (Nocedal and Wright 2006, section 6.2) from K = 0, and only those that keep K >= 0:
    without a step there is no correction, and a step that went too far is shorter next time.
    """

    def __init__(self) -> None:
        self._vectors: list[np.ndarray] = []

    def times(self, x: np.ndarray) -> np.ndarray:
        """K x."""
        total = np.zeros_like(x)
        for vector in self._vectors:
            total += (vector @ x) * vector
        return total

    def learn(self, step: np.ndarray, change: np.ndarray) -> bool:
        """Take in that K ``step`` is about ``change``; False where K stays as it is."""
        left = change - self.times(step)
        along = float(left @ step)
        if along > 1e-8 * np.linalg.norm(left) * np.linalg.norm(step):
            self._vectors.append(left / math.sqrt(along))
            return True
        return False

    def added(self, model: Model, centre: np.ndarray) -> Model:
        """``model`` + (x - centre)ᵀ K (x - centre)/2."""

        def bent(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = model(x)
            away = x - centre
            push = self.times(away)
            return value + float(away @ push) / 2, gradient + push

        return bent


class _EnoughError(Exception):
    """Ends the minimization of a model."""


def _settled(course: list[float], value: float) -> bool:
    """Whether the last of the lowest values so far add little to what all of them took off."""
    if len(course) <= _WINDOW:
        return False
    return course[-1 - _WINDOW] - course[-1] < _ADDED * (value - course[-1])


@functools.cache
def _blas() -> Future[ThreadpoolController]:
    """The libraries that are loaded: looked for once, beside the first tangent."""
    return _beside.submit(ThreadpoolController)


def _minimum(
    model: Model,
    start: np.ndarray,
    reach: float,
    value: float,
    tolerance: float,
    curvature: quasi_newton.Curvature,
) -> tuple[float, np.ndarray]:
    """(lowest value, where) of one model within ``reach`` of each parameter.

    It ends before the minimum where the rest cannot be worth it, or the model cannot be believed.
    """
    lowest, best = value, start
    course = []

    def function(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal lowest, best
        at, slope = model(parameters)
        if at < lowest and np.all(np.isfinite(slope)):
            lowest, best = at, parameters
        course.append(lowest)
        # no error falls below 0, nor its logarithm so far: where a tangent's σ does, it is lost
        if value - lowest > _LOST * max(1.0, abs(value)) or _settled(course, value):
            raise _EnoughError
        return at, slope

    with contextlib.suppress(_EnoughError):
        quasi_newton.minimize(
            function,
            start,
            steps=_INNER,
            tolerance=tolerance / 30,
            window=1,
            box=(start - reach, start + reach),
            curvature=curvature,
        )
    return lowest, best
