"""SciPy's L-BFGS-B for the objective, and the record of a search."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy

from mfopt.optimize.objective import AmplifiedObjective, Evaluation, Placement
from mfopt.progress import Progress

Evaluator = Callable[[np.ndarray], Evaluation]  # parameters -> value and gradient

# (evaluations, length of the first step) of each round. The proposal is placed between rounds:
# often at first, while C still moves far, so that no round can exploit a stale one. The first step
# of a later round is short: it starts near an optimum.
_ROUNDS = ((15, 0.5), (30, 0.1), (60, 0.05), (120, 0.05), (240, 0.05), (480, 0.05))


@dataclasses.dataclass
class Trace:
    """Best point so far and the history of an optimization.

    Attributes:
      progress: callback for every evaluation.
      best_sigma: σ at the best point, for C scaled to a largest mode norm of 1.
      best_norm: the largest mode norm that C has there.
      history: one row (seconds, loss, that σ) per evaluation.
      status: why it stopped.
    """

    progress: Callable[[Trace], None] = lambda trace: None
    best: np.ndarray | None = None
    best_value: float = math.inf
    best_sigma: float = math.nan
    best_norm: float = math.nan
    history: list[tuple[float, float, float]] = dataclasses.field(default_factory=list)
    status: str = "not started"
    interrupted: bool = False
    _started: float = dataclasses.field(default_factory=time.perf_counter)

    def record(self, parameters: np.ndarray, evaluation: Evaluation) -> None:
        """Add one evaluation, and make its point the best where it is lowest."""
        if evaluation.value < self.best_value:
            self.move(parameters, evaluation)
        self.note(evaluation)

    def note(self, evaluation: Evaluation) -> None:
        """Add one evaluation to the history."""
        sigma = evaluation.noise_multiplier / evaluation.mode_norm
        self.history.append((time.perf_counter() - self._started, evaluation.value, sigma))
        self.progress(self)

    def move(self, parameters: np.ndarray, evaluation: Evaluation) -> None:
        """Make a point the best one, whatever the best value was on other samples."""
        self.best = np.array(parameters)
        self.best_value, self.best_norm = evaluation.value, evaluation.mode_norm
        self.best_sigma = evaluation.noise_multiplier / evaluation.mode_norm


@dataclasses.dataclass(frozen=True)
class Step(Progress):
    """One evaluation of an objective: where the search stands, and its trace."""

    trace: Trace = dataclasses.field(kw_only=True)


class Descent(NamedTuple):
    """Record of a search from one point, and where it ends.

    Attributes:
      trace: record of every evaluation; keeps the best.
      steps: evaluations at most.
      tolerance: relative decrease of the objective in a step below which it ends.
    """

    trace: Trace
    steps: int
    tolerance: float


def lbfgs(
    objective: AmplifiedObjective,
    start: np.ndarray,
    descent: Descent,
    judge: Evaluator | None = None,
) -> None:
    """SciPy's L-BFGS-B in rounds, at the beginning of which the proposal is placed.

    A point where the objective is not a number is answered with a value above the best one, so
    the line search backs off.

    Args:
      objective: what is minimized.
      start: parameters, shape (p,).
      descent: record, evaluations at most, and the decrease of the objective over a round that
        counts as progress, a third of it over a step.
      judge: the objective on samples that no step sees, where the frozen ones can be fitted: a
        round that does not lower it is taken back, and ends the search.
    """
    trace, steps, tolerance = descent
    parameters = start
    judged = None if judge is None else judge(start)
    if judged is not None and not math.isfinite(judged.value):
        judged = None  # it judges nothing there
    for number, (length, first_step) in enumerate(_ROUNDS):
        placement = objective.placed(parameters, trace.best_sigma * trace.best_norm).placement
        earlier = len(trace.history)
        trace.best_value = math.inf  # not the best point: the proposal is placed again
        budget = min(length, steps - earlier)
        if placement.proposal is None:
            trace.record(parameters, Evaluation(math.nan, np.zeros(0), math.nan))
            trace.status = "the objective is not a number at the start"
            return

        def evaluate(x: np.ndarray, placement: Placement = placement) -> Evaluation:
            return objective.tangent(x, placement).evaluation

        message = descend(
            evaluate,
            parameters,
            Descent(trace, budget, tolerance / 3),
            first_step=first_step,
            pairs=20 if len(start) < 10**5 else 8,  # of vectors: a dense C has millions of entries
        )
        previous, parameters = parameters, parameters if trace.best is None else trace.best
        trace.status = f"L-BFGS: {message}"
        if judge is not None and judged is not None:
            last_judged, judged = judged, judge(parameters)
            if not judged.value < last_judged.value - tolerance:
                trace.status = f"no gain on unseen samples after {len(trace.history)} evaluations"
                if not judged.value < last_judged.value:
                    trace.move(previous, last_judged)
                return
        values = [value for _, value, _ in trace.history[earlier:] if math.isfinite(value)]
        gain = values[0] - min(values) if values else 0.0
        if len(trace.history) >= steps:
            trace.status = f"step limit {steps} reached"
            return
        if number > 0 and gain < 3 * tolerance:
            return


def descend(
    evaluate: Evaluator,
    start: np.ndarray,
    descent: Descent,
    first_step: float = 1.0,
    pairs: int = 30,
    lowest: np.ndarray | None = None,
) -> str:
    """Return why SciPy's L-BFGS-B ended; the record has the points.

    Args:
      evaluate: value and gradient at parameters.
      start: parameters, shape (p,).
      descent: record of every evaluation, and where it ends.
      first_step: length of the first step.
      pairs: steps whose curvature is kept.
      lowest: bounds of the parameters, shape (p,), or None.
    """
    trace, steps, tolerance = descent
    last_gradient = np.zeros_like(start)
    limit, earlier = max(steps, 1), len(trace.history)

    # L-BFGS-B begins with a step of length 1, so lengths are measured in units of first_step
    def function(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal last_gradient
        if len(trace.history) - earlier >= limit:  # SciPy examines its own limit only between steps
            raise _OutOfStepsError
        parameters = start + first_step * scaled
        if lowest is not None:
            parameters = np.maximum(parameters, lowest)  # not by rounding below
        evaluation = evaluate(parameters)
        trace.record(parameters, evaluation)
        if not evaluation.usable:
            return trace.best_value + 1.0, last_gradient
        last_gradient = first_step * evaluation.gradient
        return evaluation.value, last_gradient

    bounds = None
    if lowest is not None:
        bounds = scipy.optimize.Bounds((lowest - start) / first_step, np.inf)
    stop = {"maxfun": limit, "maxiter": limit, "ftol": tolerance, "gtol": 1e-12}
    try:
        outcome = scipy.optimize.minimize(
            function,
            np.zeros_like(start),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"maxcor": pairs, **stop},
        )
    except _OutOfStepsError:
        return f"{limit} evaluations made"
    return str(outcome.message).strip().lower()


class _OutOfStepsError(Exception):
    """Ends a round of L-BFGS inside a line search."""
