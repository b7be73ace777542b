"""What accountants answered, as a table and as a figure; nothing rounded towards less privacy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfopt import words
from mfopt.experiments import plots

Row = dict[str, Any]
_NOISE_UNIT = "× clip norm, for C as stored"
_ROUNDED_UP = ("epsilon", "delta", "noise_multiplier")
_LABELS = {"epsilon": "ε", "delta": "δ", "noise_multiplier": "noise multiplier σ"}


def described(row: Row) -> list[tuple[str, str]]:
    """One answer: names and values."""
    sigma = _up(row["noise_multiplier"])
    rows = [
        ("ε", _up(row["epsilon"])),
        ("δ", _up(row["delta"])),
        ("noise multiplier σ", f"{sigma}  ({row.get('noise_unit', _NOISE_UNIT)})"),
        ("protects", protects(row)),
        ("status", _status(row)),
        ("method", row["method"]),
    ]
    return [(name, value) for name, value in rows if value]


def table(results: Sequence[Row], swept: str | None) -> tuple[list[str], list[list[str]]]:
    """Names of the columns and cells of several answers."""
    names = [swept] if swept else []
    shown = [*_ROUNDED_UP, "method", "status"]
    names += [name for name in shown if name not in names]
    return names, [[_cell(row, name) for name in names] for row in results]


def protects(row: Row, swept: str | None = None) -> str:
    """Whom the statement protects, and how neighbours differ."""
    group = "group_size" if swept == "group_size" else row["group_size"]
    what = row["privacy_unit"] if group == 1 else f"groups of {group} {row['privacy_unit']}s"
    return f"{what}, {row['adjacency']} adjacency"


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if name == "status" and math.isinf(max(row["epsilon"], row["noise_multiplier"])):
        return "no answer"
    if isinstance(value, float):
        return _up(value) if name in _ROUNDED_UP else f"{value:g}"
    return str(value)


def _up(value: float) -> str:
    return "beyond numerical range" if math.isinf(value) else words.round_up(value, 6)


def _status(row: Row) -> str:
    said = {
        "exact": "exact up to discretization, rounded up",
        "certified": f"certified; fails with probability <= {row['failure_probability']:.1e}, "
        "counted inside δ",
        "bound": "an upper bound",
        "estimate": "an ESTIMATE: proves nothing",
    }
    return said.get(row["status"], str(row["status"]))


def draw(results: Sequence[Row], swept: str, title: str, path: Path) -> Path:
    """What was solved for against what was swept, one line for each method, as a file.

    Args:
      results: what was solved for, one entry for each method and value.
      swept: name of the argument on the horizontal axis.
      title: heading.
      path: file to write.
    """
    of_swept = {"eps": "epsilon"}.get(swept, swept)
    varying = [
        name for name in _ROUNDED_UP if name != of_swept and len({row[name] for row in results}) > 1
    ]
    solved = varying[0] if varying else "epsilon"
    finite = [row for row in results if math.isfinite(row[solved])]
    curves = []
    if len({row[swept] for row in results}) == len(results) and len(_methods(finite)) > 1:
        # one answer for each point, by different methods: joined into one
        curves.append(_curve("all", finite, swept, solved))
    for method in _methods(finite):
        curves.append(_curve(method, [r for r in finite if r["method"] == method], swept, solved))
    panel = plots.Panel(
        curves,
        title,
        swept.replace("_", " "),
        _LABELS[solved],
        log_x=_spans(results, swept, 30),
        log_y=_spans(finite, solved, 30),
    )
    return plots.write_figure(plots.draw([panel]), path)


def draw_values(results: Sequence[Row], swept: str, shown: str, title: str, path: Path) -> Path:
    """One value against what was swept, as a file.

    Args:
      results: an entry for each value of ``swept``.
      swept, shown: names of the arguments on the horizontal and on the vertical axis.
      title: heading.
      path: file to write.
    """
    panel = plots.Panel(
        [_curve(shown.replace("_", " "), results, swept, shown)],
        title,
        swept.replace("_", " "),
        shown.replace("_", " "),
        log_x=_spans(results, swept, 30),
        log_y=_spans(results, shown, 30),
    )
    return plots.write_figure(plots.draw([panel]), path)


def draw_run(results: Sequence[Row], ends: Sequence[int], path: Path) -> Path:
    """What a run has cost after so many iterations, as a file; a point holds up to itself.

    Args:
      results: what holds after each number of ``iterations``.
      ends: iterations after which a phase ended and another began.
      path: file to write.
    """
    solved = "delta" if len({row["epsilon"] for row in results}) == 1 else "epsilon"
    finite = [row for row in results if math.isfinite(row[solved])]
    pieces = [0, *ends, max(row["iterations"] for row in results)]
    curves = []
    for number, (first, last) in enumerate(itertools.pairwise(pieces), 1):
        label = "the run" if len(pieces) == 2 else f"phase {number}"
        begun = [row for row in finite if row["iterations"] <= first][-1:]
        part = begun + [row for row in finite if first < row["iterations"] <= last]
        nothing = [] if begun else [0]
        at = nothing + [row["iterations"] for row in part]
        value = nothing + [row[solved] for row in part]
        curves.append(plots.Curve(label, at, value, steps=True))
    given = "epsilon" if solved == "delta" else "delta"
    panel = plots.Panel(
        curves,
        f"{_LABELS[solved]} over the run at {_LABELS[given]} = {results[0][given]:g}",
        "iterations done",
        _LABELS[solved],
        log_x=False,
        log_y=False,
    )
    return plots.write_figure(plots.draw([panel]), path)


def _spans(rows: Sequence[Row], name: str, factor: float) -> bool:
    """Whether values cover so much that a logarithmic axis shows them better."""
    values = [row[name] for row in rows if row[name] > 0]
    return len(values) == len(rows) > 0 and max(values) > factor * min(values)


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _curve(label: str, rows: Sequence[Row], swept: str, solved: str) -> plots.Curve:
    return plots.Curve(label, [row[swept] for row in rows], [row[solved] for row in rows])
