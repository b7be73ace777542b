"""A study's outcome as a table for people, and as files: CSV, JSON, findings and plot."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mfopt.experiments import plots, tables
from mfopt.experiments.options import options
from mfopt.experiments.studies.engine import Outcome, Study


def described(study: Study, outcome: Outcome, made: dict[str, Any]) -> dict[str, Any]:
    """JSON-compatible description of a study and its outcome."""
    values = {field.name: getattr(study, field.name) for field in options(type(study))}
    return {
        "study": study.name,
        "source": study.source,
        **made,
        "setting": {k: str(v) if isinstance(v, Path) else v for k, v in values.items()},
        "findings": list(outcome.findings),
        "rows": list(outcome.rows),
    }


def table(outcome: Outcome) -> tuple[list[str], list[list[str]]]:
    """(headings, cells) of the table for people."""
    return list(outcome.columns.values()), [
        [tables.shown(row[key]) for key in outcome.columns] for row in outcome.rows
    ]


def outputs(study: Study, folder: Path) -> list[Path]:
    """The files that :func:`write` writes."""
    return [folder / f"{study.name}.{kind}" for kind in plots.EVERY]


def write(
    folder: Path,
    study: Study,
    outcome: Outcome,
    made: dict[str, Any],
    kinds: Collection[str] = plots.EVERY,
) -> list[Path]:
    """NAME.csv, .json, .txt (the findings), .png and .svg in ``folder``, each whole or not at all.

    Args:
      folder: where; it is made where it is not there.
      study: what was run.
      outcome: what it says.
      made: how it was made, as :func:`.engine.run` gives it.
      kinds: suffixes of the files that are wanted.
    """
    text = json.dumps(described(study, outcome, made), indent=2, allow_nan=False)
    texts = {".csv": tables.csv_of_rows(outcome.rows), ".json": f"{text}\n"}
    texts[".txt"] = "\n".join([*outcome.findings, ""])
    figure = plots.draw(outcome.panels, title=outcome.title, columns=study.plot_columns)
    return plots.write_files(folder / study.name, texts, {"": figure}, kinds)
