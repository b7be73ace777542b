"""One HTML page about a run, whole in itself: what it guarantees, what it did, what may be shown.

With private metrics the page holds numbers that were computed without noise, and is as private as
they are; without them it holds what the privacy report and the settings hold.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from mfopt import _files, words
from mfopt._page import facts, section, svg, text, whole
from mfopt.training import metrics
from mfopt.training.config import load

FILE = "summary.html"


def write(folder: Path) -> Path:
    """``summary.html`` of the run in ``folder``, from the files there; owner-only permissions."""
    return _files.write(folder / FILE, page(folder), private=True)


def page(folder: Path) -> str:
    """The page as text.

    Args:
      folder: of a run, with its ``config.toml`` and, if it has a guarantee, its privacy report.
    """
    path, settings = folder / "privacy-report.json", load(folder / "config.toml")
    report = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    if report is None:
        title, parts = "A run without privacy", [section("What is guaranteed", "<p>Nothing.</p>")]
    else:
        stated = report["guarantee"]
        epsilon, delta = (words.round_up(stated[name], 6) for name in ("epsilon", "delta"))
        title = f"A run under ({epsilon}, {delta})-DP"
        if not report["holds"]:
            title = "A run WITHOUT A GUARANTEE"
        parts = [section("What is guaranteed", _guarantee(report))]
        parts.append(section("What was done", _done(report)))
    if settings.private_metrics:
        parts.append(section("Loss", _losses(folder)))
    if report is not None:
        items = "".join(f"<li>{text(item)}</li>" for item in report["not_covered"])
        parts.append(section("What the guarantee does not cover", f"<ul>{items}</ul>"))
    parts.append(section("Settings", f"<pre>{html.escape(settings.to_toml())}</pre>"))
    return whole(title, parts)


def _guarantee(report: dict[str, Any]) -> str:
    stated = report["guarantee"]
    rows = [
        ("statement", report["statement"] if report["holds"] else "NONE: see below"),
        ("ε, δ", f"{words.round_up(stated['epsilon'], 6)}, {words.delta(stated['delta'])}"),
        ("for", f"one {stated['privacy_unit']}, {stated['adjacency']} adjacency"),
        ("method", f"{stated['method']} ({stated['status']})"),
    ]
    if report["pinned"]:
        rows.append(("NO GUARANTEE", "the seed is pinned: whoever knows it can remove the noise"))
    if stated["status"] == "estimate":
        rows.append(("NO GUARANTEE", "the account is an estimate: `mfopt certify` the file first"))
    if stated["details"].get("taken_on_trust"):
        rows.append(("taken on trust", "this machine has not proved the file's guarantee"))
    rows += [("warning", warning) for warning in report["warnings"]]
    rows.append(("to check it", "`mfopt verify privacy-report.json`"))
    return facts(rows)


def _done(report: dict[str, Any]) -> str:
    sampling, sizes = report["sampling"], report["noise_against_signal"]
    scheme = ", ".join(
        f"{name.replace('_', ' ')} {value}" if name != "kind" else str(value)
        for name, value in sampling["scheme"].items()
    )
    rate = report["learning_rate"]
    rows = [
        ("steps", f"{report['steps_done']:,} of {report['iterations_covered']:,} covered"),
        ("sampling", scheme),
        ("sampled units", f"{sampling['population']:,}, each one {report['units']['unit']}"),
        ("C", words.described(report["strategy"])),
        (
            "noise multiplier σ",
            f"{words.round_up(report['noise_multiplier'], 6)} × clip norm, for C as stored",
        ),
        (
            "noise of a step",
            f"norm {sizes['noise_norm']:.4g} over {report['parameters']:,} parameters; a batch of "
            f"aligned gradients has {sizes['largest_signal_norm']:.4g}",
        ),
        ("learning rate", f"{rate['value']:.6g}, chosen {rate['chosen']}"),
    ]
    return facts(rows)


def _losses(folder: Path) -> str:
    rows = metrics.read_table(folder / "evaluation.csv")
    ends = []
    for part in dict.fromkeys(row["part"] for row in rows):
        mine = [row for row in rows if row["part"] == part]
        shown = [f"{float(row['loss']):.4f} after {row['step']}" for row in (mine[0], mine[-1])]
        ends.append((part, f"{', '.join(shown)} steps (nats per token)"))
    note = "<p>Computed from private data without noise: not to be shown.</p>"
    return note + facts(ends) + f"<figure>{svg(metrics.loss_figure(folder))}</figure>"
