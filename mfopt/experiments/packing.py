"""Files in a result: a folder as arrays of bytes, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mfopt.experiments.cache import Result

# setting of a run -> where `unpack` puts what it names
PLACES = {"data": "corpus", "model": "pretrained", "factorization": "mechanism/mechanism.npz"}


def packed(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The files under ``folder`` as arrays of bytes."""
    return {
        f"file/{name}/{path.relative_to(folder).as_posix()}": np.frombuffer(
            path.read_bytes(), dtype=np.uint8
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def unpack(result: Result, folder: Path) -> None:
    """Write the files that a result holds into ``folder``."""
    for name, content in result.arrays.items():
        path = folder / name.removeprefix("file/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.tobytes())
