"""Classes of strategies and schemes by their kind, also of installed plugins.

Kinds that this version no longer has are refused by a line that names the last that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from mfopt._runtime import _check, _plugins
from mfopt._runtime._types import T

LAST_VERSION = {"k-of-n": "0.2.0", "cyclic-blocks": "0.2.0"}


def find(name: str, kind: object, registered: Mapping[str, type[T]], way_out: str = "") -> type[T]:
    """The class of a kind; plugins are loaded where it is not registered yet.

    Args:
      name: of the argument that errors name.
      kind: what a file or a command names.
      registered: class of each kind that is known so far; loading plugins adds to it.
      way_out: for one that is unknown.

    Raises:
      UsageError: there is no such kind, or only an earlier version had it.
    """
    if isinstance(kind, str) and kind not in registered:
        _plugins.load()
        if kind not in registered and kind in LAST_VERSION:
            version = LAST_VERSION[kind]
            way_out = f"mfopt {version} reads it: pip install mfopt=={version}"
            raise _check.reject(name, kind, "is not in this version", way_out)
    return registered[_check.choice(name, kind, sorted(registered), way_out)]
