"""Input and output of a figure's code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mfopt.experiments import comparison
from mfopt.experiments.cache import Cache, Cell
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

    def records(self, cells: Mapping[K, Cell]) -> dict[K, dict[str, Any]]:
        """The record of each cell."""
        found = run_all(cells.values(), self.cache, jobs=self.jobs, progress=self.progress)
        return {key: found[cell].record for key, cell in cells.items()}

    def compare(self, setting: Comparison) -> list[comparison.Row]:
        """Rows of a comparison, each at its best size."""
        return comparison.compare(setting, self.cache, jobs=self.jobs, progress=self.progress)


class Drawing(NamedTuple):
    """A figure's panels, or a table as (header, rows)."""

    panels: Sequence[Panel] = ()
    title: str = ""
    columns: int | None = None
    table: tuple[Sequence[str], Sequence[Sequence[Any]]] | None = None


Builder = Callable[[Context], Drawing]
# name -> number as printed, what it shows, what makes it
Figures = dict[str, tuple[str, str, Builder]]
