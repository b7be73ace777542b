"""Progress reports of long work: one callback type for the whole library.

Work reports its progress; the listener decides how to show it (a bar, a line in a log, nothing). A
report is made when something has been *finished*, so that the pace between two reports never counts
compilation or preparation as work.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of long work.

    Attributes:
      stage: what is being done, in words; a new stage has a pace of its own.
      done: how much of ``total`` is finished, in ``unit``; it never falls within a stage.
      total: how much there is; None where nobody knows.
      unit: what ``done`` counts ("steps", "cells", "bytes").
      at_most: ``total`` is a ceiling; the stage may well end before it, nobody knows when.
      note: the best value so far, the cell at work, or whatever else is worth a look.
      lasting: ``note`` is worth keeping in view after the work has moved on.
      paced: pieces take equally long, so that an end follows from their pace.
    """

    stage: str
    done: float = 0
    total: float | None = None
    unit: str = ""
    at_most: bool = False
    note: str = ""
    lasting: bool = False
    paced: bool = False

    @property
    def fraction(self) -> float:
        """Part of the stage's pieces that are finished; 0 where nobody knows."""
        return self.done / self.total if self.total else 0.0


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Listener that ignores every report."""


_LISTENER: contextvars.ContextVar[Report] = contextvars.ContextVar("listener", default=silent)


@contextlib.contextmanager
def listening(report: Report) -> Iterator[None]:
    """Tell ``report`` of work inside the block that has no listener of its own."""
    token = _LISTENER.set(report)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def ambient(event: Progress) -> None:
    """Listener that passes reports on to that of :func:`listening`, if there is one."""
    _LISTENER.get()(event)


def within(report: Report, prefix: str) -> Report:
    """A listener for a part of larger work: its stages are named after ``prefix``."""
    return lambda event: report(dataclasses.replace(event, stage=f"{prefix}: {event.stage}"))
