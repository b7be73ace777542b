"""The errors that mfopt raises on purpose. Anything else that escapes it is a fault in it.

They derive from the built-in exception that callers would expect, so ``except ValueError`` works.
"""

from __future__ import annotations

from typing import Any


class UsageError(ValueError):
    """An argument broke a documented rule. The command line exits with code 2 on it.

    Attributes:
      argument: name in Python of the refused argument, which the command line replaces by the
        option that was typed; None where the message was written as one text.
      value: what was given for it.
      rule: what the value broke.
      way_out: what to do instead; may be empty.
    """

    argument: str | None = None
    value: Any = None
    rule: str = ""
    way_out: str = ""


class FailureError(RuntimeError):
    """Valid input, but no result can be given (not certified, out of range, ...). Exit code 1."""


class UncertifiedError(FailureError):
    """A search ended, and no σ could be certified for its C.

    Attributes:
      best: the C, with an *estimate* for a guarantee; not for training.
    """

    def __init__(self, message: str, best: Any) -> None:
        super().__init__(message)
        self.best = best


class InterruptedFactorization(KeyboardInterrupt):
    """Interrupt of :func:`mfopt.factorize` by the user.

    Attributes:
      best: the best C so far, with an *estimate* for a guarantee; not for training.
    """

    def __init__(self, best: Any) -> None:
        super().__init__("interrupted; the best C so far, not certified, is in .best")
        self.best = best
