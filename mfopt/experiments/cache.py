"""Results on disk, addressed by what was asked: a sweep that was stopped goes on where it was.

A task is a name and JSON-able settings. Its result is a JSON-able record and arrays, kept in one
``.npz`` file named by a SHA-256 of the task and of the code that computed it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from mfopt import _check, _files

_FORMAT = 2  # of the files
_PACKAGE = Path(__file__).parent.parent
# what no number in a cell depends on: the trainer counts for the tasks that train
_PRESENTATION = ("experiments/plots.py", "experiments/artifacts.py", "experiments/figures/")
_TRAINING = ("train-", "audit", "study-")
_STUDIES, _STUDY = "experiments/studies/", "study-"


@functools.cache
def code_digest(training: bool, studies: bool = False) -> str:
    """SHA-256 of the library's source that a cell's numbers follow from.

    Whole files, comments included: a result is computed again rather than believed.

    Args:
      training: with the trainer and what it runs.
      studies: with the studies' own cells.
    """
    sha = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE).as_posix()
        skipped = _PRESENTATION if training else (*_PRESENTATION, "training/")
        skipped = skipped if studies else (*skipped, _STUDIES)
        if not name.startswith(skipped):
            sha.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def _own_code(settings: dict[str, Any]) -> str:
    """SHA-256 of the file that defines a user's own kind of strategy; "" for those of mfopt."""
    from mfopt.strategies import registered

    cls = registered().get(settings.get("kind", ""))
    module = None if cls is None else sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if cls is None or file is None or cls.__module__.startswith("mfopt."):
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@dataclasses.dataclass(frozen=True)
class Task:
    """One unit of work.

    Attributes:
      name: a key of :data:`mfopt.experiments.runner.WORK`.
      settings: JSON text of the settings, keys sorted, so that tasks are hashable.
      needs: tasks whose results this one reads.
    """

    name: str
    settings: str
    needs: tuple[Task, ...] = ()

    @classmethod
    def of(cls, name: str, needs: tuple[Task, ...] = (), **settings: Any) -> Task:
        """A task from plain settings."""
        return cls(name, json.dumps(settings, sort_keys=True, allow_nan=False), needs)

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings as a dict."""
        settings: dict[str, Any] = json.loads(self.settings)
        return settings

    @property
    def key(self) -> str:
        """Address of the result: of the task, of all it needs, and of the code."""
        code = code_digest(self.name.startswith(_TRAINING), self.name.startswith(_STUDY))
        code += _own_code(self.arguments)
        sha = hashlib.sha256(f"{_FORMAT}|{code}|{self.name}|{self.settings}".encode())
        for task in self.needs:
            sha.update(task.key.encode())
        return sha.hexdigest()[:40]

    def __str__(self) -> str:
        return f"{self.name} " + " ".join(f"{k}={v}" for k, v in self.arguments.items())


@dataclasses.dataclass(frozen=True)
class Result:
    """What a task gave: a JSON-able record, and arrays."""

    record: dict[str, Any]
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


class Cache:
    """A folder of results. Several processes may share it: files appear whole or not at all."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise _check.reject(
                "cache", str(folder), f"cannot be made a folder ({problem.strerror})"
            ) from None
        _files.sweep(self.folder)

    def path(self, task: Task) -> Path:
        """Where the result of ``task`` is or would be."""
        return self.folder / f"{task.name}-{task.key}.npz"

    def has(self, task: Task) -> bool:
        """Whether a result is there."""
        return self.path(task).is_file()

    def load(self, task: Task) -> Result | None:
        """The result, or None where there is none or its file is damaged (it is made again)."""
        try:
            # numpy leaves a file open whose zip is damaged, so it is opened here
            with (
                self.path(task).open("rb") as stream,
                np.load(stream, allow_pickle=False) as archive,
            ):
                arrays = {name: archive[name] for name in archive.files}
            record = json.loads(str(arrays.pop("record")[()]))
        except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None
        return Result(record, arrays)

    def store(self, task: Task, result: Result) -> None:
        """Keep a result: written to a temporary name, then renamed."""
        text = np.array(json.dumps(result.record, sort_keys=True))
        _files.write(
            self.path(task),
            _files.npz({"record": text, **result.arrays}, compress=True),
            check=_files.check_zip,
        )


def default_folder() -> Path:
    """``$MFOPT_CACHE``, or ``experiments`` in mfopt's part of the user's cache folder."""
    if given := os.environ.get("MFOPT_CACHE"):
        return Path(given)
    return platformdirs.user_cache_path("mfopt", appauthor=False) / "experiments"
