"""The papers' tables and figures, and this library's own, by name.

A figure is a list of panels (and its data as CSV); a table is rows of text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mfopt import _check, _files
from mfopt.experiments import plots
from mfopt.experiments.cache import Cache
from mfopt.experiments.figures import charles, chua, fresh_bins, ganesh, mcmahan, near_exact
from mfopt.experiments.figures.context import Builder, Context


class Entry(NamedTuple):
    """One table or figure.

    Attributes:
      paper: short citation.
      number: as printed there.
      what: one line.
      build: makes it.
    """

    paper: str
    number: str
    what: str
    build: Builder


FIGURES: dict[str, Entry] = {
    name: Entry(module.PAPER, *entry)
    for module in (near_exact, ganesh, charles, chua, mcmahan, fresh_bins)
    for name, entry in module.FIGURES.items()
}


def expand(name: str) -> list[str]:
    """Names for what a user asks for: a name, a prefix such as "near-exact", or "all".

    >>> expand("group-level-1")
    ['group-level-1']
    """
    if name in FIGURES:
        return [name]
    found = [key for key in FIGURES if name == "all" or key.startswith(f"{name}-")]
    if not found:
        raise _check.reject(
            "figure", name, "is not known", f"Choose from {', '.join(FIGURES)}, or all."
        )
    return found


def outputs(name: str, folder: Path) -> list[Path]:
    """The files that :func:`make` writes for a figure or table."""
    stem = folder / name
    kinds = ["csv", "txt"] if name in TABLES else ["csv", *plots.FORMATS]
    return [stem.with_name(f"{name}.{kind}") for kind in kinds]


TABLES = ("near-exact-4", "fedavg-table-1")
TIMES = ("near-exact-4",)  # whose numbers are times: nothing else may be computed beside them


def make(name: str, folder: Path, cache: Cache, **how: Any) -> list[Path]:
    """Make one figure or table and write it into ``folder``; return the paths.

    ``how`` is ``jobs`` and ``progress``, as for :func:`mfopt.experiments.runner.run_all`.
    """
    drawing = FIGURES[name].build(Context(cache, **how))
    stem = folder / name
    if drawing.table is not None:
        return [
            _files.write(stem.with_name(f"{name}.csv"), drawing.csv or ""),
            _files.write(stem.with_name(f"{name}.txt"), drawing.table),
        ]
    data = _files.write(stem.with_name(f"{name}.csv"), plots.csv_of(drawing.panels))
    figure = plots.draw(drawing.panels, title=drawing.title, columns=drawing.columns)
    return [data, *plots.save(figure, stem)]
