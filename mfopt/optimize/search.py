"""The search by tangents: a trust-region method whose models need no samples.

Each step minimizes the model of :mod:`mfopt.optimize.objective` (log σ by its tangent) inside a
box, and is accepted only if the samples confirm a decrease. What the tangent lacks, how log σ bends
in C, is learned on the way. The search ends where the model, freed of all that was learned, sees
nothing to gain on a proposal that was placed at the point itself.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np
import scipy.optimize

from mfopt.optimize.objective import AmplifiedObjective, Tangent
from mfopt.optimize.optimizers import Descent

REACH = 5.0  # largest step, in each parameter
_SHORTER, _LONGER = 4.0, 2.0  # factors of the box after a step that failed, and one that did not
_WILD = 0.1  # relative increase of the error beyond which a step only tells that it was too long
_INNER = 150  # evaluations of one model
_PAIRS = 30  # steps whose curvature L-BFGS-B keeps
# The end of a minimization takes most of its evaluations and adds less than a tangent is off by:
# the last so many evaluations have to bring this share of what all of them did.
_WINDOW, _ADDED = 5, 0.05
_LOST = 0.3  # decrease of log error for which no tangent is trusted
# Decrease of log error since the last proposal of its own, over what two proposals differ by, after
# which a point is examined on one: far from where they were placed samples may miss what C has
# become, and promise what is not there (1 × 64, ε = 8: 12% on 8,192 samples).
_UNSEEN = 2.5
# Tolerances: the largest change by another placement below which gains are taken for noise.
_AGREE = 3
CHECKS = 3  # in a row, of points on proposals of their own, that found no lower error: it is noise


def minimize(
    objective: AmplifiedObjective,
    start: np.ndarray,
    descent: Descent,
    sigma: float = math.nan,
    most_checks: int = CHECKS,
) -> None:
    """Take tangent steps from ``start``; the record keeps the best point and the status.

    Args:
      objective: what is minimized.
      start: parameters, shape (p,).
      descent: record of every tangent, tangents at most, and the relative change of the error that
        the samples resolve.
      sigma: σ at the start, where it is known.
      most_checks: as :data:`CHECKS`, after which it ends.
    """
    trace, steps, tolerance = descent
    coarsest = _AGREE * tolerance
    # anchor: the last point on a proposal of its own; lowest: the best of these
    current = anchor = lowest = objective.placed(start, sigma)
    trace.record(current.point, current.evaluation)
    if not current.evaluation.usable:
        trace.status = "the objective is not a number at the start"
        return
    curvature, width, renewed, checks = list[np.ndarray](), REACH, True, 0
    while len(trace.history) < steps:
        predicted, reached = _minimum(objective, curvature, current, width, tolerance)
        if current.evaluation.value - predicted < tolerance:
            if not renewed:  # what was learned may forbid what the tangent alone would promise
                curvature, width, renewed = [], REACH, True
            elif current is anchor:
                trace.status = f"converged (relative tolerance {tolerance:.2g})"
                return
            else:  # is it a minimum on a proposal of its own?
                previous = current
                current = anchor = objective.placed(
                    current.point, current.evaluation.noise_multiplier
                )
                changed = abs(current.evaluation.value - previous.evaluation.value)
                tolerance = max(tolerance, min(changed, coarsest))
                checks = 0 if current.evaluation.value < lowest.evaluation.value else checks + 1
                if checks == most_checks:
                    trace.move(lowest.point, lowest.evaluation)
                    trace.status = f"converged (no lower error in {checks} placements)"
                    return
                if not _worse(current, lowest, objective.disagreement):
                    lowest = (
                        current if current.evaluation.value <= lowest.evaluation.value else lowest
                    )
                else:
                    current = anchor = lowest
                    width, renewed = (
                        np.linalg.norm(previous.point - current.point, np.inf) / _SHORTER,
                        False,
                    )
                trace.move(current.point, current.evaluation)
                trace.note(current.evaluation)
            continue
        candidate = objective.follow(reached, current, anywhere=False)
        step, change = (
            np.linalg.norm(reached - current.point, np.inf),
            candidate.evaluation.value - current.evaluation.value,
        )
        if candidate.evaluation.usable and change < _WILD:
            _learn(
                curvature,
                reached - current.point,
                candidate.evaluation.gradient - objective.model(current, reached)[1],
            )
        if not (candidate.evaluation.usable and change < 0):
            trace.note(candidate.evaluation)
            width = step / _SHORTER
            continue
        renewed = renewed and -change < tolerance
        gain = anchor.evaluation.value - candidate.evaluation.value
        if candidate.placement is anchor.placement and gain > _UNSEEN * objective.disagreement:
            renewed_candidate = objective.placed(
                candidate.point, candidate.evaluation.noise_multiplier
            )
            if _worse(renewed_candidate, anchor, -objective.disagreement):  # nothing was gained
                trace.note(candidate.evaluation)
                width = np.linalg.norm(candidate.point - anchor.point, np.inf) / _SHORTER
                current = anchor
                trace.move(current.point, current.evaluation)
                continue
            candidate = renewed_candidate
        if candidate.placement is not current.placement:
            anchor, lowest = (
                candidate,
                candidate if candidate.evaluation.value <= lowest.evaluation.value else lowest,
            )
        current, width = candidate, min(max(_LONGER * step, width), REACH)
        # before it is told, which an interrupt may end
        trace.move(current.point, current.evaluation)
        trace.note(current.evaluation)
    trace.status = f"step limit {steps} reached"
    if current is not anchor:
        current = objective.placed(current.point, current.evaluation.noise_multiplier)
        current = lowest if _worse(current, lowest, objective.disagreement) else current
        trace.move(current.point, current.evaluation)


def _worse(point: Tangent, reference: Tangent, disagreement: float) -> bool:
    """True where a point on its own proposal is worse than ``reference``, beyond noise."""
    return not (
        point.evaluation.usable
        and point.evaluation.value <= reference.evaluation.value + disagreement
    )


def _times(curvature: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """K x, for K = Σ v vᵀ over every v of ``curvature``."""
    return sum([(vector @ x) * vector for vector in curvature], np.zeros_like(x))


def _learn(curvature: list[np.ndarray], step: np.ndarray, change: np.ndarray) -> None:
    """Update K so that K ``step`` is ``change``, where K stays positive semidefinite.

    K is the curvature of log σ that the tangents lack. Where a step s ends, the samples' gradient
    less the tangent's is about K s: symmetric rank-one updates (Nocedal and Wright 2006, section
    6.2) from K = 0. Those of negative curvature are left out: noise of the samples gives them too,
    and a model with them falls without end (16 × 128, fresh bins: a third of all steps went
    astray).
    """
    residual = change - _times(curvature, step)
    along = float(residual @ step)
    if along > 1e-8 * np.linalg.norm(residual) * np.linalg.norm(step):
        curvature.append(residual / math.sqrt(along))


class _EnoughError(Exception):
    """Ends the minimization of a model."""


def _minimum(
    objective: AmplifiedObjective,
    curvature: list[np.ndarray],
    tangent: Tangent,
    reach: float,
    tolerance: float,
) -> tuple[float, np.ndarray]:
    """(lowest value, where) of a tangent's model within ``reach`` of each of its parameters.

    The model has (x - x₀)ᵀ K (x - x₀)/2 added to it, with x₀ the tangent's point and K by
    :func:`_learn`.

    It ends early where the rest cannot be worth it, or where the model cannot be trusted.
    """
    value = tangent.evaluation.value
    lowest, best = value, tangent.point
    course: list[float] = []

    def function(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal lowest, best
        value_there, slope = objective.model(tangent, parameters)
        away = parameters - tangent.point
        push = _times(curvature, away)
        value_there, slope = value_there + float(away @ push) / 2, slope + push
        if not (math.isfinite(value_there) and np.all(np.isfinite(slope))):
            return lowest + 1.0, np.zeros_like(parameters)  # the line search backs off
        if value_there < lowest:
            lowest, best = value_there, parameters.copy()
        course.append(lowest)
        settled = len(course) > _WINDOW and (
            course[-1 - _WINDOW] - lowest < _ADDED * (value - lowest)
        )
        # no error falls below 0, nor its logarithm so far: where a tangent's σ does, it is lost
        if settled or value - lowest > _LOST * max(1.0, abs(value)):
            raise _EnoughError
        return value_there, slope

    with contextlib.suppress(_EnoughError):
        scipy.optimize.minimize(
            function,
            tangent.point,
            jac=True,
            method="L-BFGS-B",
            bounds=scipy.optimize.Bounds(tangent.point - reach, tangent.point + reach),
            options={"maxfun": _INNER, "maxcor": _PAIRS, "ftol": tolerance / 30, "gtol": 1e-12},
        )
    return lowest, best
