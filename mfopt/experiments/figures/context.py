"""What a figure's code is given, and what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mfopt.experiments import comparison
from mfopt.experiments.cache import Cache, Result, Task
from mfopt.experiments.plots import Panel
from mfopt.experiments.runner import run_all
from mfopt.progress import Report, silent


class Context(NamedTuple):
    """Where results are kept, how many processes compute them, and who is told."""

    cache: Cache
    jobs: int | None = None
    progress: Report = silent

    def run(self, tasks: Iterable[Task]) -> dict[Task, Result]:
        """Results of the tasks, from the cache where they are there."""
        return run_all(tasks, self.cache, jobs=self.jobs, progress=self.progress)

    def compare(self, setting: comparison.Comparison) -> list[comparison.Row]:
        """Rows of a comparison, each at its best size."""
        return comparison.compare(setting, self.cache, jobs=self.jobs, progress=self.progress)


class Drawing(NamedTuple):
    """A figure's panels, or a table's text and CSV."""

    panels: Sequence[Panel] = ()
    title: str = ""
    columns: int | None = None
    table: str | None = None
    csv: str | None = None
