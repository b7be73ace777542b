"""Provenance of a result: who made it, with what and when."""

from __future__ import annotations

import datetime
import functools
import platform

import jax

from mfopt._version import __version__, commit

_commit = functools.cache(commit)  # a process runs one code


def provenance(seed: int | None, command: str) -> dict[str, str]:
    """Record of a result's making; no path of this machine beyond the command's own words.

    Args:
      seed: pinned seed, or None for the operating system's entropy.
      command: command line, or function, that made it.
    """
    return {
        "mfopt": __version__,
        "commit": _commit() or "unknown",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": command,
        "seed": "operating system entropy" if seed is None else f"pinned {seed}",
        "device": str(jax.devices()[0].device_kind),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
