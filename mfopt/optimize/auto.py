"""Lowest error at (ε, δ) over sampling schemes and kinds of C, within a number of noise buffers.

Every search ends with an estimate of its RMSE, on the same fresh samples for all; the lowest is
certified, and the next one if that fails. Candidates are:

* balls-in-bins and fresh bins with the kinds of C that are searched there by default
  (:mod:`mfopt.optimize.defaults`), as large as the memory allows and pays,
* independent noise under both.

Kinds that regenerate past noise from the key are left out, as they pay in time, and so are schemes
under which a file cannot be executed with correlated noise of every kind here.
"""

from __future__ import annotations

import functools
import math
import time
from typing import Any, NamedTuple

import numpy as np

from mfopt._runtime import _check
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import Factorization
from mfopt.guarantee import CertificateKind
from mfopt.optimize import defaults, memory
from mfopt.optimize.objective import Loss, Objective
from mfopt.optimize.pipeline import Searched, Target, on_record
from mfopt.optimize.run import InterruptedOptimization, Optimized
from mfopt.progress import Progress, Report, silent, within
from mfopt.sampling import BallsInBins, BinScheme, FreshBins
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums, Workload

MEMORY = 15  # arrays, unless the caller names a number
MOST_CLEARED = 16  # arrays of a cleared BLT: 0.3% above a band of 127


class Tried(NamedTuple):
    """Outcome of a candidate's search.

    Attributes:
      candidate: what it was.
      scored: C with its estimated σ and RMSE, or None where ``problem`` says why not.
      seconds: wall time.
      problem: why it is out of the question.
    """

    candidate: memory.Candidate
    scored: memory.WithinMemory | None
    seconds: float = 0.0
    problem: str = ""

    @property
    def error(self) -> float:
        """Estimated error, of the kind that is minimized; infinite where there is none."""
        return math.inf if self.scored is None else self.scored.error

    def describe(self) -> dict[str, Any]:
        """Record of the outcome, JSON values only."""
        sampling, kind, size = self.candidate
        record: dict[str, Any] = {"sampling": sampling.describe(), "strategy": kind, "size": size}
        if self.scored is not None:
            record["estimated_error"] = self.scored.error
            record["estimated_rmse"] = self.scored.rmse
            record["estimated_noise_multiplier"] = self.scored.noise_multiplier
            record["memory"] = self.scored.memory
        if self.problem:
            record["problem"] = self.problem
        return {**record, "seconds": round(self.seconds, 3)}


def candidates(epochs: int, iters: int, epsilon: float, most: int) -> list[memory.Candidate]:
    """Candidates that keep at most ``most`` noise buffers (× model size), each after those it
    starts from.

    Args:
      epochs: E.
      iters: iterations of an epoch, b.
      epsilon: of the target.
      most: arrays that streaming the noise may keep.

    >>> [one.words() for one in candidates(4, 32, 2.0, 1)][2:]
    ['balls-in-bins, blt (1 buffers)', 'fresh-bins, cleared-blt (1 buffers)']
    """
    kept, afresh = BallsInBins(iters, epochs), FreshBins(iters, epochs)
    found = [memory.Candidate(kept, "identity"), memory.Candidate(afresh, "identity")]
    if most == 0:
        return found
    for scheme, largest in ((kept, defaults.buffers(kept)), (afresh, MOST_CLEARED)):
        buffers = min(most, largest)
        for kind in reversed(defaults.kinds(scheme, epsilon, buffers)):
            least, size = (2, min(most + 1, iters)) if kind == "banded-toeplitz" else (1, buffers)
            if size >= least:
                found.append(memory.Candidate(scheme, kind, size))
    return found


