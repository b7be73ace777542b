"""One call from a privacy target to an optimized strategy."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from mfopt._runtime import _check, _quick, _signals
from mfopt._runtime._float64 import wide
from mfopt.accounting.monte_carlo.protocol import SampledLaw, law
from mfopt.errors import FailureError, UsageError
from mfopt.optimize import defaults, kinds, sizes
from mfopt.optimize.kinds import Kind
from mfopt.optimize.objective import (
    AmplifiedObjective,
    Evaluation,
    Loss,
    Objective,
    built,
)
from mfopt.optimize.optimizers import Descent, Evaluator, Step, Trace, lbfgs
from mfopt.optimize.parameterization import Build, Parameterization
from mfopt.optimize.question import Question, Search, Target
from mfopt.optimize.search import CHECKS, minimize
from mfopt.optimize.starts import Size
from mfopt.progress import Report, silent
from mfopt.sampling import BinScheme
from mfopt.strategies import Identity, Strategy

_BACK = 0.3  # of the way to its start, from where a short search is begun a second time
_PLAIN = 0.05  # gain of log error over a start that no fit to the samples explains: 0.03 was seen
_UNFITTED = 128  # samples for each parameter from which on C does not fit them
_SCOUT_STEPS = 12  # evaluations at most from one of several starts
# seconds of an evaluation from which on a search begins on a part of its samples, and that part
_SLOW, _PART = 4.0, 4
_SEEN_DELTA = 1e-20  # seeds, ε and sizes that were tried; at 1e-25 the first search had no σ
_FEW_BINS = 128  # of the search that one with more bins begins from
_OWN_STARTS = 2048  # iterations up to which it begins at starts of its own too
# Where bins are grouped: times as many frozen samples, since all else costs more there, and the
# least tolerance. At 8 × 1,024: 0.03% of the error, and a third of the evaluations.
_MANY_SAMPLES, _LEAST_TOLERANCE = 4, 1e-4


@dataclasses.dataclass(frozen=True)
class Optimized:
    """An optimized strategy, not yet calibrated on fresh samples; of C alone, one in closed form.

    Attributes:
      strategy: the best C found, scaled so that its largest mode norm is 1.
      loss: its objective value (log error for "rmse" and "max"), on samples that the search has
        not seen where C has so many parameters that it could have fitted those of the search; in
        closed form where the law has a surrogate that suffices; of the bins that were searched
        with, where the scheme has more (:func:`.sizes.searched`); so is σ.
      noise_multiplier: σ for that C on the same samples, a starting point for calibration.
      status: why the optimization stopped.
      history: rows (seconds, loss, σ at a largest mode norm of 1), shape (evaluations, 3); of the
        search that found this C.
      seconds: wall time, of all searches.
      forms: where several kinds were searched, the loss of each one's best on fresh samples, the
        same for all.
    """

    strategy: Strategy
    loss: float = math.nan
    noise_multiplier: float = math.nan
    status: str = "nothing to optimize"
    history: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 3)))
    seconds: float = 0.0
    forms: dict[str, float] = dataclasses.field(default_factory=dict)


class InterruptedOptimization(KeyboardInterrupt):
    """Interrupt of an optimization by the user (a KeyboardInterrupt), with the best C so far.

    Attributes:
      best: the best C until then. It is no result of the optimization that was asked for: whoever
        keeps it must say so.
    """

    def __init__(self, best: Optimized) -> None:
        super().__init__("interrupted; the best strategy so far is in .best")
        self.best = best


@wide
def optimize(scheme: BinScheme, question: Question, progress: Report = silent) -> Optimized:
    """The strategy with the lowest error of (C, σ(C)) at (ε, δ) under the scheme's amplification.

    Args:
      scheme: bins and epochs.
      question: what is asked; "blt" where no kind is named, and without diagonals unless
        ``search.time_scale`` asks for them.
      progress: callback for each evaluation (an :class:`.optimizers.Step`), counted over
        all starts and warm starts of the call.

    Raises:
      UsageError: an argument out of range, or a kind without free parameters.
      FailureError: the objective is not a number at any start.
      InterruptedOptimization: at a KeyboardInterrupt, with the best C so far.

    >>> from mfopt.optimize import Form, Search, Target
    >>> from mfopt.sampling import BallsInBins
    >>> target = Target(2.0, 1e-3, seed=0)
    >>> question = Question(target, Form("blt", buffers=1), search=Search(steps=6))
    >>> best = optimize(BallsInBins(bins=4, epochs=2), question)
    >>> best.strategy.kind, best.strategy.buffers, best.noise_multiplier < 1.6
    ('blt', 1, True)
    """
    begun = time.perf_counter()
    form, search, loss = question.form, question.search, question.objective
    scaled = bool(search.time_scale)
    entries = [kinds.find(name) for name in form.strategy or ("blt",)]
    if scaled:
        entries = [kinds.scaled(entry) for entry in entries]
    searched, coarse_problem = scheme, None
    if isinstance(loss, Objective):
        if law(scheme).coarse() != law(scheme) and loss.any_length:
            if not search.starts and all(entry.stretch is not None for entry in entries):
                searched = sizes.searched(scheme)
            smaller = dataclasses.replace(scheme, bins=min(_FEW_BINS, scheme.bins))
            coarse_problem = _Problem(smaller, law(smaller), loss.loss(smaller.iterations), smaller)
        loss = loss.loss(searched.iterations)
    n = searched.iterations
    bands = min(defaults.BANDS if form.bands is None else form.bands, n)
    buffers = defaults.buffers(scheme) if form.buffers is None else form.buffers
    size = Size(n, searched.bins, bands, buffers)
    coarse = law(searched).coarse()
    problem = _Problem(searched, coarse, loss, scheme, grouped=coarse != law(searched))
    job = _Job(problem, coarse_problem, question.target, search.tolerance, progress)
    work = {
        entry.name: sizes.Load(
            entry.name, job.samples(entry, size, search.samples), bands, buffers, scaled
        )
        for entry in entries
    }
    for load in work.values():
        sizes.require(scheme, load)
    searches = [job.search(entry, size, search) for entry in entries]
    if search.starts:
        searches = [planned for planned in searches if planned.starts]
        if not searches:
            rule = f"cannot start a {' or '.join(work)} strategy of this size"
            raise _check.reject("init", search.starts[0].kind, rule)
    loads = [work[planned.kind.name] for planned in searches]
    sizes.announce(scheme, loads, [planned.steps for planned in searches], progress)
    ends: list[StartedTrace] = []
    for number, planned in enumerate(searches):
        if not job.interrupted:
            later_evaluations = sum(later.evaluations for later in searches[number + 1 :])
            ends.append(_best(job, planned, size, later_evaluations))
    best_index, forms = job.preferred(searches, ends)
    trace = ends[best_index]
    strategy, mode_norm = trace.normalized(scheme)
    optimum = Optimized(
        strategy,
        trace.best_value,
        trace.best_sigma * mode_norm,
        trace.status,
        # an interrupt may come before the first evaluation
        np.array(trace.history).reshape(-1, 3),
        time.perf_counter() - begun,
        forms,
    )
    if job.interrupted:
        raise InterruptedOptimization(optimum)
    return optimum


def _best(job: _Job, search: _Search, size: Size, later_evaluations: int) -> StartedTrace:
    """Run one search; at most ``later_evaluations`` follow it."""
    kind, limit = search.kind, search.steps
    job.later = search.evaluations + later_evaluations
    candidates = search.starts or _own_starts(job, kind, size)
    law(job.problem.scheme).check_shape(candidates[0])
    in_closed_form = None if search.starts else job.closed_form_search(kind, candidates, limit)
    if in_closed_form is not None:
        if job.problem.law.surrogate_suffices(job.target.epsilon):
            return in_closed_form
        candidates = [in_closed_form.searched(), *candidates]
    job.later = _budget(len(candidates), limit) + later_evaluations
    trace = job.best_of(kind, candidates, limit, search.samples)
    if search.samples < _UNFITTED * kind.parameters(size):
        job.confirm(kind, candidates, trace, search.samples)
    return trace


@functools.partial(_quick.jit, static_argnums=0)
def _norm(sampled: SampledLaw, strategy: Strategy) -> jax.Array:
    return sampled.norm(sampled.reduced(strategy))


def _own_starts(job: _Job, entry: Kind, size: Size) -> list[Strategy]:
    """The starts of a kind, and the converted optima of what it comes after."""
    stages = kinds.stages(entry, size)
    optima: dict[tuple[str, Size], Strategy] = {}
    starts: list[Strategy] = []
    for number, stage in enumerate(stages):
        kind, starts = stage.kind, job.starts(stage)
        for earlier in kind.prerequisites(stage.size):
            start = kind.convert(optima[earlier.kind.label, earlier.size], stage.size)
            if start is None:
                raise FailureError(f"{earlier.kind.label} gives no start for {kind.label}")
            starts.append(start)
        if stage is stages[-1]:
            break
        text = f"warm start, {kind.label}" if number else "warm start"
        if not job.covers(starts[0]):
            # the scheme has no account of such a C: what leads on from it begins where it would
            optima[kind.label, stage.size] = starts[0]
            continue
        in_closed_form = job.closed_form_search(kind, starts, kind.warm_steps)
        if in_closed_form is not None:
            optima[kind.label, stage.size] = in_closed_form.searched()
            continue
        samples = job.samples(kind, stage.size)
        trace = job.best_of(kind, starts, kind.warm_steps, samples, stage=text)
        optima[kind.label, stage.size] = trace.searched()
    return starts


def _budget(candidates: int, steps: int) -> int:
    """Evaluations at most from so many starts: a short run from each, where there are several."""
    return steps if candidates == 1 else candidates * _SCOUT_STEPS + steps


class _Search(NamedTuple):
    """One kind, and how far its search may go.

    Attributes:
      kind: of C.
      starts: where it begins, or none for its own starts.
      steps: evaluations at most, once one start is chosen.
      samples: frozen ones.
      evaluations: evaluations at most, with all that comes before.
    """

    kind: Kind
    starts: list[Strategy]
    steps: int
    samples: int
    evaluations: int


class _Problem(NamedTuple):
    """Scheme, sampled law and loss of a search.

    Attributes:
      scheme: bins and epochs.
      law: its own, or a coarse one.
      loss: of C and σ.
      target_scheme: whose C is wanted: of more bins, where the one that is found is stretched to
        them.
      grouped: whether the law is a coarse one.
    """

    scheme: BinScheme
    law: SampledLaw
    loss: Loss
    target_scheme: BinScheme
    grouped: bool = False


class _Attempt(NamedTuple):
    """A search from one point.

    Attributes:
      objective: what is minimized, on frozen samples.
      kind: of C.
      start: parameters.
      steps: evaluations at most.
      stage: name of it, for progress.
      judge: the objective on samples that no step sees, where C could be fitted to the frozen ones.
      sigma: σ at the start, where it is known.
      checks: see :data:`mfopt.optimize.search.CHECKS`.
      problem: scheme, law and loss, where they are not the job's.
    """

    objective: AmplifiedObjective
    kind: Kind
    start: np.ndarray
    steps: int
    stage: str
    judge: Evaluator | None = None
    sigma: float = math.nan
    checks: int = CHECKS
    problem: _Problem | None = None


@dataclasses.dataclass
class _Job:
    """Settings shared by all starts of one call, and its progress.

    ``coarse_problem`` is the same with few bins, where many are grouped and the loss is known
    there too. ``done`` evaluations lie behind, and ``later`` ones at most belong to runs not yet
    begun.
    """

    problem: _Problem
    coarse_problem: _Problem | None
    target: Target
    tolerance: float | None
    progress: Report
    interrupted: bool = False
    done: int = 0
    later: int = 0

    def search(self, kind: Kind, size: Size, options: Search) -> _Search:
        """Plan of the search of one kind, from those given starts that say something about it."""
        twice = kind.tangents and size.n <= kind.twice
        limit = kind.steps * (2 if twice else 1)
        limit = limit if options.steps is None else options.steps
        count = self.samples(kind, size, options.samples)
        if options.starts:
            converted = (kind.convert(source, size) for source in options.starts)
            starts = [start for start in converted if start is not None]
            return _Search(kind, starts, limit, count, _budget(len(starts), limit))
        stages = kinds.stages(kind, size)
        if len(stages) > 1 and (identity := kind.convert(Identity(), size)) is not None:
            self.problem.law.check_shape(identity)  # before the searches that it begins from
        most_evaluations = 0
        for stage in stages:
            if self.stretches(stage):
                most_evaluations += 2 * _SCOUT_STEPS
            begin = len(stage.kind.starts(stage.size)) + len(stage.kind.prerequisites(stage.size))
            most_evaluations += _budget(
                begin, limit if stage is stages[-1] else stage.kind.warm_steps
            )
        return _Search(kind, [], limit, count, most_evaluations)

    def covers(self, strategy: Strategy) -> bool:
        """Return True if the scheme's accounting supports a C of this form."""
        try:
            self.problem.law.check_shape(strategy)
        except UsageError:
            return False
        return True

    def best_of(
        self, kind: Kind, candidates: list[Strategy], steps: int, samples: int, stage: str = ""
    ) -> StartedTrace:
        """A short run from each start, then a full one from where the best of them got to."""
        stage = stage or kind.label
        best: StartedTrace | None = None
        history: list[tuple[float, float, float]] = []
        begun: list[float] = []
        targets: dict[int, AmplifiedObjective] = {}
        maps = [
            kind.parameterize(candidate, self.problem.scheme.iterations) for candidate in candidates
        ]
        cost = functools.partial(sizes.search_seconds, self.problem.scheme, samples=samples)
        slow = cost(evaluations=2) - cost(evaluations=1) > _SLOW and steps > 2 * _SCOUT_STEPS
        scout_samples = min(max(samples // (2 * _PART) * 2, 64), samples) if slow else samples
        scouts, checks = len(candidates) > 1 or scout_samples < samples, 1 if slow else CHECKS
        for mapping in maps:
            # starts of one shape share one compiled objective
            size = len(mapping.start)
            if size not in targets:
                targets[size] = self._objective(
                    self.problem, mapping, scout_samples, self.target.seed
                )
            target, trace = targets[size], self._started(kind, mapping.build)
            judge = None if scouts else self._judge(kind, mapping, samples)
            scout_steps = _SCOUT_STEPS if scouts else steps
            attempt = _Attempt(
                target, kind, mapping.start, scout_steps, stage, judge, checks=checks
            )
            self._run(attempt, trace)
            history += trace.history
            begun.append(trace.history[0][1] if trace.history else math.nan)
            if best is None or trace.best_value < best.best_value:
                best = trace
            if trace.interrupted:
                break
        assert best is not None
        # so few samples may have no σ where all have one
        point = maps[0].start if best.best is None and scout_samples < samples else best.best
        if scouts and not best.interrupted and point is not None:
            mapping, final = Parameterization(point, best.build), self._started(kind, best.build)
            steps -= len(history) if len(candidates) == 1 else 0
            try:
                target = targets[len(point)]
                if scout_samples < samples:
                    target = self._objective(self.problem, mapping, samples, self.target.seed)
                judge = self._judge(kind, mapping, samples)
                sigma = best.best_sigma * best.best_norm
                self._run(_Attempt(target, kind, point, steps, stage, judge, sigma, checks), final)
            except KeyboardInterrupt:
                self.interrupted = final.interrupted = True
            history += final.history
            if final.history:
                best = final
            elif final.interrupted:
                best.interrupted, best.status = True, "interrupted"
        best.history, best.begun = history, begun
        return best

    def closed_form_search(
        self, kind: Kind, candidates: list[Strategy], steps: int
    ) -> StartedTrace | None:
        """Search the law's surrogate, without samples; None where it has none, or no σ."""
        surrogate = self.problem.law.surrogate()
        if surrogate is None or not kind.tangents:
            return None
        problem = self.problem._replace(law=surrogate, grouped=False)
        text = f"{kind.label}, in closed form"
        traces = [self._from_start(problem, kind, start, steps, text, 64) for start in candidates]
        usable = [trace for trace in traces if trace.best is not None]
        return min(usable, key=lambda trace: trace.best_value, default=None)

    def _from_start(
        self,
        problem: _Problem,
        kind: Kind,
        start: Strategy,
        steps: int,
        stage: str,
        samples: int,
    ) -> StartedTrace:
        """Search a problem from one start, on so many samples."""
        mapping = kind.parameterize(start, problem.scheme.iterations)
        target = self._objective(problem, mapping, samples, self.target.seed)
        trace = self._started(kind, mapping.build)
        self._run(_Attempt(target, kind, mapping.start, steps, stage, problem=problem), trace)
        return trace

    def _started(self, kind: Kind, build: Build) -> StartedTrace:
        """A trace for this problem."""
        searched, target_scheme = self.problem.scheme, self.problem.target_scheme

        def stretch(strategy: Strategy) -> Strategy:
            assert kind.stretch is not None
            return kind.stretch(strategy, searched.iterations, target_scheme.iterations)

        target = f"`epsilon={self.target.epsilon:g}`, `delta={self.target.delta:g}`"
        to_target = stretch if searched != target_scheme else None
        return StartedTrace(build=build, stretch=to_target, target=target)

    def confirm(
        self, kind: Kind, starts: list[Strategy], trace: StartedTrace, samples: int
    ) -> None:
        """Evaluate the end on samples unseen by the search, and revert to a start that does better
        there: of those that were not plainly worse on its own.

        A C of as many numbers as a general one has fits the frozen samples themselves: at 16 × 128
        dense C was up to 0.7% worse than the time-scaled Toeplitz that it had begun from.
        """
        if self.interrupted or trace.best is None:
            return
        ends = [Parameterization(trace.best, trace.build)]
        for start, loss in zip(starts, trace.begun, strict=True):
            if not loss > trace.best_value + _PLAIN:
                ends.append(kind.parameterize(start, self.problem.scheme.iterations))
        evaluations = self._afresh(ends, samples, trace.best_sigma * trace.best_norm)
        if not evaluations:
            trace.interrupted = True
            return
        best_index = min(
            range(len(ends)), key=lambda i: np.nan_to_num(evaluations[i].value, nan=math.inf)
        )
        best = evaluations[best_index]
        if not math.isfinite(best.value):
            return
        trace.build = ends[best_index].build
        trace.move(ends[best_index].start, best)
        if best_index:
            trace.status += "; fresh samples preferred the start"

    def preferred(
        self, searches: list[_Search], ends: list[StartedTrace]
    ) -> tuple[int, dict[str, float]]:
        """Index of the best end, and the loss of each by kind where fresh samples gave one.

        The frozen samples flatter each C that was fitted to them, one of more numbers more; after
        an interrupt they are all that there is.
        """
        points = {
            index: Parameterization(end.best, end.build)
            for index, end in enumerate(ends)
            if end.best is not None
        }
        forms: dict[str, float] = {}
        if len(points) > 1 and not self.interrupted:
            evaluations = self._afresh(
                list(points.values()), max(search.samples for search in searches)
            )
            for index, evaluation in zip(
                points, evaluations, strict=False
            ):  # none after an interrupt
                ends[index].move(points[index].start, evaluation)
                forms[searches[index].kind.name] = evaluation.value
        values = {index: np.nan_to_num(ends[index].best_value, nan=math.inf) for index in points}
        return min(values, key=values.__getitem__, default=0), forms

    def _afresh(
        self, points: list[Parameterization], samples: int, sigma: float = math.nan
    ) -> list[Evaluation]:
        """Objective at each of ``points``, on the same fresh samples for all.

        Empty after an interrupt, which is noted. ``sigma`` is about that of the first point.
        """
        seed, evaluations = self._seed_afresh(), list[Evaluation]()
        try:
            for point in points:
                target = self._objective(self.problem, point, samples, seed)
                evaluations.append(target.placed(point.start, sigma).evaluation)
                sigma = math.nan
        except KeyboardInterrupt:
            self.interrupted = True
            return []
        return evaluations

    def samples(self, kind: Kind, size: Size, chosen: int | None = None) -> int:
        """Number of frozen samples of a search at this size, unless the caller named one."""
        if chosen is not None:
            return chosen
        factor = _MANY_SAMPLES if self.problem.grouped else 1
        enough = self.problem.law.enough_samples(kind.parameters(size))
        return int(min(factor * kind.samples, enough))

    def stretches(self, stage: kinds.Stage) -> bool:
        """Return True if the start of a stage is found with few bins."""
        return (
            self.coarse_problem is not None
            and stage.kind.stretch is not None
            and bool(stage.kind.starts(stage.size))
        )

    def starts(self, stage: kinds.Stage) -> list[Strategy]:
        """The starts of a stage; the optimum for as many epochs of few bins, where it is alike.

        In short runs beside its own: from the former alone one search of four ended 1% above the
        best known at 4 × 512, ε = 2, from all of them two of two within 0.5%.
        """
        kind, coarse_problem = stage.kind, self.coarse_problem
        if coarse_problem is None or kind.stretch is None or not self.stretches(stage):
            return list(kind.starts(stage.size))
        n = coarse_problem.scheme.iterations
        start = kind.starts(stage.size._replace(n=n, bins=coarse_problem.scheme.bins))[0]
        text = f"{kind.label}, {coarse_problem.scheme.bins} bins first"
        trace = self._from_start(coarse_problem, kind, start, _SCOUT_STEPS, text, kind.samples)
        if trace.best is not None:
            start = trace.searched()
        direct = kind.starts(stage.size) if self.problem.scheme.iterations <= _OWN_STARTS else []
        return [kind.stretch(start, n, self.problem.scheme.iterations), *direct]

    def _judge(self, kind: Kind, mapping: Parameterization, samples: int) -> Evaluator | None:
        """Fresh samples for validation, where C could overfit those of the search."""
        if kind.tangents:
            return None
        return self._objective(self.problem, mapping, samples, self._seed_afresh())

    def _seed_afresh(self) -> int:
        """A seed of samples unseen by any search."""
        seed = self.target.seed
        source = np.random.SeedSequence(None if seed is None else [seed, 1])
        return int(source.generate_state(1)[0])

    def _objective(
        self, problem: _Problem, mapping: Parameterization, samples: int, seed: int | None
    ) -> AmplifiedObjective:
        target = self.target.epsilon, self.target.delta
        return AmplifiedObjective(problem.loss, mapping, problem.law, target, samples, seed)

    def _run(self, attempt: _Attempt, trace: Trace) -> None:
        """Search from one point; ``trace`` has what came of it, also after an interrupt."""
        target, kind, point, steps, stage = attempt[:5]
        problem = attempt.problem or self.problem
        # in closed form, and for starts: 0.01% tells no two optima apart
        exact = problem.law == self.problem.law and not problem.grouped
        by_default = kind.tolerance if exact else max(kind.tolerance, _LEAST_TOLERANCE)
        tolerance = by_default if self.tolerance is None else self.tolerance
        self.later = max(self.later - steps, 0)
        # σ and the error are those of groups then: nothing that the result is reported with
        if problem.grouped:
            fewer = "" if problem.scheme == problem.target_scheme else f"{problem.scheme.bins} "
            stage += f", {fewer}bins grouped"
        tell = _signals.heard(self.progress)

        def report(trace: Trace) -> None:
            evaluations = self.done + len(trace.history)
            ceiling = self.done + max(steps, len(trace.history)) + self.later
            tell(
                Step(
                    f"optimizing, {stage}", evaluations, ceiling, "steps", at_most=True, trace=trace
                )
            )

        trace.progress = report
        try:
            if self.interrupted:
                raise KeyboardInterrupt
            if kind.tangents:
                twice = steps > _SCOUT_STEPS and problem.scheme.iterations <= kind.twice
                first_steps = steps // 2 if twice else steps
                descent = Descent(trace, first_steps, tolerance)
                minimize(target, point, descent, attempt.sigma, attempt.checks)
                if twice:
                    self._again(target, point, trace, steps, tolerance)
            else:
                lbfgs(target, point, Descent(trace, steps, tolerance), attempt.judge)
        except KeyboardInterrupt:
            # noted for the whole job: no later start or stage may begin
            self.interrupted = trace.interrupted = True
            trace.status = "interrupted"
            if trace.best is None:
                trace.best, trace.best_value, trace.best_sigma = np.array(point), math.inf, math.nan
        self.done += len(trace.history)

    @staticmethod
    def _again(
        target: AmplifiedObjective, start: np.ndarray, trace: Trace, steps: int, tolerance: float
    ) -> None:
        """A second search from part of the way back, kept in ``trace`` where it ends lower.

        A short run has several optima: of 20 searches one ends 0.4% high at 2 × 8, ε = 1, and two
        1% high at 1 × 64, ε = 2 with a wave; of two at 4 × 512, ε = 2 with a wave one, by 6%. Of
        two searches both hardly ever do.
        """
        if trace.best is None:
            return
        earlier = dataclasses.replace(trace)
        trace.best_value = math.inf
        try:
            begin = trace.best + _BACK * (start - trace.best)
            minimize(target, begin, Descent(trace, steps, tolerance))
        finally:  # an interrupt may end it
            if not trace.best_value < earlier.best_value - target.disagreement / 2:
                for name in ("best", "best_value", "best_sigma", "best_norm", "status"):
                    setattr(trace, name, getattr(earlier, name))


@dataclasses.dataclass(kw_only=True)
class StartedTrace(Trace):
    """A trace that knows which strategy its parameters are.

    Attributes:
      build: from parameters to a strategy.
      stretch: from there to the result, where it is for more bins than are searched with.
      target: in words, for messages.
      begun: losses of the starts, on the frozen samples.
    """

    build: Build
    stretch: Callable[[Strategy], Strategy] | None = None
    target: str = "this target"
    begun: list[float] = dataclasses.field(default_factory=list)

    def searched(self) -> Strategy:
        """The best strategy so far, of numpy arrays, as it is searched for.

        Raises:
          FailureError: the objective was not a number anywhere.
        """
        if self.best is None:
            raise FailureError(
                f"the objective is not a number at any start for {self.target}: use a larger "
                f"`delta` (samples may have no σ for less than {_SEEN_DELTA:g}), or see whether a "
                "loss of your own is defined there."
            )
        return built(self.build, self.best)

    def normalized(self, scheme: BinScheme) -> tuple[Strategy, float]:
        """The best C so far for the scheme at a largest mode norm of 1, and the norm that it has.

        (C, σ) and (a·C, a·σ) are one mechanism. At norm 1, σ is the noise multiplier of the
        Gaussian mechanism that this is without amplification, so the σ of two runs can be compared.
        A kind whose scale is part of its definition stays as it is, with the norm that it has. Of
        many bins the norm is about that: no matrix of all of them is made for it.

        Raises as :meth:`searched`.
        """
        best, norm = self.searched(), self.best_norm
        if self.stretch is not None:
            best, norm = self.stretch(best), math.nan
        if not norm > 0:
            norm = float(_norm(law(scheme).coarse(), best))
        rescaled = best.rescaled(1 / norm)
        return (best, norm) if rescaled is None else (rescaled, 1.0)
