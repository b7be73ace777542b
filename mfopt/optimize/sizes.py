"""Memory and time of an optimization, estimated before it starts.

The counts of memory were read off XLA's own account of the compiled programs (10 bins-by-epochs
sizes, most within a few percent) and off SciPy's L-BFGS-B; they are of float64 numbers. The time is
a rough one, from evaluations and certificates of 32 to 4,096 bins on two cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mfopt import strategies, words
from mfopt._runtime import _check, _sizes
from mfopt.accounting.monte_carlo import chunked, design_point, dominating_pair, nested
from mfopt.accounting.monte_carlo.protocol import SampledLoss
from mfopt.accounting.verify import MOST_WORK, SAMPLES
from mfopt.optimize import kinds
from mfopt.optimize.starts import Size
from mfopt.progress import Progress, Report
from mfopt.sampling import BinScheme
from mfopt.strategies import Strategy, time_scaled

_LONG = 120.0  # seconds worth telling of
_BASE = 2**29  # bytes: Python, JAX and what it compiles
_PAIRS = {True: 20, False: 8}  # of vectors kept by L-BFGS-B, for few and for many parameters
# Seconds on the two cores that the counts below were taken on: to compile, of an evaluation for
# each sample and bin, the same for each bin more, and likewise of a certificate.
_COMPILING, _EVALUATION, _PER_BIN, _CERTIFICATE, _MORE = 10.0, 1e-7, 1.2e-10, 1e-7, 1.6e-10
_USUAL, _USUAL_GROUPED = 60, 20  # evaluations after which most searches have ended
_PER_STEP = 1.2e-3  # of a search for each iteration of the run, between evaluations
_PER_OVERLAP = 5e-7  # of finding σ and its proposals, for each entry of G
_USUAL_PROOF = 2**16  # samples of a certificate of very many bins, its pilots among them
# Bins assigned more than once: of an evaluation and of a certificate for each sample, bin and
# assignment.
_CHAIN, _CHAIN_PROOF, _USUAL_CHAIN = 3e-7, 8e-8, 16


# Bins of a group at most. Where they are more the mean modes say too little of their bins: at
# 8 × 4,096, ε = 2, a search with groups of 32 ended 1.5% above the optimum for 1,024 bins stretched
# to as many, and of 16,384 it made a C whose σ it took for 11% less.
_MOST_GROUPED = 8


def searched(scheme: BinScheme) -> BinScheme:
    """The scheme, or one with fewer bins from whose optimum C is stretched."""
    return scheme.with_bins(min(scheme.bins, _MOST_GROUPED * design_point.MOST))


def _groups(scheme: BinScheme) -> int:
    """Number of modes that a search samples; neighbouring bins are grouped if there are many."""
    return -(-scheme.bins // -(-scheme.bins // design_point.MOST))


class Load(NamedTuple):
    """A C that is certified, and its search where it has one.

    Attributes:
      kind: of C. What it holds is read off its entry in :mod:`mfopt.optimize.kinds`, and off its
        class: one without modes of its own forms them from the n×n matrix.
      samples: frozen Monte Carlo samples; 0 for a C that is not optimized.
      bands, buffers: of kinds that have such a number.
      scaled: whether C is between two diagonals, which spares a BLT with many bins or epochs its
        modes.
    """

    kind: str
    samples: int = 0
    bands: int = 1
    buffers: int = 1
    scaled: bool = False


def memory(scheme: BinScheme, work: Load) -> float:
    """Bytes at the peak of optimizing and certifying a C.

    Raises:
      UsageError: an unknown kind, or one that cannot be optimized and has samples.
    """
    kind, samples, bands, buffers, scaled = work
    bins, epochs = scheme.bins, scheme.epochs
    n = float(bins) * epochs
    cls = strategies.registered()[kinds.check(kind)]
    whole = n * n if cls.modes is Strategy.modes else 0.0
    structured = _structured(kind, scheme, scaled)
    bytes_each = dominating_pair.STRUCTURED if structured else 12.0
    modes = 0.0 if structured else 2 * n * (bins + (epochs if scaled else 0))
    pair = modes + bytes_each * float(bins) ** 2 + 5 * whole
    # chunks of a certificate
    pair += chunked.MEMORY_BUDGET / 8
    if not samples:
        return _BASE + 8 * (pair + 30 * n)
    entry, size = kinds.find(kind), Size(bins * epochs, bins, bands, buffers)
    parameters = entry.parameters(size)
    if scheme.throws > 1:
        # normals of antithetic pairs in float32, samples in chunks; overlaps of an assignment
        search = samples * n / 2 + 6 * n * bins + entry.working(size)
        return 2 * _BASE + 8 * (search + (2 * _PAIRS[True] + 12) * parameters + 30 * n)
    group_count = _groups(scheme)
    search = (
        8 * float(samples) * group_count
        + 14 * float(group_count) ** 2
        + 4 * whole
        + entry.working(size)
    )
    if not structured and group_count < bins:
        search += 2 * n * bins + 4 * float(bins) ** 2
    driver = (2 * _PAIRS[parameters < 10**5] + 12) * parameters
    # the pair is made again while the search's vectors are held
    return _BASE + 8 * (max(search, pair) + driver + 30 * n)


def search_seconds(scheme: BinScheme, *, samples: int, evaluations: int) -> float:
    """A search under amplification, without compilation, where costs were measured.

    Args:
      scheme: bins and epochs; some hundred epochs hardly matter where bins are assigned once.
      samples: frozen Monte Carlo samples.
      evaluations: of the objective, at most.
    """
    bins = float(scheme.bins)
    if scheme.throws > 1:
        return min(evaluations, _USUAL_CHAIN) * samples * bins * scheme.throws * _CHAIN
    group_count = _groups(scheme)
    expected = min(evaluations, _USUAL_GROUPED if group_count < bins else _USUAL)
    between = _PER_STEP * searched(scheme).iterations if time_scaled.has_many_modes(scheme) else 0.0
    return expected * samples * group_count * (_EVALUATION + _PER_BIN * group_count) + between


def announce(
    scheme: BinScheme, searches: Sequence[Load], evaluations: Sequence[int], report: Report
) -> None:
    """Report the estimated time of searches, if it is long and there is no accelerator.

    Within a factor of three where it was compared; a busy or slower machine takes longer.

    Args:
      scheme: bins and epochs.
      searches: one after another; one C is certified then.
      evaluations: of the objective, at most, in each search.
      report: callback, called once; its note stays in view.
    """
    if jax.default_backend() != "cpu":
        return
    compiling = _COMPILING * (2 if scheme.throws > 1 else 1)
    total = max(_proof_seconds(scheme, work) for work in searches)
    for work, count in zip(searches, evaluations, strict=False):
        total += compiling + search_seconds(scheme, samples=work.samples, evaluations=count)
    if total >= _LONG:
        note = f"this may take about {words.duration(total)} on two cores"
        note += " (Ctrl-C keeps the best so far)"
        report(Progress("starting", note=note, lasting=True))


def _proof_seconds(scheme: BinScheme, work: Load) -> float:
    """A certificate's seconds, without compilation, where costs were measured."""
    bins = float(scheme.bins)
    if scheme.throws > 1:
        return SAMPLES * bins * scheme.throws * _CHAIN_PROOF
    if _structured(work.kind, scheme, work.scaled) and bins >= nested.LEAST:
        certified, row = _USUAL_PROOF, float(nested.per_row(scheme.bins))
    else:
        operations = scheme.bins * max(1, scheme.bins // design_point.MOST)
        certified = max(SampledLoss.least_samples, min(SAMPLES, MOST_WORK // operations))
        row = bins
    return certified * bins * (_CERTIFICATE + _MORE * row) + _PER_OVERLAP * bins**2


def require(scheme: BinScheme, work: Load) -> None:
    """Refuse an optimization that does not fit into the memory that is free.

    Raises:
      UsageError: with what would fit.
    """
    buffers, samples = work.buffers, work.samples
    size = Size(scheme.iterations, scheme.bins, work.bands, buffers)
    for name, count in (("bands", work.bands), ("buffers", buffers)):
        if count > scheme.iterations and (name == "bands" or _has_buffers(work.kind, size)):
            rule = f"is more than the run has iterations ({scheme.iterations})"
            raise _check.reject(name, count, rule, f"Use at most {scheme.iterations}.")

    def need(bins: int, samples: int = samples) -> float:
        bands = min(work.bands, bins * scheme.epochs)
        return memory(scheme.with_bins(bins), work._replace(samples=samples, bands=bands))

    if need(scheme.bins) <= _sizes.usable_memory():
        return
    # samples that no number of bins would leave room for are what is wrong
    if samples and need(1) > _sizes.free_memory() >= need(scheme.bins, 1):
        _sizes.require("samples", samples, lambda samples: need(scheme.bins, max(samples, 1)))
    _sizes.require("bins", scheme.bins, need)


def _structured(kind: str, scheme: BinScheme, scaled: bool) -> bool:
    """Return True if G comes from buffers and the modes are never formed."""
    return scaled and kind == "blt" and time_scaled.has_many_modes(scheme)


def _has_buffers(kind: str, size: Size) -> bool:
    """Return True if the number of buffers changes a C of this kind."""
    if kind not in kinds.names():
        return False
    parameters, larger = kinds.find(kind).parameters, size._replace(buffers=size.buffers + 1)
    return parameters(size) != parameters(larger)