def least_error(
    epochs: int,
    iters: int,
    epsilon: float,
    delta: float = 1e-5,
    *,
    most: int = MEMORY,
    workload: Workload | None = None,
    loss: Objective | None = None,
    time_scale: bool = True,
    certify_samples: int | None = None,
    seed: int | None = None,
    certificate: CertificateKind = "monte-carlo",
    privacy_unit: str = "example",
    provenance: dict[str, Any] | None = None,
    progress: Report = silent,
) -> Factorization:
    """Return the certified mechanism of lowest estimated error, over schemes and forms of C.

    ``provenance["tried"]`` of the result says what was tried and what came of it; its ``sampling``
    is what must be executed. An interrupt (KeyboardInterrupt) keeps the best so far with an
    *estimate* for a guarantee; ``provenance["interrupted"]`` is then true.

    Args:
      epochs: passes over the data.
      iters: iterations of an epoch: the bins.
      epsilon, delta: add-remove target for one unit.
      most: noise buffers (× model size) that streaming may keep.
      workload: A; prefix sums by default.
      loss: the error that is minimized, by which mechanisms are ranked; "robust" by default.
      time_scale: whether C is put between two diagonals that vary with time.
      certify_samples, certificate: as for :func:`.factorize`.
      seed: pins all samples.
      privacy_unit: what the guarantee protects, by name.
      provenance: more to put on record.
      progress: callback for every evaluation, and in words of every candidate that is finished.

    Where nothing could be certified the best C is kept likewise, and
    ``provenance["not_certified"]`` says why.

    Raises:
      UsageError: an argument out of range.
      FailureError: nothing that was tried has an answer.
    """
    target = Target(
        epsilon, delta, privacy_unit, certify_samples, seed=seed, certificate=certificate
    )
    most = _check.integer("memory", most, at_least=0)
    workload, loss = workload or PrefixSums(), loss or Objective()
    wanted = candidates(epochs, iters, target.epsilon, most)
    memory.announce(wanted, time_scale, progress, "mechanisms")
    tried: list[Tried] = []
    unfinished: tuple[Optimized, BinScheme] | None = None
    interrupted = False
    blt: Strategy | None = None
    how: dict[str, Any] = {
        "workload": workload,
        "loss": loss,
        "time_scale": time_scale,
        "seed": seed,
    }
    certified_error = functools.partial(certified, loss.loss(workload, epochs * iters))
    for candidate in wanted:
        begun = time.perf_counter()
        told = within(memory.quiet(progress), candidate.words())
        found: Optimized | None = None
        try:
            found = candidate.search((epsilon, delta), blt, progress=told, **how)
            told(Progress("estimating its error on fresh samples"))
            scored = memory.scored(found, candidate.scheme, epsilon, delta, workload, loss)
        except KeyboardInterrupt as stop:
            interrupted = True
            best = stop.best if isinstance(stop, InterruptedOptimization) else found
            unfinished = None if best is None else (best, candidate.scheme)
            break
        except (UsageError, FailureError) as problem:
            # what one scheme or size has no answer for, the others may
            took = time.perf_counter() - begun
            tried.append(Tried(candidate, None, took, str(problem)))
        else:
            tried.append(Tried(candidate, scored, time.perf_counter() - begun))
            blt = found.strategy if candidate.kind == "blt" else blt
        progress(Progress(candidate.words(), note=_note(tried[-1]), lasting=True))
    ranked = sorted((one for one in tried if one.scored is not None), key=lambda one: one.error)
    chosen = [
        (one.scored.found, one.candidate.scheme, one.error)
        for one in ranked
        if one.scored is not None
    ]
    if unfinished is not None:
        # an unfinished search's own samples flatter it by next to nothing
        value = math.exp(unfinished[0].loss) if math.isfinite(unfinished[0].loss) else math.inf
        if not ranked or value < ranked[0].error:
            chosen.insert(0, (*unfinished, value))
    if not chosen:
        if interrupted:
            raise FailureError("interrupted before anything was tried; nothing to keep")
        raise FailureError("nothing that was tried has an answer: " + tried[-1].problem)
    record = {
        **(provenance or {}),
        "objective": loss.describe(),
        "tried": [one.describe() for one in tried],
        "at_most": most,
    }
    refused: list[str] = []
    kept: list[Factorization] = []
    proved: list[Factorization] = []
    for found, scheme, estimated in chosen:
        # a certificate may cost more than was estimated, up to all of the amplification
        if proved and not estimated < min(map(certified_error, proved)):
            break
        try:
            facts = {**record, **({"not_certified": list(refused)} if refused else {})}
            searched = Searched(found, scheme, facts, interrupted, keep=True)
            made = on_record(searched, target, workload, progress)
        except FailureError as problem:
            why = str(problem)
        else:
            if interrupted or made.provenance["interrupted"]:
                return min(proved, key=certified_error, default=made)
            if made.guarantee.status == "certified":
                proved.append(made)
                continue
            kept.append(made)
            why = made.not_certified
        refused.append(f"{scheme.kind}, {found.strategy.kind}: {why}")
        note = f"{refused[-1]} The next best is certified instead."
        progress(Progress("certifying", note=note, lasting=True))
    if proved or kept:
        return min(proved, key=certified_error, default=(kept or proved)[0])
    raise FailureError("nothing that was tried could be certified: " + refused[0])


def certified(loss: Loss, made: Factorization) -> float:
    """Error of a certified mechanism, of the kind that is minimized."""
    return math.exp(float(np.asarray(loss(made.strategy, made.noise_multiplier))))


def _note(one: Tried) -> str:
    if one.scored is None:
        return f"{one.candidate.words()}: left out: {one.problem}"
    scored = one.scored
    return (
        f"{one.candidate.words()}: RMSE {scored.rmse:.4g} at σ {scored.noise_multiplier:.4g}, "
        f"{scored.memory} buffers (estimated)"
    )
