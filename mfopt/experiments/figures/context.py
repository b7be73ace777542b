"""Input and output of a figure's code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mfopt.experiments import comparison, tables
from mfopt.experiments.cache import Cache, Cell, Result
from mfopt.experiments.families import Comparison
from mfopt.experiments.plots import Panel
from mfopt.experiments.runner import run_all
from mfopt.progress import Report, silent

K = TypeVar("K", bound=Hashable)


class Context(NamedTuple):
    """Cache, number of processes and progress listener of a figure."""

    cache: Cache
    jobs: int | None = None
    progress: Report = silent

    def run(self, cells: Iterable[Cell]) -> dict[Cell, Result]:
        """Results of the cells, from the cache where they are there."""
        return run_all(cells, self.cache, jobs=self.jobs, progress=self.progress)

    def records(self, cells: Mapping[K, Cell]) -> dict[K, dict[str, Any]]:
        """The record of each cell."""
        found = self.run(cells.values())
        return {key: found[cell].record for key, cell in cells.items()}

    def compare(self, setting: Comparison) -> list[comparison.Row]:
        """Rows of a comparison, each at its best size."""
        return comparison.compare(setting, self.cache, jobs=self.jobs, progress=self.progress)


class Drawing(NamedTuple):
    """A figure's panels, or a table's text and CSV."""

    panels: Sequence[Panel] = ()
    title: str = ""
    columns: int | None = None
    table: str | None = None
    csv: str | None = None


Builder = Callable[[Context], Drawing]
# name -> number as printed, what it shows, what makes it
Figures = dict[str, tuple[str, str, Builder]]


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Drawing:
    """A table as text below a title, and as CSV."""
    text = f"{title}\n{tables.aligned(header, rows)}\n"
    return Drawing(table=text, csv=tables.csv_text(header, rows))
