"""Cost of rebuilding all artifacts: its cells by kind of work, and the command itself."""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Iterable
from typing import Any

from mfopt.experiments.cache import Cache

ALL, COMMAND = "all cells", "this command"  # the rows below those of each kind of work


class Meter:
    """Started before the work."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._before = {path.name for path in cache.folder.iterdir()}
        self._begun, self._worked = time.perf_counter(), _worked()

    def table(self, cells: Iterable[Any]) -> str:
        """CSV: for each kind of work its cells, their processor seconds and their seconds.

        The row ``all cells`` has their sums, each cell as it was when it was computed. The row
        ``this command`` has how many cells it computed itself, the processor seconds of its
        processes and what a clock on the wall showed: what a whole rebuild takes, where its cells
        are all of them.
        """
        sums: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
        computed = 0
        for task in dict.fromkeys(cells):
            if (found := self._cache.load(task)) is None:
                continue
            computed += self._cache.path(task).name not in self._before
            spent = 1, found.record["cpu_seconds"], found.record["seconds"]
            for name in (task.name, ALL):
                sums[name] = [old + new for old, new in zip(sums[name], spent, strict=True)]
        sums[ALL] = sums.pop(ALL, [0, 0.0, 0.0])  # the last of them
        sums[COMMAND] = [computed, _worked() - self._worked, time.perf_counter() - self._begun]
        rows = [f"{name},{n:.0f},{cpu:.1f},{wall:.1f}\n" for name, (n, cpu, wall) in sums.items()]
        return "".join(["work,cells,cpu_seconds,seconds\n", *rows])


def _worked() -> float:
    """Processor seconds of this process and of those that it started and that ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
