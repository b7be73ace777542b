"""Comparison of mechanisms: σ, RMSE and memory at each ε, and improvements with error bars.

A *family* is what a user chooses between (:mod:`mfopt.experiments.families`). Where it has a size
(bands), each point takes the size with the least RMSE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mfopt._runtime import _check, _sizes
from mfopt._runtime._types import JsonObject
from mfopt.experiments import families, tables
from mfopt.experiments.cache import Cache
from mfopt.experiments.families import Comparison as Comparison
from mfopt.experiments.mechanisms import POISSON, UNAMPLIFIED, SigmaCell, measured
from mfopt.experiments.runner import run_all, usual_jobs
from mfopt.factorization import load
from mfopt.progress import Report, silent

DEFAULT_BASELINE = "banded+poisson"
Z95 = 1.959964
AS_STATED = "as stated"
_SAMPLING = {"fixed-order": UNAMPLIFIED, "cyclic-poisson": POISSON}  # schemes of another name


class Row(NamedTuple):
    """One mechanism at one ε.

    Attributes:
      family: by name, see :mod:`mfopt.experiments.families`, or path of a file.
      epsilon: of (ε, δ)-DP, add-remove adjacency, one unit.
      size: bands or buffers, 0 where there is none; the best of those tried.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      rmse: per coordinate, in clip norms.
      relative_error: standard error of σ (and RMSE) over it, from Monte Carlo; 0 if exact.
      memory: noise buffers (× model size) that streaming the noise keeps from step to step.
      status: of σ: "exact", "bound" or "estimate"; of a file "certified" if its guarantee was
        proved on this machine, otherwise "as stated".
      draws: model-sized white draws that one step makes, mean over the run: more than 1 where past
        ones are regenerated instead of kept.
      above_floor: part by which RMSE at epochs' ends is above its lower bound for any C and any
        sampling, where one is known (:mod:`mfopt.floor`).
      final_model_error: noise multiplier of independent noise that disturbs the final model as
        much (:mod:`mfopt.final_model`).
      sampling: as in :class:`mfopt.experiments.families.Family`; of a file with a scheme of
        another name, that name.
    """

    family: str
    epsilon: float
    size: int
    noise_multiplier: float
    rmse: float
    relative_error: float
    memory: int
    status: str
    draws: float = 1.0
    above_floor: float | None = None
    final_model_error: float | None = None
    sampling: str = ""

    @property
    def bands(self) -> int:
        """Bands of C where there is a choice of them, otherwise 0."""
        return self.size if self.size and families.find(self.family).bands else 0

    @property
    def label(self) -> str:
        """Label for readers; marked where the guarantee is a file's word."""
        return families.label(self.family) + f" ({AS_STATED})" * (self.status == AS_STATED)


def is_file(name: str) -> bool:
    """Whether ``name`` is that of a file, not of a family."""
    return name.endswith(".npz")


def row_of_file(setting: Comparison, path: str) -> Row:
    """Row of the mechanism that a file holds, at the σ that it states.

    Raises:
      UsageError: its shape, ε, δ, group size, adjacency or workload is not what is compared.
      FailureError: the file cannot be read, or its guarantee is false.
    """
    factorization = load(_check.file("include", path))
    scheme, stated = factorization.sampling, factorization.guarantee
    share = scheme.expected_share
    shape = f"{scheme.length * share:.9g} × {1 / share:.9g}"
    facts: dict[str, tuple[object, Sequence[object]]] = {
        "epochs × iterations": (shape, [f"{setting.epochs} × {setting.bins}"]),
        "ε": (stated.epsilon, setting.epsilons),
        "δ": (stated.delta, [setting.delta]),
        "group size": (stated.group_size, [1]),
        "adjacency": (stated.adjacency, ["add-remove"]),
        "workload": (factorization.workload.kind, ["prefix"]),
    }
    for name, (value, compared) in facts.items():
        if value not in compared:
            rule = f"its {name} is {value}, what is compared has {' or '.join(map(str, compared))}"
            raise _check.reject("include", path, rule, "Compare what is alike.")
    return Row(
        path,
        size=0,
        epsilon=stated.epsilon,
        relative_error=0.0,
        status="certified" if factorization.proved_here else AS_STATED,
        sampling=_SAMPLING.get(scheme.kind, scheme.kind),
        **measured(factorization.strategy, scheme, stated),
    )


