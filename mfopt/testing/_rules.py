"""Assertions of the conformance checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mfopt.errors import UsageError

ERRORS = 5.0  # standard errors that a statistic may be off


def rule(holds: bool, broken: str) -> None:
    """Raise :class:`AssertionError` unless the rule holds; kept under ``python -O``."""
    if not holds:
        raise AssertionError(broken)


def refused(function: Callable[..., Any], *arguments: Any) -> bool:
    """Return True if the call raises :class:`UsageError`; other exceptions propagate."""
    try:
        function(*arguments)
    except UsageError:
        return True
    return False
