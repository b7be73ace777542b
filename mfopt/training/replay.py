"""The last steps of a run that happened, executed again from a checkpoint and compared bit for bit.

With the run's secret and data everything in it is determined: batches, contributions, sums, noise,
updates and what is exported. A run that was executed by another program than this one, resumed with
other data, or changed afterwards ends elsewhere. That this program does what was accounted for, on
these data, is tested by :func:`mfopt.training.recovered.findings_of_run`.
"""

from __future__ import annotations

import dataclasses
import filecmp
import shutil
import tempfile
from pathlib import Path

from mfopt._runtime import _check
from mfopt.factorization import proofs
from mfopt.progress import Report, silent
from mfopt.training import recovered, verification
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.config import TrainConfig, load
from mfopt.training.execute import execute
from mfopt.training.executed import Finding
from mfopt.training.folder import CHECKPOINTS, MODEL, REPORT, hold
from mfopt.training.prepare import prepare


@dataclasses.dataclass(frozen=True)
class _Replay:
    """Steps ``begin`` .. ``end`` - 1 of a run were executed again; ``differences``: in what."""

    begin: int
    end: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """One line."""
        outcome = ", ".join(self.differences)
        outcome = f"DIFFERENT: {outcome}" if outcome else "the same, bit for bit"
        return f"steps {self.begin + 1} to {self.end}, from a checkpoint, with the data: {outcome}"


def settings_of_run(folder: Path) -> TrainConfig:
    """The settings of the run in ``folder``, which may have been moved with its factorization."""
    settings = load(folder / "config.toml")
    factorization = folder / "factorization.npz"
    stated = settings.factorization
    if stated and not Path(stated).is_file() and factorization.is_file():
        return dataclasses.replace(settings, factorization=str(factorization))
    return settings


def replay(folder: str | Path, progress: Report = silent) -> tuple[_Replay, list[Finding]]:
    """Execute the last steps of the run in ``folder`` again, between its two newest checkpoints.

    They run in a copy of the folder, by :func:`~mfopt.training.execute.execute`, as a resumed run
    does; the folder itself is not changed, and the copy is deleted. The findings are those of
    :func:`~mfopt.training.recovered.findings_of_run`.

    Raises:
        UsageError: the run has fewer than two checkpoints or is at work, or its data, model or
            account are not there as they were.
    """
    folder = Path(folder)
    settings = settings_of_run(folder)
    lock = hold(folder)
    try:
        names = [path.name for path in (folder / CHECKPOINTS).glob("*") if path.name.isdigit()]
        steps = sorted(map(int, names))
        if len(steps) < 2:
            rule = "has fewer than two checkpoints, so that no step can be executed again"
            raise _check.reject("run", str(folder), rule)
        begin, end = steps[-2:]
        with tempfile.TemporaryDirectory(prefix=".replay-", dir=folder) as temporary:
            copy = Path(temporary) / "run"
            last_folder = Path(temporary) / "last"
            left_out = shutil.ignore_patterns(".replay-*", "lock*", MODEL)
            shutil.copytree(folder, copy, ignore=left_out)
            last_folder.mkdir(mode=0o700)
            shutil.move(copy / CHECKPOINTS / str(end), last_folder / str(end))
            prepared = prepare(
                dataclasses.replace(settings, output=str(copy), steps=end, patience=0),
                resume=True,
                progress=progress,
            )
            execute(prepared, progress=progress)
            like = prepared.trainer.init()
            with Checkpoints(last_folder) as original, Checkpoints(copy / CHECKPOINTS) as repeated:
                before, after = (
                    checkpoints.restore(like, prepared.secret, end).facts["arrays"]
                    for checkpoints in (original, repeated)
                )
                state = repeated.restore(like, prepared.secret, begin).state
            parts = {
                "parameters": "params",
                "state of the optimizer": "optimizer",
                "noise": "noise",
            }
            differences = [name for name, part in parts.items() if before[part] != after[part]]
            differences += _of_files(folder, copy)
            findings = recovered.findings_of_run(prepared, state, end, progress)
        return _Replay(begin, end, tuple(differences)), findings
    finally:
        lock.release()


def _of_files(folder: Path, copy: Path) -> list[str]:
    """Names of what was exported and is not the same."""
    reports = [verification.read(run_folder) for run_folder in (folder, copy)]
    if reports[0].get("steps_done") != reports[1]["steps_done"]:
        return []  # it was stopped: nothing was exported at its last checkpoint
    # whoever has the model alone reads the one beside it
    reports.append(verification.read(folder / MODEL))
    model = copy / MODEL
    names = [
        str(path.relative_to(model))
        for path in model.rglob("*")
        if path.is_file() and path.name != REPORT
    ]
    equal_files, _, _ = filecmp.cmpfiles(folder / MODEL, model, names, shallow=False)
    differing = ["exported model"] if len(equal_files) < len(names) else []
    for report in reports:
        report.pop("mfopt", None)
        guarantee = report.get("guarantee") or {}  # may have been proved again, in other words
        report["guarantee"] = {k: v for k, v in guarantee.items() if k not in proofs.WORDS}
    same = reports[0] == reports[1] == reports[2]
    return differing if same else [*differing, "privacy report"]
