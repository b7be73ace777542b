"""The papers' tables and figures, and this library's own, by name."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from mfopt._runtime import _check
from mfopt.experiments import plots, tables
from mfopt.experiments.cache import Cache
from mfopt.experiments.figures import charles, chua, fresh_bins, ganesh, mcmahan, near_exact
from mfopt.experiments.figures.context import Builder, Context


class Entry(NamedTuple):
    """One table or figure: citation, its number as printed there, what it shows, its maker."""

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


# figures that the papers print twice
SAME = {"near-exact-18": "near-exact-3a", "near-exact-19": "near-exact-3b"}
TABLES = ("fedavg-table-1", "fedavg-table-2")


def make(
    name: str, folder: Path, cache: Cache, kinds: Collection[str] = plots.EVERY, **how: Any
) -> list[Path]:
    """Make one figure or table and write it into ``folder``; return the paths.

    Args:
      name: of the figure.
      folder: where.
      cache: where results are kept.
      kinds: suffixes of the files that are wanted.
      how: ``jobs`` and ``progress``, as for :func:`mfopt.experiments.runner.run_all`.
    """
    drawing = FIGURES[name].build(Context(cache, **how))
    if drawing.table is not None:
        text = f"{drawing.title}\n{tables.aligned(*drawing.table)}\n"
        texts = {".csv": tables.csv_text(*drawing.table), ".txt": text}
        return plots.write_files(folder / name, texts, {}, kinds)
    figure = plots.draw(drawing.panels, title=drawing.title, columns=drawing.columns)
    texts = {".csv": plots.csv_of(drawing.panels)}
    return plots.write_files(folder / name, texts, {"": figure}, kinds)
