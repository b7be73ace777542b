"""Search for C under schemes whose σ is a norm of C times a number: no samples, one optimum.

Poisson sampling and batches of a fixed or limited size are accounted for C = I, cyclic Poisson
sampling for a C of as many bands as groups, a fixed order and a minimum separation for any C. (ε,
δ) fixes the number only, so that the C of lowest error is the same for all (ε, δ).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from mfopt._runtime import _check, _signals, _sizes
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import JsonObject
from mfopt.accounting import Mechanism, account
from mfopt.noise.choice import choose
from mfopt.optimize import defaults, kinds, unamplified
from mfopt.optimize.objective import Objective
from mfopt.optimize.optimizers import Step, Trace
from mfopt.optimize.question import Question, Target
from mfopt.optimize.run import InterruptedOptimization, Optimized
from mfopt.progress import Report
from mfopt.sampling import Scheme
from mfopt.strategies import Identity

_TOLERANCE = 1e-7  # relative decrease of the error in a step at which a search ends
_BYTES_A_STEP, _BYTES_A_PAIR = 480.0, 96.0  # vectors over the run; matrices of a dense C


def _default_bands(scheme: Scheme, form: str) -> int:
    """Number of bands of a banded C if none is named.

    They reach as far as a unit's participations are apart where these are spread over the run. A C
    of any coefficients ("banded") stops at their smallest distance: its columns must not overlap.
    """
    if type(scheme) not in defaults.OPTIMIZED:
        return 1
    participation = unamplified.Participation.of_scheme(scheme)
    if scheme.bands_are_groups:
        return participation.separation
    reach = participation.separation
    if form != "banded":
        reach = max(reach, scheme.iterations // participation.largest_count)
    return min(defaults.BANDS, reach)


def search_first_of(
    schemes: Sequence[Scheme], question: Question, progress: Report
) -> tuple[Scheme, Optimized, list[JsonObject]]:
    """Search under schemes in turn until the error rises: (scheme, C, record of each)."""
    scheme, best = schemes[0], _search(schemes[0], question, progress)
    tried = [_record(scheme, best)]
    for candidate in schemes[1:]:
        result = _search(candidate, question, progress)
        tried.append(_record(candidate, result))
        if not result.loss < best.loss:
            break
        scheme, best = candidate, result
    return scheme, best, tried


@float64
def _search(scheme: Scheme, question: Question, progress: Report) -> Optimized:
    """The C of lowest error under ``scheme``, scaled to sensitivity or column norm 1.

    Raises:
      UsageError: no account of such a C is known under the scheme.
      InterruptedOptimization: at a KeyboardInterrupt, with the best C so far.
    """
    forms = question.form.strategy or defaults.kinds(scheme, question.target.epsilon)
    _check_account(scheme, forms)
    best: Optimized | None = None
    losses: dict[str, float] = {}
    for form in forms:
        try:
            result = _of_kind(form, scheme, question, progress)
        except KeyboardInterrupt:
            if best is None:
                raise
            raise InterruptedOptimization(best) from None
        losses[form] = result.loss
        if best is None or result.loss < best.loss:
            best = result
    assert best is not None
    return dataclasses.replace(best, forms=losses if len(losses) > 1 else {})


def _check_account(scheme: Scheme, forms: Sequence[str]) -> None:
    """Refuse what the scheme has no account for, and what does not fit into memory."""
    able = defaults.OPTIMIZED.get(type(scheme), ())
    for form in forms:
        if form in kinds.names() and form not in able:
            rule = f"is not optimized under {scheme.kind}"
            way_out = f"Use {', '.join(able)}."
            if not able:
                way_out = "Use identity; cyclic-poisson takes a banded C."
            raise _check.reject("strategy", form, rule, way_out)
    square = _BYTES_A_PAIR if {"dense", "tree"} & set(forms) else 0.0
    _sizes.require("iterations", scheme.iterations, lambda n: n * (_BYTES_A_STEP + square * n))


def _of_kind(form: str, scheme: Scheme, question: Question, progress: Report) -> Optimized:
    """The best C of one kind."""
    target, objective = question.target, question.objective
    loss = objective.loss(scheme.iterations) if isinstance(objective, Objective) else objective
    bands = question.form.bands or _default_bands(scheme, form)
    if form not in kinds.names() or (bands == 1 and form in defaults.BANDED):
        strategy = kinds.fixed(form, bands=bands) if form not in defaults.BANDED else Identity()
        sigma = _sigma(Mechanism(scheme, strategy), target)
        return Optimized(strategy, float(np.asarray(loss(strategy, sigma))), sigma)
    # of a C with sensitivity, or largest column norm, 1
    participations = unamplified.Participation.of_scheme(scheme).largest_count
    at_one = _sigma(Mechanism(scheme, Identity()), target) / math.sqrt(participations)
    trace = Trace(progress=_listener(form, at_one, progress))
    optimum = unamplified.optimize(
        scheme,
        dataclasses.replace(question.form, strategy=form, bands=bands),
        loss=loss,
        search=dataclasses.replace(question.search, tolerance=_TOLERANCE),
        equal_columns=False,
        trace=trace,
    )
    rows = np.array(trace.history).reshape(-1, 3)
    history = np.stack([rows[:, 0], rows[:, 1] + math.log(at_one), at_one * rows[:, 2]], axis=1)
    sigma = at_one * optimum.sensitivity
    value = float(np.asarray(loss(optimum.strategy, sigma)))
    seconds = float(rows[-1, 0]) if len(rows) else 0.0
    status = trace.status
    if "convergence" in status:  # in SciPy's words
        status = f"converged (relative tolerance {_TOLERANCE:g})"
    return Optimized(optimum.strategy, value, sigma, status, history, seconds)


def _sigma(mechanism: Mechanism, target: Target) -> float:
    return account(mechanism, epsilon=target.epsilon, delta=target.delta).noise_multiplier


def _listener(form: str, at_one: float, progress: Report) -> Callable[[Trace], None]:
    tell = _signals.heard(progress)

    def report(trace: Trace) -> None:
        done, stage = len(trace.history), f"optimizing, {form}"
        value = trace.best_value + math.log(at_one)
        shown = dataclasses.replace(trace, best_value=value, best_sigma=at_one)
        # searches end long before their limit, which would promise minutes
        tell(Step(stage, done, None, "steps", trace=shown))

    return report


def _record(scheme: Scheme, result: Optimized) -> JsonObject:
    """What came of one scheme, JSON values only."""
    return {
        "sampling": scheme.describe(),
        "strategy": result.strategy.kind,
        "size": getattr(scheme, "bands", 0),
        "error": math.exp(result.loss),
        "noise_multiplier": result.noise_multiplier,
        "memory": choose(result.strategy, scheme.iterations).slots,
    }
