"""Installed packages that add strategies, schemes or accountants: loaded when a name is unknown.

A package names its module in its own metadata, and ``mfopt`` finds it without being edited::

    [project.entry-points."mfopt.plugins"]
    lottery = "my_package.lottery"

Importing the module registers what it defines. A file or a command only brings the *name* of a
kind; what is imported is what was installed.
"""

from __future__ import annotations

import importlib.metadata

from mfopt.errors import FailureError

GROUP = "mfopt.plugins"
_loaded: set[str] = set()


def installed() -> bool:
    """Return True if any plugin is installed."""
    return bool(importlib.metadata.entry_points(group=GROUP))


def load() -> None:
    """Import every installed plugin that was not imported before.

    Raises:
      FailureError: one cannot be imported; the message names it.
    """
    for entry in importlib.metadata.entry_points(group=GROUP):
        if entry.value in _loaded:
            continue
        try:
            entry.load()
        except Exception as problem:
            raise FailureError(
                f"the installed plugin {entry.name!r} ({entry.value}) cannot be imported: "
                f"{type(problem).__name__}: {problem}. Repair or uninstall it."
            ) from problem
        _loaded.add(entry.value)
