"""A run that begins from the model of an earlier private run: its report states what both cost.

That model is in the earlier run's folder, beside its report, which is verified; the statement about
all runs is :func:`mfopt.training.verification.composed`.
"""

from __future__ import annotations

from pathlib import Path

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.progress import Report
from mfopt.training import verification
from mfopt.training.config import TrainConfig
from mfopt.training.folder import MODEL, REPORT


def earlier_report(config: TrainConfig, progress: Report) -> JsonObject | None:
    """The verified report of the run that exported the model of ``config``; None: none is known.

    Raises:
      UsageError: the report does not hold, or this run releases losses of held-out users, who may
        have been trained on by the earlier one.
    """
    folder = Path(config.model).resolve()
    path = folder.parent / REPORT
    if not config.model or config.algorithm == "none" or folder.name != MODEL or not path.is_file():
        return None
    report = verification.read(path)
    outcome = verification.verify(report, progress=progress)
    if not outcome.holds:
        failed = [f"{x.name}: {x.stated} ({x.found})" for x in outcome.checks if not x.holds]
        words = _check.printable("; ".join(failed)[:300])
        rule = f"is that of a private run, whose report does not hold: {words}"
        raise _check.reject("model", config.model, rule)
    if config.validation_bound:
        rule = "is for runs that continue no other: its held-out users may be trained on there"
        raise _check.reject("validation_bound", config.validation_bound, rule)
    return report
