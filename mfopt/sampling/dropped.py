"""Kinds of strategies and schemes that this version no longer has, and the last that reads them."""

from __future__ import annotations

from mfopt._runtime import _check

LAST_VERSION = {"k-of-n": "0.2.0", "cyclic-blocks": "0.2.0"}


def refuse(name: str, kind: object) -> None:
    """Raise :class:`UsageError` for a kind that an earlier version had."""
    if isinstance(kind, str) and kind in LAST_VERSION:
        way_out = f"mfopt {LAST_VERSION[kind]} reads it: pip install mfopt=={LAST_VERSION[kind]}"
        raise _check.reject(name, kind, "is not in this version", way_out)
