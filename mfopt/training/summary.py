"""One page of a run, whole in itself: what it guarantees, what it did, what may be shown.

With private metrics the page holds numbers that were computed without noise, and is as private as
they are; without them it holds what the privacy report and the settings hold.
"""

from __future__ import annotations

import html
import json
from pathlib import Path

from mfopt import words
from mfopt._runtime import _files
from mfopt._runtime._page import facts, section, svg, text, whole
from mfopt.training import metrics
from mfopt.training.config import load
from mfopt.training.privacy import report_rows

FILE = "summary.html"


def write(folder: Path) -> Path:
    """``summary.html`` of the run in ``folder``, from the files there; owner-only permissions."""
    return _files.write(folder / FILE, page(folder), private=True)


def page(folder: Path) -> str:
    """The page of a run as text, from its ``config.toml`` and, if there is one, its report."""
    path, settings = folder / "privacy-report.json", load(folder / "config.toml")
    if path.is_file():
        report = json.loads(path.read_text(encoding="utf-8"))
        stated, rate = report["guarantee"], report["learning_rate"]
        epsilon, delta = (words.round_up(stated[name], 6) for name in ("epsilon", "delta"))
        title = f"A run under ({epsilon}, {delta})-DP"
        if not report["holds"]:
            title = "A run WITHOUT A GUARANTEE"
        rows = [
            ("statement", report["statement"] if report["holds"] else "NONE: see below"),
            *report_rows(report),
            ("learning rate", f"{rate['value']:.6g}, chosen {rate['chosen']}"),
            ("to check it", "`mfopt verify privacy-report.json`"),
        ]
        items = "".join(f"<li>{text(item)}</li>" for item in report["not_covered"])
        rest = [section("What the guarantee does not cover", f"<ul>{items}</ul>")]
    else:
        title, rows, rest = "A run without privacy", [("statement", "Nothing is guaranteed.")], []
    parts = [section("What is guaranteed, and what was done", facts(rows))]
    if settings.private_metrics:
        parts.append(section("Loss", _losses(folder)))
    parts += [*rest, section("Settings", f"<pre>{html.escape(settings.to_toml())}</pre>")]
    return whole(title, parts)


def _losses(folder: Path) -> str:
    rows = metrics.read_table(folder / "evaluation.csv")
    ends = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        shown = [f"{float(row['loss']):.4f} after {row['step']}" for row in (mine[0], mine[-1])]
        ends.append((part, f"{', '.join(shown)} steps (nats per token)"))
    note = "<p>Computed from private data without noise: not to be shown.</p>"
    return note + facts(ends) + f"<figure>{svg(metrics.loss_figure(folder))}</figure>"
