"""Notes that this user's mfopt made on this machine: no file can bring one along.

A note is a small JSON file in the user's data folder, under a name that says what it is about, and
authenticated (HMAC-SHA256) by a key that is made on first use and readable by its owner only.

This protects against what comes from elsewhere, be it mistaken, altered or made up, and against
notes copied from another machine. It does not protect against whoever can read this user's files or
run programs as this user.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
from pathlib import Path

import platformdirs

from mfopt._runtime import _files
from mfopt._runtime._types import JsonObject

_KEY_BYTES = 32
MOST_BYTES = 2**25  # some ten thousand notes


def folder() -> Path:
    """``$MFOPT_DATA``, or ``proofs`` in mfopt's part of the user's data folder."""
    if configured := os.environ.get("MFOPT_DATA"):
        return Path(configured)
    return platformdirs.user_data_path("mfopt", appauthor=False) / "proofs"


def note_path(name: str) -> Path:
    """Path of the note ``name``."""
    return folder() / f"{name}.json"


def write(name: str, facts: JsonObject) -> bool:
    """Put ``facts`` on record under ``name``; False where the folder cannot be written.

    Args:
      name: letters and digits, a digest of what the note is about.
      facts: JSON-able.
    """
    facts = {**facts, "statement": name}
    try:
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        _files.write(note_path(name), facts | {"tag": _tag(facts, _key(make=True))}, private=True)
        _files.trim(folder(), "*.json", MOST_BYTES)
    except OSError:  # a read-only home is no reason to lose a result
        return False
    return True


def read(name: str) -> JsonObject | None:
    """The facts noted under ``name``; None where there is no note, or a damaged or foreign one."""
    try:
        facts: JsonObject = json.loads(note_path(name).read_text(encoding="utf-8"))
        tag = str(facts.pop("tag"))
        expected = _tag(facts, _key(make=False))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    is_authentic = hmac.compare_digest(tag.encode(), expected.encode())
    return facts if is_authentic and facts.get("statement") == name else None


def _key(*, make: bool) -> bytes:
    path = folder() / "key"
    if make and not path.exists():
        with contextlib.suppress(FileExistsError):  # another process was faster
            _files.write(path, secrets.token_bytes(_KEY_BYTES), force=False, private=True)
    key = path.read_bytes()
    if len(key) != _KEY_BYTES or path.stat().st_mode & 0o077:
        raise OSError(f"{path} is damaged, or can be read by others: remove it")
    return key


def _tag(facts: JsonObject, key: bytes) -> str:
    return hmac.digest(key, json.dumps(facts, sort_keys=True).encode(), "sha256").hex()
