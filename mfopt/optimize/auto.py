"""Lowest error at (ε, δ) over sampling schemes and kinds of C, within a number of noise buffers.

Every search ends with an estimate of its RMSE, on the same fresh samples for all C of a scheme; the
lowest is certified, and the next one if that fails. Candidates are, under each scheme,

* the kinds of C that are searched by default (:mod:`mfopt.optimize.defaults`), as large as the
  memory allows and pays,
* a banded Toeplitz C where the memory holds half an epoch and there is one scheme only,
* independent noise.

A BLT keeps one array for each buffer and is near its optimum with a few; a banded Toeplitz C keeps
one array for each band but the first and needs many. Kinds that regenerate past noise from the key
are left out, as they pay in time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mfopt import query_error
from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import JsonObject
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.noise.choice import choose
from mfopt.optimize import defaults, kinds
from mfopt.optimize.pipeline import Searched, on_record
from mfopt.optimize.question import Form, Question
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.progress import Progress, Report, silent, within
from mfopt.sampling import BinScheme
from mfopt.strategies import Identity, Strategy

MEMORY = 15  # arrays, unless the caller names a number
_MOST_CLEARED = 16  # arrays of a cleared BLT: 0.3% above a band of 127
# A few bands see a few steps, a BLT of as many arrays the whole run. At 8 × 32 half an epoch's
# bands are no better than four buffers at ε = 1 and 12% worse at 16, a quarter 2% and 39% worse.
_FEWEST_BANDS, _LEAST_SHARE = 9, 0.5
_TIMES = 4  # as many samples as a certificate begins with
# Bins from which on four times as many are taken, of all C: with 512 a few samples weigh most, and
# the standard error of σ over σ was 0.012 at 4 × 512, ε = 2, where the best C are 0.001 apart.
_MANY_BINS = 512
_SEED = 1  # of the samples that candidates are compared on: the same for all


class Candidate(NamedTuple):
    """A scheme, a kind of C and its size: buffers or bands, 0 where there are none."""

    scheme: BinScheme
    kind: str
    size: int = 0

    def words(self) -> str:
        """Short description for a line of progress."""
        noun = "bands" if self.kind == "banded-toeplitz" else "buffers"
        size = f" ({self.size} {noun})" if self.size else ""
        return f"{self.scheme.kind}, {self.kind}{size}"

    def search(self, question: Question, blt: Strategy | None, progress: Report) -> Optimized:
        """Search it; a banded C starts from ``blt``, where one is known."""
        if self.kind == "identity":
            return Optimized(Identity())
        banded = self.kind == "banded-toeplitz"
        form = Form(self.kind, *((self.size, 1) if banded else (1, self.size)))
        search = dataclasses.replace(
            question.search,
            time_scale=question.search.time_scale is not False and kinds.find(self.kind).scalable,
            init=blt if banded else None,
        )
        narrowed = dataclasses.replace(question, form=form, search=search)
        return optimize(self.scheme, narrowed, progress)


class Score(NamedTuple):
    """Estimate for a C on fresh samples.

    Attributes:
      noise_multiplier: σ.
      error: of the kind that is minimized; the lowest is the best.
      rmse: of the workload's queries, in clip norms per coordinate.
      memory: noise buffers (× model size) that streaming keeps.
    """

    noise_multiplier: float
    error: float
    rmse: float
    memory: int


class _Tried(NamedTuple):
    """Outcome of a candidate's search: C with its score; ``problem`` says what either lacks."""

    candidate: Candidate
    optimum: Optimized | None
    score: Score
    seconds: float
    problem: str = ""

    def describe(self) -> JsonObject:
        """Record of the outcome, JSON values only."""
        sampling, kind, size = self.candidate
        record: JsonObject = {"sampling": sampling.describe(), "strategy": kind, "size": size}
        if self.problem:
            record["problem"] = self.problem
        else:
            record["estimated_error"] = self.score.error
            record["estimated_rmse"] = self.score.rmse
            record["estimated_noise_multiplier"] = self.score.noise_multiplier
            record["memory"] = self.score.memory
        return {**record, "seconds": round(self.seconds, 3)}

    def note(self) -> str:
        """Outcome in a line of progress."""
        if self.problem:
            return f"{self.candidate.words()}: left out: {self.problem}"
        sigma, _, rmse, memory = self.score
        estimate = f"RMSE {rmse:.4g} at σ {sigma:.4g}, {memory} buffers (estimated)"
        return f"{self.candidate.words()}: {estimate}"


