"""Lowest error within a number of noise buffers (× model size), and the value of one more buffer.

A BLT keeps one array for each buffer and is near its optimum with a few; with a wave it begins to
pay at four, the more the larger ε is; a banded Toeplitz C keeps
one array for each band but the first and needs many. Strategies that regenerate past noise from
the key are not candidates: they pay in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from mfopt import query_error
from mfopt._runtime import _check, _sizes
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.noise.choice import choose
from mfopt.optimize import kinds, sizes, starts
from mfopt.optimize.objective import Objective
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.progress import Progress, Report, silent, within
from mfopt.sampling import BinScheme
from mfopt.strategies import Identity, Strategy
from mfopt.workloads import PrefixSums, Workload

MOST_BUFFERS = 6  # of a BLT: at 8 × 32 four are at most 0.2% better than two
# A few bands see a few steps, a BLT of as many arrays the whole run. At 8 × 32 half an epoch's
# bands are no better than four buffers at ε = 1 and 12% worse at 16, a quarter 2% and 39% worse.
_FEWEST_BANDS, _LEAST_SHARE = 9, 0.5
_SAMPLES = 2**15
# Bins from which on four times as many are taken, of all C: with 512 a few samples weigh most, and
# the standard error of σ over σ was 0.012 at 4 × 512, ε = 2, where the best C are 0.001 apart.
_MANY_BINS = 512
_SEED = 1  # of the samples that options are compared on: the same for all


class WithinMemory(NamedTuple):
    """Best result within a number of noise buffers.

    Attributes:
      memory: noise buffers (× model size) that streaming keeps.
      found: C, and the search that found it.
      noise_multiplier: σ, estimated on samples that no search has seen; not certified.
      error: the error that was minimized, estimated too; the lowest is the best.
      rmse: of prefix sums or the workload's queries, in clip norms per coordinate; estimated too.
    """

    memory: int
    found: Optimized
    noise_multiplier: float
    error: float
    rmse: float


class Candidate(NamedTuple):
    """A scheme, a kind of C and a size to search.

    Attributes:
      scheme: who takes part when.
      kind: of C.
      size: buffers or bands; 0 where there are none.
    """

    scheme: BinScheme
    kind: str
    size: int = 0

    def words(self) -> str:
        """Short description for a line of progress."""
        noun = "bands" if self.kind == "banded-toeplitz" else "buffers"
        size = f" ({self.size} {noun})" if self.size else ""
        return f"{self.scheme.kind}, {self.kind}{size}"

    def search(
        self, target: tuple[float, float], blt: Strategy | None, *, time_scale: Any, **how: Any
    ) -> Optimized:
        """Search it.

        Args:
          target: ε and δ.
          blt: what a BLT of more buffers or a banded C starts from, where one is known.
          time_scale: whether C is put between two diagonals, where its kind can be.
          how: ``workload``, ``loss``, ``seed`` and ``progress`` of
            :func:`mfopt.optimize.optimize`.
        """
        if self.kind == "identity":
            return Optimized(Identity())
        banded = self.kind == "banded-toeplitz"
        return optimize(
            self.scheme,
            *target,
            strategy=self.kind,
            buffers=1 if banded else self.size,
            bands=self.size if banded else 1,
            time_scale=time_scale if kinds.find(self.kind).scalable else False,
            init=blt if banded or self.kind == "blt" else None,
            **how,
        )


def wanted(scheme: BinScheme, memory: int) -> dict[Candidate, int]:
    """Searches for ``memory`` noise buffers, one fewer and one more, each with the least of these.

    Args:
      scheme: bins and epochs.
      memory: noise buffers (× model size).

    >>> from mfopt.sampling import BallsInBins
    >>> [(one.kind, one.size) for one in wanted(BallsInBins(bins=32, epochs=8), 4)]
    [('blt', 3), ('blt', 4), ('wave-blt', 4), ('blt', 5)]
    """
    bands = max(_FEWEST_BANDS, int(_LEAST_SHARE * scheme.bins) + 1)
    n = scheme.iterations  # no kind has more buffers
    found: dict[Candidate, int] = {}
    for bound in range(max(memory - 1, 0), memory + 2):
        for kind, size, least in (
            ("blt", min(bound, MOST_BUFFERS, n), 1),
            ("wave-blt", min(bound, starts.FEWEST_WAVE, n), starts.FEWEST_WAVE),
            ("banded-toeplitz", min(bound + 1, n), bands),
        ):
            if size >= least:
                found.setdefault(Candidate(scheme, kind, size), bound)
    return found


@float64
def options(
    scheme: BinScheme,
    epsilon: float,
    delta: float,
    memory: int,
    *,
    workload: Workload | None = None,
    loss: Objective | None = None,
    time_scale: bool = True,
    seed: int | None = None,
    progress: Report = silent,
) -> dict[int, WithinMemory]:
    """Best C with at most ``memory`` noise buffers, one fewer and one more, by that limit.

    Args:
      scheme: bins and epochs.
      epsilon, delta: add-remove target for one unit.
      memory: noise buffers (× model size), 0 or more; with 0 there is independent noise only.
      workload: A; prefix sums by default.
      loss: the error that is minimized; "robust" by default.
      time_scale: whether C is put between two diagonals that vary with time.
      seed: pins the searches' samples.
      progress: callback for every evaluation.

    Raises:
      UsageError: an argument out of range.
      InterruptedOptimization: at a KeyboardInterrupt, with the best C so far.
    """
    memory = _check.integer("memory", memory, at_least=0)
    workload, loss = workload or PrefixSums(), loss or Objective()
    every = wanted(scheme, memory)
    announce(every, time_scale, progress, "searches")
    found: dict[int, WithinMemory] = {}
    blt: Strategy | None = None
    target = scheme, epsilon, delta, workload, loss
    how: dict[str, Any] = {
        "workload": workload,
        "loss": loss,
        "time_scale": time_scale,
        "seed": seed,
    }
    try:
        for bound in range(max(memory - 1, 0), memory + 2):
            tried = [] if bound else [scored(Optimized(Identity()), *target)]
            for one, least in every.items():
                if least == bound:
                    told = within(quiet(progress), one.words())
                    # from one buffer fewer: more memory cannot be worse
                    made = one.search((epsilon, delta), blt, progress=told, **how)
                    blt = made.strategy if one.kind == "blt" else blt
                    tried.append(scored(made, *target))
                    note = f"{one.words()}: RMSE {tried[-1].rmse:.5g} (estimated)"
                    progress(Progress(one.words(), note=note, lasting=True))
            earlier = [found[bound - 1]] if bound - 1 in found else []
            found[bound] = min([*earlier, *tried], key=lambda option: option.error)
    except KeyboardInterrupt as stop:
        fits = [option for bound, option in found.items() if bound <= memory]
        best = stop.best if isinstance(stop, InterruptedOptimization) else None
        if not fits or (best is not None and _memory(best.strategy, scheme) <= memory):
            raise
        raise InterruptedOptimization(min(fits, key=lambda option: option.error).found) from stop
    return found


def announce(wanted: Collection[Candidate], time_scale: bool, progress: Report, noun: str) -> None:
    """Report the estimated time of several searches, before the first.

    Args:
      wanted: each of them; independent noise takes none.
      time_scale: whether C is put between two diagonals, where its kind can be.
      progress: told once.
      noun: what the searches are called.
    """
    total = 0.0
    for scheme, kind, _ in wanted:
        if kind != "identity":
            entry = kinds.find(kind)
            total += sizes.seconds(
                scheme,
                kind=kind,
                scaled=time_scale and entry.scalable,
                samples=entry.samples,
                evaluations=entry.steps,
            )
    _sizes.announce(total, progress, work=f"{len(wanted)} {noun}", note="Ctrl-C keeps the best")


def quiet(progress: Report) -> Report:
    """Suppress a search's own time estimate, as part of the whole's."""

    def report(event: Progress) -> None:
        if not (event.lasting and event.stage == "starting"):
            progress(event)

    return report


def _memory(strategy: Strategy, scheme: BinScheme) -> int:
    return choose(strategy, scheme.iterations).slots


@float64
def scored(
    one: Optimized,
    scheme: BinScheme,
    epsilon: float,
    delta: float,
    workload: Workload,
    loss: Objective,
) -> WithinMemory:
    """σ and RMSE of a search's C, exact or on the same fresh samples for all C of a scheme.

    How many samples depends on the scheme alone: C that are compared must share them.

    Args:
      one: the search's result.
      scheme: bins and epochs.
      epsilon, delta: add-remove target for one unit.
      workload: A.
      loss: the error that was minimized.
    """
    privacy_loss = law(scheme).loss(one.strategy)
    exact = [bound for bound in privacy_loss.free_bounds() if bound.exact]
    if exact:
        sigma = exact[0].noise_multiplier(epsilon, delta)
    else:
        usual = _SAMPLES * (4 if scheme.bins >= _MANY_BINS else 1)
        sigma = calibrate(privacy_loss, epsilon, delta, samples=usual, seed=_SEED).noise_multiplier
    n = scheme.iterations
    rmse = float(np.asarray(query_error.rmse(workload, one.strategy, n, sigma)))
    error = math.exp(float(np.asarray(loss.loss(workload, n)(one.strategy, sigma))))
    return WithinMemory(_memory(one.strategy, scheme), one, sigma, error, rmse)
