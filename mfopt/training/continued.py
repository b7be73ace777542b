"""A run that begins from the model of an earlier private run: its report states what both cost.

That model's folder holds the earlier run's report, also in a copy of the folder, and also after a
run without privacy from it. The report is verified; the statement about all runs is
:func:`mfopt.training.verification.composed`.
"""

from __future__ import annotations

from pathlib import Path

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.progress import Progress, Report
from mfopt.training import verification
from mfopt.training.config import TrainConfig
from mfopt.training.folder import MODEL, REPORT


def path_of(config: TrainConfig) -> Path | None:
    """Path of the report of the run that exported the model of ``config``; None: none is known."""
    if not config.model:
        return None
    folder = Path(config.model).resolve()
    # beside it where the run was killed before its report was copied
    places = (folder, folder.parent) if folder.name == MODEL else (folder,)
    return next(filter(Path.is_file, (place / REPORT for place in places)), None)


def earlier_report(config: TrainConfig, progress: Report) -> JsonObject | None:
    """The verified report of the run that exported the model of ``config``; None: none is known.

    Raises:
      UsageError: the report does not hold, or this run releases losses of held-out users, who may
        have been trained on by the earlier one.
    """
    path = path_of(config)
    if config.algorithm == "none":
        return None
    if path is None:
        begun = Path(config.model)
        if begun.name == MODEL and (begun.parent / "config.toml").is_file():
            note = f"warning: {config.model} was trained without privacy: no guarantee covers the "
            note += "data it was trained on"
            progress(Progress("preparing", note=note, lasting=True))
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
