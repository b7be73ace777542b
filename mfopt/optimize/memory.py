"""The least error within so many model-sized arrays of noise memory, and what one array is worth.

A BLT keeps one array for each buffer and is near its optimum with a few; with a wave it begins to
pay at four, the more the larger ε is, and cyclic blocks go on from five; a banded Toeplitz C keeps
one array for each band but the first and needs many. Strategies that make past draws again instead
of keeping them are no candidates: they pay in time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mfopt import _check, query_error
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import calibrate
from mfopt.noise.choice import choose
from mfopt.optimize.run import InterruptedOptimization, Optimized, optimize
from mfopt.optimize.time_scale import Scaling
from mfopt.progress import Report, silent
from mfopt.sampling import BinScheme
from mfopt.strategies import Identity, Strategy
from mfopt.workloads import PrefixSums, Workload

MOST_BUFFERS = 6  # of a BLT: at 8 × 32 four are at most 0.2% better than two
FEWEST_WAVE = 4  # one exponential and the three arrays of a wave
FEWEST_BLOCKS, MOST_BLOCKS = 5, 9  # arrays of cyclic blocks
_FEWEST_BANDS = 9  # a few bands see a few steps, a BLT of as many arrays the whole run
_SAMPLES = 2**15
_SEED = 1  # of the samples that options are compared on: the same for all

_INDEPENDENT = Optimized(Identity(), np.nan, np.nan, "nothing to optimize", np.zeros((0, 3)), 0.0)


class WithinMemory(NamedTuple):
    """What is best with a number of arrays.

    Attributes:
      memory: model-sized arrays that streaming its noise keeps.
      found: C, and the search that found it.
      noise_multiplier: σ, estimated on samples that no search has seen; not certified.
      rmse: of prefix sums or the workload's queries, in clip norms per coordinate; estimated too.
    """

    memory: int
    found: Optimized
    noise_multiplier: float
    rmse: float


@float64
def options(
    scheme: BinScheme,
    epsilon: float,
    delta: float,
    memory: int,
    *,
    workload: Workload | None = None,
    time_scale: bool | Scaling = True,
    seed: int | None = None,
    progress: Report = silent,
) -> dict[int, WithinMemory]:
    """The best C with at most ``memory`` arrays, with one fewer and with one more, by that bound.

    Args:
      scheme: bins and epochs.
      epsilon, delta: add-remove target for one unit.
      memory: model-sized arrays, 0 or more; with 0 there is independent noise only.
      workload: A; prefix sums by default.
      time_scale: whether C is put between two diagonals that vary with time.
      seed: pins the searches' samples.
      progress: told of every evaluation.

    Raises:
      UsageError: an argument out of range.
      InterruptedOptimization: at a KeyboardInterrupt, with the best C so far.
    """
    memory = _check.integer("memory", memory, at_least=0)
    workload = workload or PrefixSums()
    found: dict[int, WithinMemory] = {}
    blt: Optimized | None = None
    wave: Optimized | None = None
    blocks: Optimized | None = None

    def search(kind: str, init: Optimized | None, *, buffers: int = 1, bands: int = 1) -> Optimized:
        return optimize(
            scheme,
            epsilon,
            delta,
            strategy=kind,
            buffers=buffers,
            bands=bands,
            workload=workload,
            time_scale=time_scale,
            seed=seed,
            init=None if init is None else init.strategy,
            progress=progress,
        )

    try:
        for bound in range(max(memory - 1, 0), memory + 2):
            made = []
            buffers, bands = min(bound, MOST_BUFFERS), min(bound + 1, scheme.iterations)
            if not bound:
                nothing = np.zeros((0, 3))
                made.append(
                    Optimized(Identity(), np.nan, np.nan, "nothing to optimize", nothing, 0.0)
                )
            elif blt is None or buffers > _memory(blt.strategy, scheme):
                # from one buffer fewer, where that is known: more memory cannot be worse
                blt = search("blt", blt, buffers=buffers)
                made.append(blt)
            if bound >= FEWEST_WAVE and (wave is None or buffers > _memory(wave.strategy, scheme)):
                wave = search("wave-blt", None, buffers=buffers)
                made.append(wave)
            wanted = min(bound, MOST_BLOCKS, scheme.bins + 1)
            if wanted >= FEWEST_BLOCKS and (
                blocks is None or wanted > _memory(blocks.strategy, scheme)
            ):
                blocks = search("cyclic-blocks", None, buffers=wanted)
                made.append(blocks)
            if bands >= _FEWEST_BANDS:
                made.append(search("banded-toeplitz", blt, bands=bands))
            tried = [scored(one, scheme, epsilon, delta, workload) for one in made]
            earlier = [found[bound - 1]] if bound - 1 in found else []
            found[bound] = min([*earlier, *tried], key=lambda option: option.rmse)
    except KeyboardInterrupt as stop:
        fits = [option for bound, option in found.items() if bound <= memory]
        best = stop.best if isinstance(stop, InterruptedOptimization) else None
        if not fits or (best is not None and _memory(best.strategy, scheme) <= memory):
            raise
        raise InterruptedOptimization(min(fits, key=lambda option: option.rmse).found) from stop
    return found


def _memory(strategy: Strategy, scheme: BinScheme) -> int:
    return choose(strategy, scheme.iterations).slots


@float64
def scored(
    one: Optimized, scheme: BinScheme, epsilon: float, delta: float, workload: Workload
) -> WithinMemory:
    """σ and RMSE of a search's C, exact or on samples that it has not seen; the same for all.

    Args:
      one: the search's result.
      scheme: bins and epochs.
      epsilon, delta: add-remove target for one unit.
      workload: A.
    """
    loss = law(scheme).loss(one.strategy)
    exact = [bound for bound in loss.free_bounds() if bound.exact]
    sigma = (
        exact[0].noise_multiplier(epsilon, delta)
        if exact
        else calibrate(loss, epsilon, delta, samples=_SAMPLES, seed=_SEED).noise_multiplier
    )
    rmse = float(np.asarray(query_error.rmse(workload, one.strategy, scheme.iterations, sigma)))
    return WithinMemory(_memory(one.strategy, scheme), one, sigma, rmse)
