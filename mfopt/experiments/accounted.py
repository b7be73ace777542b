"""What accountants answered, as a table and as a figure; nothing rounded towards less privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfopt import words
from mfopt.experiments import plots

Row = dict[str, Any]
_NOISE_UNIT = "× clip norm, for C as stored"
_ROUNDED_UP = ("epsilon", "delta", "noise_multiplier")


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
    labels = {"epsilon": "ε", "delta": "δ", "noise_multiplier": "noise multiplier σ"}
    finite = [row for row in results if math.isfinite(row[solved])]
    curves = []
    if len({row[swept] for row in results}) == len(results) and len(_methods(finite)) > 1:
        # one answer for each point, by different methods: joined into one
        curves.append(_curve("all", finite, swept, solved))
    for method in _methods(finite):
        curves.append(_curve(method, [r for r in finite if r["method"] == method], swept, solved))
    at = [row[swept] for row in results]
    values = [row[solved] for row in finite if row[solved] > 0]
    panel = plots.Panel(
        curves,
        title,
        swept.replace("_", " "),
        labels[solved],
        log_x=min(at) > 0 and max(at) > 100 * min(at),
        log_y=bool(values) and max(values) > 30 * min(values),
    )
    return plots.write_figure(plots.draw([panel]), path)


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _curve(label: str, rows: Sequence[Row], swept: str, solved: str) -> plots.Curve:
    return plots.Curve(label, [row[swept] for row in rows], [row[solved] for row in rows])