def plan(setting: Comparison) -> dict[tuple[str, float], list[tuple[int, SigmaCell]]]:
    """Candidate sizes with the cell of their σ, for each family and ε."""
    setting.check()
    return {
        (family, epsilon): candidates
        for family in setting.include
        for epsilon in setting.epsilons
        if (candidates := families.find(family).candidates(setting, epsilon))
    }


def best(sizes: Mapping[tuple[str, float], Sequence[Row]]) -> list[Row]:
    """The row of least RMSE of each family and ε."""
    return [min(rows, key=lambda row: row.rmse) for rows in sizes.values()]


def every_size(
    setting: Comparison, cache: Cache, *, jobs: int | None = None, progress: Report = silent
) -> dict[tuple[str, float], list[Row]]:
    """Rows for every size that was tried, by family and ε.

    Args:
      setting: what is compared, and where.
      cache: where finished cells are kept.
      jobs: worker processes; by default one for every two cores, as far as the memory goes.
      progress: callback for each finished cell.

    Raises:
      UsageError: more processes than have room in memory.
    """
    planned = plan(setting)
    cells = [cell for candidates in planned.values() for _, cell in candidates]
    bytes_each = families.memory(setting)
    if jobs is None:
        jobs = min(usual_jobs(), max(int(_sizes.usable_memory() // bytes_each), 1))
    elif missing := [cell for cell in cells if not cache.has(cell)]:
        processes = min(_check.integer("jobs", jobs), len(missing))
        _sizes.require("jobs", processes, lambda jobs: jobs * bytes_each)
    results = run_all(cells, cache, jobs=jobs, progress=progress)
    names = {*Row._fields} - {"family", "epsilon", "size", "sampling"}
    return {
        key: [
            Row(
                *key,
                size,
                sampling=cell.goal.sampling,
                **{n: results[cell].record[n] for n in names},
            )
            for size, cell in candidates
        ]
        for key, candidates in planned.items()
    }


class _Change(NamedTuple):
    """Percent by which RMSE is below a baseline's, with a 95% interval (Monte Carlo error)."""

    percent: float
    low: float
    high: float


def improvement(row: Row, baseline: Row) -> _Change:
    """100 (1 - RMSE / RMSE of the baseline); both errors count, as independent."""
    ratio = row.rmse / baseline.rmse
    spread = Z95 * math.hypot(row.relative_error, baseline.relative_error)
    return _Change(*(100 * (1 - ratio * end) for end in (1, 1 + spread, 1 - spread)))


def improvements(rows: Sequence[Row], baseline: str) -> dict[tuple[str, float], _Change]:
    """Improvement of each row over ``baseline`` at the same ε, where the baseline has one."""
    table = {(row.family, row.epsilon): row for row in rows}
    return {
        key: improvement(row, table[baseline, row.epsilon])
        for key, row in table.items()
        if (baseline, row.epsilon) in table
    }


def number(value: float) -> str:
    """An RMSE as tables print it."""
    return f"{value:.2f}" if 0.01 <= value < 1e6 else f"{value:.3g}"


def csv_text(rows: Sequence[Row], baseline: str | None = None) -> str:
    """CSV of the rows, with the improvement over ``baseline`` if given."""
    entries: list[JsonObject] = [row._asdict() for row in rows]
    if baseline:
        gains = improvements(rows, baseline)
        for row, entry in zip(rows, entries, strict=True):
            gain = gains.get((row.family, row.epsilon), ("", "", ""))
            entry |= {f"improvement_{k}": v for k, v in zip(_Change._fields, gain, strict=True)}
    return tables.csv_of_rows(entries)


def described(setting: Comparison, rows: Sequence[Row], baseline: str | None = None) -> JsonObject:
    """JSON-able description of the rows and the setting."""
    gains = improvements(rows, baseline) if baseline else {}
    entries: list[JsonObject] = [row._asdict() for row in rows]
    for row, entry in zip(rows, entries, strict=True):
        if gain := gains.get((row.family, row.epsilon)):
            entry["improvement"] = gain._asdict()
    return {
        "bins": setting.bins,
        "epochs": setting.epochs,
        "delta": setting.delta,
        "seed": setting.seed,
        "samples": setting.samples,
        "baseline": baseline,
        "adjacency": "add-remove",
        "workload": "prefix sums",
        "units": "RMSE per coordinate in clip norms; sigma relative to the clip norm",
        "rows": entries,
    }