_NO_SCORE = Score(math.nan, math.inf, math.nan, 0)


def candidates(schemes: Sequence[BinScheme], epsilon: float, memory: int) -> list[Candidate]:
    """Candidates that keep at most ``memory`` noise buffers (× model size), each after those it
    starts from.

    >>> from mfopt.sampling import BallsInBins
    >>> [one.words() for one in candidates([BallsInBins(32, 8)], 2.0, 16)][1:]
    ['balls-in-bins, blt (4 buffers)', 'balls-in-bins, banded-toeplitz (17 bands)']
    """
    mechanisms = [Candidate(scheme, "identity") for scheme in schemes]
    for scheme in schemes if memory else ():
        most_buffers = defaults.buffers(scheme) if scheme.most_bands is None else _MOST_CLEARED
        buffers, bands = min(memory, most_buffers), min(memory + 1, scheme.bins)
        kinds_by_default = defaults.kinds(scheme, epsilon, buffers)
        mechanisms += [
            Candidate(scheme, kind, buffers)
            for kind in reversed(kinds_by_default)
            if kind != "banded-toeplitz"
        ]
        enough = bands >= max(_FEWEST_BANDS, int(_LEAST_SHARE * scheme.bins) + 1)
        if (enough and len(schemes) == 1) or ("banded-toeplitz" in kinds_by_default and bands > 1):
            mechanisms.append(Candidate(scheme, "banded-toeplitz", bands))
    return mechanisms


def least_error(
    schemes: Sequence[BinScheme],
    question: Question,
    memory: int = MEMORY,
    *,
    provenance: JsonObject | None = None,
    progress: Report = silent,
) -> Factorization:
    """Return the certified mechanism of lowest estimated error, over schemes and forms of C.

    ``provenance["tried"]`` of the result says what was tried and what came of it; its ``sampling``
    is what must be executed. An interrupt (KeyboardInterrupt) keeps the best so far with an
    *estimate* for a guarantee; ``provenance["interrupted"]`` is then true. Where nothing could be
    certified the best C is kept likewise, and ``provenance["not_certified"]`` says why.

    Args:
      schemes: sampling to choose from.
      question: what is asked; its form is chosen here.
      memory: noise buffers (× model size) that streaming may keep.
      provenance: more to put on record.
      progress: callback for every evaluation, and in words of every candidate that is finished.

    Raises:
      UsageError: an argument out of range.
      FailureError: nothing that was tried has an answer.
    """
    memory = _check.integer("memory", memory, at_least=0)
    tried, interrupted = _all_tried(
        candidates(schemes, question.target.epsilon, memory), question, progress
    )
    ranked = sorted(
        (candidate for candidate in tried if candidate.optimum),
        key=lambda candidate: candidate.score.error,
    )
    if not ranked:
        if interrupted:
            raise FailureError("interrupted before anything was tried; nothing to keep")
        raise FailureError("nothing that was tried has an answer: " + tried[-1].problem)
    record = {
        **(provenance or {}),
        "objective": question.described_objective.describe(),
        "tried": [candidate.describe() for candidate in tried],
        "at_most": memory,
    }
    return _certified_best(ranked, question, record, interrupted, progress)


