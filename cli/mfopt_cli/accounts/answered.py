"""Table and figure of accountants' answers; nothing rounded towards less privacy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfopt import words
from mfopt.experiments import plots
from mfopt.experiments.plots import Curve

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
        ("at least", _lower_end(row)),
        ("method", row["method"]),
    ]
    return [(name, value) for name, value in rows if value]


def _lower_end(row: Row) -> str:
    """What some pair of data sets attains, where the answer is a bound and that is known."""
    below, above = row.get("details", {}).get("bracket", (0.0, 0.0))
    solved = next((name for name in _ROUNDED_UP if row[name] == above), None)
    if row["status"] not in ("bound", "certified") or not 0 < below < above or solved is None:
        return ""
    shown = words.round_up(-below, 6).removeprefix("-")  # towards 0
    return f"{_LABELS[solved].split()[-1]} = {shown}, proved for some data sets"


def table(results: Sequence[Row], swept: str | None) -> tuple[list[str], list[list[str]]]:
    """Names of the columns and cells of several answers."""
    names = list(dict.fromkeys([*([swept] if swept else []), *_ROUNDED_UP, "method", "status"]))
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
        "exact": "exact, in closed form"
        if row["method"].startswith("Gaussian mechanism")
        else "exact up to discretization, rounded up",
        "certified": "certified; Monte Carlo failure probability <= "
        f"{row['failure_probability']:.1e}, included in δ",
        "bound": "an upper bound",
        "estimate": "an ESTIMATE: proves nothing",
    }
    return said.get(row["status"], str(row["status"]))


def draw(
    results: Sequence[Row], swept: str, title: str, path: Path, shown: str | None = None
) -> Path:
    """Draw a quantity against the swept one, one line per method, to a file.

    Args:
      results: one entry for each method and value.
      swept: name of the argument on the horizontal axis.
      title: heading.
      path: file to write.
      shown: name of the quantity; None: what was solved for.
    """
    given = {"eps": "epsilon"}.get(swept, swept)
    solved = [n for n in _ROUNDED_UP if n in results[0] and n != given]
    varying = [n for n in solved if len({row[n] for row in results}) > 1]
    shown = shown or (varying[0] if varying else "epsilon")
    name = _LABELS.get(shown, shown.replace("_", " "))
    finite = [row for row in results if math.isfinite(row[shown])]
    methods: dict[str, list[Row]] = {}
    for row in finite:
        methods.setdefault(row.get("method", name), []).append(row)
    if len({row[swept] for row in results}) == len(results) and len(methods) > 1:
        # one answer for each point, by different methods: joined into one
        methods = {"all": finite} | methods
    curves = [_curve(label, rows, swept, shown) for label, rows in methods.items()]
    logs = _spans(results, swept), _spans(finite, shown)
    return _write(curves, title, swept.replace("_", " "), name, logs, path)


def draw_run(results: Sequence[Row], ends: Sequence[int], path: Path) -> Path:
    """Draw the privacy cost of a run after each number of iterations, to a file."""
    solved = "delta" if len({row["epsilon"] for row in results}) == 1 else "epsilon"
    finite = [row for row in results if math.isfinite(row[solved])]
    pieces = [0, *ends, max(row["iterations"] for row in results)]
    curves = []
    for number, (first, last) in enumerate(itertools.pairwise(pieces), 1):
        begun = [row for row in finite if row["iterations"] <= first][-1:]
        begun = begun or [{"iterations": 0, solved: 0}]
        part = begun + [row for row in finite if first < row["iterations"] <= last]
        label = "the run" if len(pieces) == 2 else f"phase {number}"
        steps = {"drawstyle": "steps-pre"}  # a value is that of all iterations since the last
        curves.append(_curve(label, part, "iterations", solved)._replace(look=steps))
    given = "epsilon" if solved == "delta" else "delta"
    at = f"{_LABELS[given]} = {results[0][given]:g}"
    title, logs = f"{_LABELS[solved]} over the run at {at}", (False, False)
    return _write(curves, title, "iterations done", _LABELS[solved], logs, path)


def _write(
    curves: list[Curve], title: str, x_label: str, y_label: str, logs: tuple[bool, bool], path: Path
) -> Path:
    panel = plots.Panel(curves, title, x_label, y_label, *logs)
    return plots.write_figure(plots.draw([panel]), path)


def _spans(rows: Sequence[Row], name: str) -> bool:
    """Return True if values span enough for a logarithmic axis."""
    values = [row[name] for row in rows if row[name] > 0]
    return len(values) == len(rows) > 0 and max(values) > 30 * min(values)


def _curve(label: str, rows: Sequence[Row], swept: str, solved: str) -> Curve:
    return Curve(label, [row[swept] for row in rows], [row[solved] for row in rows])
