"""Writing files whole: under a temporary name in the same folder, then moved into place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mfopt import _check


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file, flush it to disk, and move it to ``path``.

    A reader sees the old file or the new one, never a part of it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    replace_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_array(path: Path, array: np.ndarray) -> None:
    """Write one ``.npy`` file, whole or not at all."""

    def write(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            np.lib.format.write_array(file, array, allow_pickle=False)

    replace_file(path, write)


def check_output(path: str | Path, force: bool) -> Path:
    """``path`` as a place to write to: its parent exists, and it is free or ``force`` is given.

    Raises:
        UsageError: otherwise; called before long work.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise _check.reject("out", str(path), "its parent folder does not exist", "Make it first.")
    if target.exists() and not force:
        raise _check.reject("out", str(path), "exists already", "Give --force to replace it.")
    return target
