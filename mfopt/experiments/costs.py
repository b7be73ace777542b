"""About how long the cells of a comparison take on a CPU: told before the work.

Fitted to cells of 2 × 8, 8 × 32 and 16 × 128 on two cores; right within a factor of about three for
a sweep, and a busy machine takes longer. A cell that is in the cache costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mfopt._runtime import _sizes
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.experiments.mechanisms import (
    SAMPLED,
    AmplifiedCell,
    FixedCell,
    SigmaCell,
    UnamplifiedCell,
)
from mfopt.experiments.published import PublishedCell
from mfopt.optimize import kinds, sizes

# Seconds on the two cores that costs were measured on.
_SEARCH, _ESTIMATE = 5.0, 1.0  # to compile a program of one
_ACCOUNT = 0.3  # of σ without samples
_ROOT = 2  # Monte Carlo evaluations behind a σ
_TUNED = 12  # values of an exponent that are tried
_TANGENTS = 15  # evaluations of most searches by tangents
_GENERAL = 20  # of most for general C, which end where a round gains nothing
_MANY = 2.0  # a search in as many numbers as there are steps, over one in a few
_FIXED_ORDER = 75  # evaluations of a search without amplification
_BANDED, _CUBE = 3e-6, 2e-10  # of such an evaluation: for n (1 + (bands / 30)²), and for n³


def seconds(missing: Iterable[Any]) -> float | None:
    """Seconds of one process for these cells; None where one is of a kind that nobody measured."""
    total = 0.0
    programs: set[tuple[Any, ...]] = set()
    for cell in missing:
        match cell:
            case FixedCell():
                pass
            case PublishedCell(goal=goal):
                total += _TUNED * sizes.search_seconds(
                    goal.bin_scheme(), samples=2**10, evaluations=_ROOT
                )
                programs.add((_ESTIMATE, goal.sampling, "published", goal.bins))
            case UnamplifiedCell():
                total += _unamplified(cell)
            case AmplifiedCell(goal=goal):
                total += _amplified(cell)
                shape = goal.bins, cell.bands
                programs.add((_SEARCH, goal.sampling, cell.kind, cell.scaled, *shape))
            case SigmaCell(goal=goal, source=source):
                total += _sigma(cell)
                form: tuple[Any, ...] = source.kind, getattr(source, "scaled", None)  # type: ignore[attr-defined]
                programs.add((_ESTIMATE, goal.sampling, *form, goal.bins))
            case _:
                return None
    return _sizes.on_this_machine(total + sum(program[0] for program in programs))


def _amplified(cell: AmplifiedCell) -> float:
    entry, goal = kinds.find(cell.kind), cell.goal
    n, scheme = goal.iterations, goal.bin_scheme()
    size = kinds.Size(n, goal.bins, max(cell.bands, 1), max(cell.buffers, 1))
    is_high_dimensional = entry.parameters(size) >= n - 1
    if cell.scaled:
        entry = kinds.scaled(entry)
    evaluations = min(entry.steps, _TANGENTS if entry.tangents else _GENERAL)
    enough = law(scheme).enough_samples(entry.parameters(size))
    samples = cell.samples or int(min(entry.samples, enough))
    search = sizes.search_seconds(scheme, samples=samples, evaluations=evaluations)
    factorizations = evaluations * _CUBE * float(n) ** 3 if cell.kind == "dense" else 0.0
    return search * (_MANY if is_high_dimensional else 1.0) + factorizations


def _unamplified(cell: UnamplifiedCell) -> float:
    n = float(cell.bins * cell.epochs)
    if cell.kind == "dense":
        return _FIXED_ORDER * _CUBE * n**3
    if cell.kind == "banded":
        return _FIXED_ORDER * _BANDED * n * (1 + (cell.bands / 30) ** 2)
    return _SEARCH  # compilation is most of it


def _sigma(cell: SigmaCell) -> float:
    goal = cell.goal
    if goal.sampling not in SAMPLED:
        return _ACCOUNT
    return sizes.search_seconds(goal.bin_scheme(), samples=cell.samples, evaluations=_ROOT)
