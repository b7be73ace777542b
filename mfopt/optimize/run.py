"""One call from a privacy target to an optimized strategy."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _check
from mfopt._float64 import float64
from mfopt.errors import FailureError
from mfopt.optimize import drivers, objective, starts
from mfopt.optimize import parameterization as parameters
from mfopt.optimize.drivers import Step, Trace
from mfopt.progress import Report, silent
from mfopt.sampling import BallsInBins
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums, Workload

OPTIMIZABLE = ("banded", "banded-toeplitz", "blt", "toeplitz", "dense")
# Frozen samples: few suffice for a handful of parameters; a free coefficient for every lag
# would fit the noise of a small sample.
_SAMPLES = {
    "blt": 2**11,
    "banded-toeplitz": 2**13,
    "toeplitz": 2**14,
    "banded": 2**14,
    "dense": 2**14,
}
_STEPS = {"blt": 150, "banded-toeplitz": 80, "toeplitz": 100, "banded": 60, "dense": 120}
# Relative change of the error at which the search ends: a tenth of what its samples can resolve.
_TOLERANCE = {"blt": 1e-4, "banded-toeplitz": 2e-5, "toeplitz": 1e-5, "banded": 2e-5, "dense": 2e-5}
_SCOUT_STEPS = 12


@dataclasses.dataclass(frozen=True)
class Optimized:
    """An optimized strategy, not yet calibrated on fresh samples.

    Attributes:
      strategy: the best C found.
      loss: its objective value on the frozen samples (log error for "rmse" and "max"); biased
        low by the optimization, so never report it.
      noise_multiplier: σ on the frozen samples, a starting point for calibration.
      status: why the optimization stopped.
      interrupted: stopped by the user; the strategy is the best so far.
      history: rows (seconds, loss, σ), shape (evaluations, 3).
      seconds: wall time.
    """

    strategy: Strategy
    loss: float
    noise_multiplier: float
    status: str
    interrupted: bool
    history: np.ndarray
    seconds: float


@float64
def optimize(
    scheme: BallsInBins,
    epsilon: float,
    delta: float,
    *,
    strategy: str = "blt",
    bands: int = 16,
    buffers: int = 4,
    workload: Workload | None = None,
    loss: str | objective.Loss = "rmse",
    samples: int | None = None,
    optimizer: str = "lbfgs",
    steps: int | None = None,
    tolerance: float | None = None,
    init: Strategy | Sequence[Strategy] | None = None,
    seed: int | None = None,
    progress: Report = silent,
) -> Optimized:
    """The strategy with the least error of (C, σ(C)) at (ε, δ) under balls-in-bins.

    Args:
      scheme: bins and epochs.
      epsilon, delta: add-remove target for one unit.
      strategy: one of :data:`OPTIMIZABLE`.
      bands, buffers: size of banded kinds and of BLT.
      workload: A; prefix sums by default.
      loss: "rmse", "max", or a differentiable function of (strategy, σ) to minimize.
      samples: frozen Monte Carlo samples; more for kinds with more parameters by default.
      optimizer: "lbfgs" (SciPy's L-BFGS-B) or "optax:NAME" / NAME for an optax optimizer.
      steps: evaluations of the objective at most.
      tolerance: relative change of the error that counts as progress.
      init: one or several strategies to start from, instead of the built-in starts.
      seed: pins the frozen samples.
      progress: told of every evaluation (a :class:`~mfopt.optimize.drivers.Step`), counted over
        all starts and warm starts of the call.

    Raises:
      UsageError: an argument out of range, or a kind without free parameters.
    """
    _check.positive("epsilon", epsilon)
    _check.probability("delta", delta)
    if strategy not in OPTIMIZABLE:
        raise _check.reject("strategy", strategy, f"must be one of {', '.join(OPTIMIZABLE)}")
    n, workload = scheme.iterations, workload or PrefixSums()
    if isinstance(loss, str):
        if loss not in objective.LOSSES:
            raise _check.reject("objective", loss, f"must be one of {sorted(objective.LOSSES)}")
        loss = objective.LOSSES[loss](workload, n)
    bands = min(_check.integer("bands", bands), n)
    buffers = _check.integer("buffers", buffers)
    begun = time.perf_counter()
    job = _Job(scheme, epsilon, delta, loss, optimizer, tolerance, seed, progress)
    limit = _STEPS[strategy] if steps is None else _check.integer("steps", steps)
    count = _SAMPLES[strategy] if samples is None else samples
    _check.integer("samples", count, at_least=64)

    given = [init] if isinstance(init, Strategy) else list(init or [])
    candidates = [
        start
        for source in given
        if (start := starts.reshape(source, strategy, n, bands=bands, buffers=buffers))
    ]
    if given and not candidates:
        raise _check.reject(
            "init", given[0].kind, f"cannot start a {strategy} strategy of this size"
        )
    if not candidates:
        candidates = _own_starts(job, strategy, scheme, bands, buffers, limit)
    job.later = _budget(len(candidates), limit)
    trace = job.best_of(strategy, candidates, limit, count)
    if trace.best is None:
        raise FailureError("the objective is not a number at any start: is the loss defined there?")
    result = parameters.of(trace.start, n).build(jnp.asarray(trace.best))
    return Optimized(
        jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), result),
        trace.best_value, trace.best_sigma, trace.status, trace.interrupted,
        # an interrupt may come before the first evaluation
        np.array(trace.history).reshape(-1, 3), time.perf_counter() - begun,
    )  # fmt: skip


def _own_starts(
    job: _Job, kind: str, scheme: BallsInBins, bands: int, buffers: int, steps: int
) -> list[Strategy]:
    """BLT from spread decays; every other kind from the optimized BLT, which is near its best."""
    if kind == "blt":
        return list(starts.blt_starts(buffers, scheme.bins))
    n = scheme.iterations
    first: list[Strategy] = [*starts.blt_starts(4, scheme.bins)]
    middle_steps = _STEPS["toeplitz"] if kind == "dense" else 0
    job.later = _budget(len(first), 60) + middle_steps + steps
    warm = job.best_of("blt", first, 60, _SAMPLES["blt"], stage="warm start")
    blt = parameters.of(warm.start, n).build(jnp.asarray(warm.best))
    sources = [blt]
    if kind == "dense":
        middle = job.best_of(
            "toeplitz", [starts.toeplitz(blt, n)],
            middle_steps, _SAMPLES["toeplitz"], stage="warm start, toeplitz",
        )  # fmt: skip
        sources = [parameters.of(middle.start, n).build(jnp.asarray(middle.best))]
    shaped = [starts.reshape(s, kind, n, bands=bands, buffers=buffers) for s in sources]
    return [s for s in shaped if s is not None]


def _budget(candidates: int, steps: int) -> int:
    """Evaluations at most from so many starts: a short run from each, where there are several."""
    return steps if candidates == 1 else candidates * _SCOUT_STEPS + steps


@dataclasses.dataclass
class _Job:
    """What stays the same over all starts of one call, and how far the call has come.

    ``done`` evaluations lie behind, and ``later`` ones at most belong to runs not yet begun.
    """

    scheme: BallsInBins
    epsilon: float
    delta: float
    loss: objective.Loss
    optimizer: str
    tolerance: float | None
    seed: int | None
    progress: Report
    interrupted: bool = False
    done: int = 0
    later: int = 0

    def best_of(
        self, kind: str, candidates: list[Strategy], steps: int, samples: int, stage: str = ""
    ) -> StartedTrace:
        """A short run from each start, then a full one from where the best of them got to."""
        n = self.scheme.iterations
        best: StartedTrace | None = None
        history: list[tuple[float, float, float]] = []
        targets: dict[int, objective.AmplifiedObjective] = {}
        maps = [parameters.of(start, n) for start in candidates]
        scouts = len(candidates) > 1
        for start, mapping in zip(candidates, maps, strict=True):
            # starts of one shape share one compiled objective
            target = targets.setdefault(len(mapping.start), self._objective(mapping, samples))
            trace = self._run(
                target, start, mapping.start, _SCOUT_STEPS if scouts else steps, stage or kind
            )
            history += trace.history
            if best is None or trace.best_value < best.best_value:
                best = trace
            if trace.interrupted:
                break
        assert best is not None
        if scouts and not best.interrupted and best.best is not None:
            target = targets[len(best.best)]
            final = self._run(target, best.start, best.best, steps, stage or kind)
            history += final.history
            best = final if final.best is not None else best
        best.history = history
        return best

    def _objective(
        self, mapping: parameters.Parameterization, samples: int
    ) -> objective.AmplifiedObjective:
        return objective.AmplifiedObjective(
            self.loss, mapping, self.scheme, self.epsilon, self.delta,
            samples=samples, seed=self.seed,
        )  # fmt: skip

    def _run(
        self,
        target: objective.Objective,
        start: Strategy,
        point: np.ndarray,
        steps: int,
        stage: str,
    ) -> StartedTrace:
        trace = StartedTrace(start=start)
        tolerance = _TOLERANCE[start.kind] if self.tolerance is None else self.tolerance
        self.later = max(self.later - steps, 0)

        def report(trace: Trace) -> None:
            so_far = self.done + len(trace.history)
            ceiling = self.done + max(steps, len(trace.history)) + self.later
            self.progress(
                Step(f"optimizing, {stage}", so_far, ceiling, "steps", at_most=True, trace=trace)
            )

        trace.progress = report
        try:
            if self.interrupted:
                raise KeyboardInterrupt
            if self.optimizer == "lbfgs":
                drivers.lbfgs(target, point, trace, steps=steps, tolerance=tolerance)
            else:
                drivers.optax_method(
                    target, point, trace, name=self.optimizer.removeprefix("optax:"),
                    steps=steps, tolerance=tolerance,
                )  # fmt: skip
        except KeyboardInterrupt:
            # noted for the whole job: no later start or stage may begin
            self.interrupted = trace.interrupted = True
            trace.status = "interrupted"
            if trace.best is None:
                trace.best, trace.best_value, trace.best_sigma = np.array(point), math.inf, math.nan
        self.done += len(trace.history)
        return trace


@dataclasses.dataclass
class StartedTrace(Trace):
    """A trace that remembers the strategy it started from."""

    start: Strategy = dataclasses.field(kw_only=True)