def _all_tried(
    mechanisms: Sequence[Candidate], question: Question, progress: Report
) -> tuple[list[_Tried], bool]:
    """Outcome of each search, and whether an interrupt ended them."""
    tried: list[_Tried] = []
    blt: Strategy | None = None
    for candidate in mechanisms:
        begun = time.perf_counter()
        report = within(progress, candidate.words())
        optimum: Optimized | None = None
        try:
            optimum = candidate.search(question, blt, report)
            report(Progress("estimating its error on fresh samples"))
            score, problem = scored(optimum.strategy, candidate.scheme, question), ""
        except KeyboardInterrupt as stop:
            if isinstance(stop, InterruptedOptimization):
                optimum = stop.best
            if optimum is not None:
                # an unfinished search's own samples flatter it by next to nothing
                error = math.exp(optimum.loss) if math.isfinite(optimum.loss) else math.inf
                score, took = _NO_SCORE._replace(error=error), time.perf_counter() - begun
                tried.append(_Tried(candidate, optimum, score, took, "interrupted"))
            return tried, True
        except (UsageError, FailureError) as refusal:
            # what one scheme or size has no answer for, the others may
            optimum, score, problem = None, _NO_SCORE, str(refusal)
        tried.append(_Tried(candidate, optimum, score, time.perf_counter() - begun, problem))
        if candidate.kind == "blt" and optimum is not None:
            blt = optimum.strategy
        progress(Progress(candidate.words(), note=tried[-1].note(), lasting=True))
    return tried, False


def _certified_best(
    ranked: Sequence[_Tried],
    question: Question,
    record: JsonObject,
    interrupted: bool,
    progress: Report,
) -> Factorization:
    """The first that has a certificate, or a later one of lower error."""
    error = functools.partial(certified_error, question)
    refused: list[str] = []
    kept: list[Factorization] = []
    proved: list[Factorization] = []
    for candidate in ranked:
        # a certificate may cost more than was estimated, up to all of the amplification
        if proved and not candidate.score.error < min(map(error, proved)):
            break
        optimum, scheme = candidate.optimum, candidate.candidate.scheme
        assert optimum is not None
        try:
            facts = {**record, **({"not_certified": list(refused)} if refused else {})}
            searched = Searched(optimum, scheme, facts, interrupted, keep=True)
            factorization = on_record(searched, question, progress)
        except FailureError as problem:
            why = str(problem)
        else:
            if interrupted or factorization.provenance["interrupted"]:
                return min(proved, key=error, default=factorization)
            if factorization.guarantee.status == "certified":
                proved.append(factorization)
                continue
            kept.append(factorization)
            why = factorization.not_certified
        refused.append(f"{scheme.kind}, {optimum.strategy.kind}: {why}")
        note = f"{refused[-1]} The next best is certified instead."
        progress(Progress("certifying", note=note, lasting=True))
    if proved or kept:
        return min(proved, key=error, default=(kept or proved)[0])
    raise FailureError("nothing that was tried could be certified: " + refused[0])


def certified_error(question: Question, factorization: Factorization) -> float:
    """Error of a certified mechanism, of the kind that is minimized."""
    loss = question.described_objective.loss(factorization.iterations)
    return math.exp(float(np.asarray(loss(factorization.strategy, factorization.noise_multiplier))))


@float64
def scored(strategy: Strategy, scheme: BinScheme, question: Question) -> Score:
    """σ and errors of a C, exact or on the same fresh samples for all C of a scheme.

    How many samples depends on the scheme alone: C that are compared must share them.
    """
    epsilon, delta = question.target.epsilon, question.target.delta
    objective, n = question.described_objective, scheme.iterations
    privacy_loss = law(scheme).loss(strategy)
    exact = [bound for bound in privacy_loss.free_bounds() if bound.exact]
    if exact:
        sigma = exact[0].noise_multiplier(epsilon, delta)
    else:
        samples = _TIMES * privacy_loss.calibrate_samples * (4 if scheme.bins >= _MANY_BINS else 1)
        sigma = calibrate(privacy_loss, epsilon, delta, samples=samples, seed=_SEED).value
    rmse = float(np.asarray(query_error.rmse(objective.workload, strategy, n, sigma)))
    error = math.exp(float(np.asarray(objective.loss(n)(strategy, sigma))))
    return Score(sigma, error, rmse, choose(strategy, n).slots)
