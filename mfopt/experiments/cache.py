"""Cells and their results on disk: a stopped sweep resumes.

A cell is one unit of work, a frozen dataclass: its fields are settings, and the cells whose results
it reads. A result is a JSON-able record and arrays, kept in one ``.npz`` file that is named by a
SHA-256 of the cell and of the code that computed it.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import json
import os
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import platformdirs

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject

_FORMAT = 3  # of the files
FILES = f"*-{'[0-9a-f]' * 40}.npz"  # pattern of their names
MOST_BYTES = 2**30  # of the default folder
_PACKAGE = Path(__file__).parent.parent
# what no number in a cell of the package depends on
_OMITTED = (
    "training/",
    "torch/",
    *(f"experiments/{name}.py" for name in ("decision_plots", "mechanism_plot", "plots", "report")),
)


@functools.cache
def code_digest(folder: Path | None = None) -> str:
    """SHA-256 of the source that a cell's numbers follow from.

    Whole files, comments included: a result is computed again rather than trusted.

    Args:
      folder: of a cell that the package does not define: the whole package counts for it, and every
        module beside its own.
    """
    paths = [(path, path.relative_to(_PACKAGE).as_posix()) for path in _PACKAGE.rglob("*.py")]
    if folder is None:
        paths = [(path, name) for path, name in paths if not name.startswith(_OMITTED)]
    else:
        paths += [(path, path.name) for path in folder.glob("*.py")]
    sha = hashlib.sha256()
    for path, name in sorted(paths):
        sha.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()


def _strategy_code(settings: JsonObject) -> str:
    """SHA-256 of the file that defines a user's own kind of strategy; "" for those of mfopt."""
    from mfopt.strategies import registered

    cls = registered().get(settings.get("kind", ""))
    file = None if cls is None else _defining_file(cls)
    return "" if file is None else hashlib.sha256(file.read_bytes()).hexdigest()


def _defining_file(cls: type) -> Path | None:
    """The file of a class that the package does not define; None of those of mfopt."""
    if cls.__module__.startswith("mfopt."):
        return None
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return None if file is None else Path(file)


class Cell(abc.ABC):
    """One unit of work; subclasses are frozen dataclasses that workers can import.

    Attributes:
      name: of its files.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def run(self, *needed: Result) -> Result:
        """Compute the result from those of :attr:`needs`."""

    @property
    def needs(self) -> tuple[Cell, ...]:
        """Cells whose results this one reads, in the order of its fields."""
        values = [getattr(self, field.name) for field in dataclasses.fields(self)]  # type: ignore[arg-type]
        return tuple(cell for value in values for cell in _cells(value))

    @property
    def settings(self) -> JsonObject:
        """The other fields, JSON-able, but those that have their defaults."""
        text = json.dumps(_non_defaults(self), allow_nan=False, default=_described)
        settings: JsonObject = json.loads(text)
        return settings

    @property
    def key(self) -> str:
        """Address of the result: of the cell, of all it needs, and of the code."""
        settings = self.settings
        file = _defining_file(type(self))
        code = code_digest(None if file is None else file.parent) + _strategy_code(settings)
        text = json.dumps(settings, sort_keys=True)
        sha = hashlib.sha256(f"{_FORMAT}|{code}|{self.name}|{text}".encode())
        for cell in self.needs:
            sha.update(cell.key.encode())
        return sha.hexdigest()[:40]

    def __str__(self) -> str:
        """What is computed, for a line of progress: form of C, scheme, sizes and ε."""
        settings = [{**c.settings, **c.settings.get("goal", {})} for c in (*self.needs, self)]
        facts = {key: value for setting in settings for key, value in setting.items()}
        shown = ("kind", "sampling", "epochs", "bins", "epsilon")
        return f"{self.name}: " + ", ".join(f"{k} {facts[k]}" for k in shown if k in facts)


def _cells(value: object) -> tuple[Cell, ...]:
    """The cells in a field: one, or a tuple of them."""
    return tuple(v for v in (value if type(value) is tuple else (value,)) if isinstance(v, Cell))


def _non_defaults(record: Any) -> JsonObject:
    """Fields that are no cells and differ from their defaults."""
    values = {f.name: (getattr(record, f.name), f.default) for f in dataclasses.fields(record)}
    return {
        k: value for k, (value, default) in values.items() if value != default and not _cells(value)
    }


def _described(value: Any) -> object:
    """A scheme, or a record of settings, in JSON."""
    return value.describe() if hasattr(value, "describe") else _non_defaults(value)


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of a cell: a JSON-compatible record, and arrays."""

    record: JsonObject
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

    def path(self, cell: Cell) -> Path:
        """Path of the result of ``cell``, whether it exists or not."""
        return self.folder / f"{cell.name}-{cell.key}.npz"

    def has(self, cell: Cell) -> bool:
        """Return True if the result exists."""
        return self.path(cell).is_file()

    def load(self, cell: Cell) -> Result | None:
        """The result, or None where there is none or its file is damaged (it is made again)."""
        try:
            # numpy leaves a file open whose zip is damaged, so it is opened here
            with (
                self.path(cell).open("rb") as stream,
                np.load(stream, allow_pickle=False) as archive,
            ):
                arrays = {name: archive[name] for name in archive.files}
            record = json.loads(str(arrays.pop("record")[()]))
        except (FileNotFoundError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None
        return Result(record, arrays)

    def store(self, cell: Cell, result: Result) -> None:
        """Keep a result: written to a temporary name, then renamed."""
        text = np.array(json.dumps(result.record, sort_keys=True))
        _files.write(
            self.path(cell),
            _files.npz({"record": text, **result.arrays}, compress=True),
            check=_files.check_zip,
        )


def default_folder() -> Path:
    """``$MFOPT_CACHE``, or ``experiments`` in mfopt's part of the user's cache folder.

    The latter is bounded: what was made first is removed beyond :data:`MOST_BYTES`.
    """
    if named_folder := os.environ.get("MFOPT_CACHE"):
        return Path(named_folder)
    folder = platformdirs.user_cache_path("mfopt", appauthor=False) / "experiments"
    _files.trim(folder, FILES, MOST_BYTES)
    return folder
