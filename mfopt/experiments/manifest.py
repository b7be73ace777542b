"""The manifest of a folder of artifacts: what made each file, with its SHA-256.

An entry has the files, the command that rebuilds them, version, commit, digest of the code, seed,
device, and the seconds of computing behind them (the sum over the cells they were made of, cached
or not).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mfopt._runtime import _check, _files
from mfopt._version import __version__, commit
from mfopt.experiments.cache import Cache, Cell, code_digest
from mfopt.experiments.runner import summed, with_needs

MANIFEST = "manifest.json"


def read_manifest(folder: Path) -> dict[str, Any]:
    """Manifest of the folder, by artifact; empty where there is none.

    Raises:
      UsageError: the file is none.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _check.reject("manifest", str(path), "is not one JSON object", "Name another folder.")
    return found


def note(
    folder: Path,
    name: str,
    files: Sequence[Path],
    *,
    how: str,
    seed: int | None,
    device: Sequence[str],
    seconds: float,
    **more: Any,
) -> None:
    """Say in the folder's manifest how an artifact was made, in place of what it said before.

    Args:
      folder: of the manifest.
      name: of the artifact.
      files: its files, in ``folder``.
      how: the command that rebuilds them.
      seed: pinned, or None.
      device: what it was made on.
      seconds: of computing.
      more: ``made``, the day, today if left out; ``cpu_seconds``, where that is known: what a busy
        machine does not lengthen; ``code``, digest of the code; that of the library without its
        studies if left out.
    """
    entry: dict[str, Any] = {
        "files": _digests(folder, files),
        "command": how,
        "version": __version__,
        "commit": commit(),
        "code": more.get("code") or code_digest(training=True),
        "seed": seed,
        "device": list(device),
        "seconds": round(seconds, 1),
        "made": more.get("made") or time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if more.get("cpu_seconds") is not None:
        entry["cpu_seconds"] = round(more["cpu_seconds"], 1)
    manifest = read_manifest(folder)
    _remove(folder, manifest.get(name, {}).get("files", {}).keys() - entry["files"].keys())
    _write(folder, manifest | {name: entry})


def _remove(folder: Path, paths: Iterable[str]) -> None:
    """Delete files that an entry named, if they lie in the folder."""
    for path in paths:
        if folder.resolve() in (folder / path).resolve().parents:
            (folder / path).unlink(missing_ok=True)


def _write(folder: Path, manifest: dict[str, Any]) -> None:
    _files.write(folder / MANIFEST, json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def _digests(folder: Path, files: Sequence[Path]) -> dict[str, str]:
    """{path in the folder: SHA-256}."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
    }


def computing(cells: Iterable[Cell], cache: Cache) -> dict[str, Any]:
    """Computing record for :func:`note` of cells and of those they need."""
    return summed(map(cache.load, with_needs(cells)))
