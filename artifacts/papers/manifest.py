"""The manifest of a folder of artifacts: what made each file, with its SHA-256.

An entry has the files, the command that rebuilds them, version, commit, digest of the code, seed,
device, and the seconds of computing behind them (the sum over the cells they were made of, cached
or not).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfopt._runtime import _check, _files
from mfopt._version import __version__, commit
from mfopt.experiments.cache import code_digest

MANIFEST = "manifest.json"
SCRIPTS = Path(__file__).parent


def read_manifest(folder: Path) -> dict[str, Any]:
    """Manifest of the folder, by artifact; empty where there is none.

    Raises:
      UsageError: the file is none.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise _check.reject("manifest", str(path), "is not one JSON object", "Name another folder.")
    return content


def note(folder: Path, name: str, files: Sequence[Path], *, how: str, **facts: Any) -> None:
    """Say in the folder's manifest how an artifact was made, in place of what it said before.

    Args:
      folder: of the manifest.
      name: of the artifact.
      files: its files, in ``folder``.
      how: the command that rebuilds them.
      facts: ``seed``, pinned or None; ``device``; ``seconds`` of computing; ``cpu_seconds``, where
        that is known: what a busy machine does not lengthen; ``speed`` of the machine, which
        these say nothing without; ``made``, the day, today if left out; ``code``, digest of the
        code; that of the library and the scripts if left out.
    """
    entry: dict[str, Any] = {
        "files": {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(files)
        },
        "command": how,
        "version": __version__,
        "commit": commit(),
        **facts,
        "seed": facts["seed"],  # none of these may be left out
        "device": list(facts["device"]),
        "seconds": facts["seconds"],
        "made": facts.get("made") or time.strftime("%Y-%m-%d", time.gmtime()),
    }
    entry.setdefault("code", code_digest(SCRIPTS))
    entry |= {key: round(entry[key], 1) for key in ("seconds", "cpu_seconds") if key in entry}
    manifest = read_manifest(folder)
    for old in manifest.get(name, {}).get("files", {}).keys() - entry["files"].keys():
        if folder.resolve() in (folder / old).resolve().parents:
            (folder / old).unlink(missing_ok=True)
    text = json.dumps(manifest | {name: entry}, indent=2, sort_keys=True)
    _files.write(folder / MANIFEST, f"{text}\n")
