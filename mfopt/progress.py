"""What long work tells whoever waits for it: one callback type for the whole library.

Work reports where it stands; how that is shown (a bar, a line in a log, nothing) is the
listener's business. A report is made when something has been *finished*, so that a listener who
measures the pace between two reports never counts compilation or preparation as work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where long work stands.

    Attributes:
      stage: what is being done, in words; a new stage has a pace of its own.
      done: how much of ``total`` is finished, in ``unit``; it never falls within a stage.
      total: how much there is; None where nobody knows.
      unit: what ``done`` counts ("steps", "cells", "bytes").
      at_most: ``total`` is a ceiling; the stage may well end before it.
      note: the best value so far, the cell at work, or whatever else is worth a look.
      lasting: ``note`` is worth keeping in view after the work has gone on.
    """

    stage: str
    done: float = 0
    total: float | None = None
    unit: str = ""
    at_most: bool = False
    note: str = ""
    lasting: bool = False


Report = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Nobody listens."""


def within(report: Report, prefix: str) -> Report:
    """A listener for a part of larger work: its stages are named after ``prefix``."""
    return lambda event: report(dataclasses.replace(event, stage=f"{prefix}: {event.stage}"))
