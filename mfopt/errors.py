"""The two errors that mfopt raises on purpose. Anything else that escapes it is a fault in it.

Both derive from the built-in exception that callers would expect, so ``except ValueError`` works.
"""

from __future__ import annotations


class UsageError(ValueError):
    """An argument broke a documented rule. The command line exits with code 2 on it."""


class FailureError(RuntimeError):
    """Valid input, but no result can be given (not certified, out of range, ...). Exit code 1."""
