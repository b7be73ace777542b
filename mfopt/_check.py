"""Argument checks shared by every layer.

An error names the argument, its value, the rule and the way out, so each helper takes the
argument's public name.
"""

from __future__ import annotations

import math
import operator
from typing import Any, SupportsFloat

from mfopt.errors import FailureError, UsageError

__all__ = [
    "FailureError",
    "UsageError",
    "finite",
    "integer",
    "non_negative",
    "positive",
    "probability",
    "reject",
]


def reject(name: str, value: Any, rule: str, way_out: str = "") -> UsageError:
    """The error for ``name`` having ``value`` where ``rule`` is required.

    ``name`` is the argument's name in Python; other arguments that ``rule`` and ``way_out`` speak
    of stand in backticks (`force=True`), so that the command line can name its options instead.
    """
    tail = f" {way_out}" if way_out else ""
    error = UsageError(f"{name} = {value!r}: {rule}.{tail}")
    error.argument, error.value, error.rule, error.way_out = name, value, rule, way_out
    return error


def printable(text: str) -> str:
    """``text`` with control characters, line ends and changes of direction as escapes.

    For text from files and other people's programs, which must not steer a terminal.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def finite(name: str, value: SupportsFloat) -> float:
    """``value`` as a finite float."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise reject(name, value, "must be a number") from None
    if not math.isfinite(number):
        raise reject(name, value, "must be finite")
    return number


def positive(name: str, value: SupportsFloat) -> float:
    """``value`` as a finite float > 0."""
    number = finite(name, value)
    if number <= 0:
        raise reject(name, value, "must be greater than 0")
    return number


def non_negative(name: str, value: SupportsFloat) -> float:
    """``value`` as a finite float >= 0."""
    number = finite(name, value)
    if number < 0:
        raise reject(name, value, "must not be negative")
    return number


def probability(name: str, value: SupportsFloat, *, closed: bool = False) -> float:
    """``value`` as a float in (0, 1), or in [0, 1] where ``closed``."""
    number = finite(name, value)
    inside = 0 <= number <= 1 if closed else 0 < number < 1
    if not inside:
        raise reject(name, value, f"must lie in {'[0, 1]' if closed else '(0, 1)'}")
    return number


def integer(name: str, value: Any, *, at_least: int = 1) -> int:
    """``value`` as an int >= ``at_least``; a bool or a fractional number is refused."""
    if isinstance(value, bool):
        raise reject(name, value, "must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise reject(name, value, "must be a whole number") from None
    if number < at_least:
        raise reject(name, value, f"must be at least {at_least}")
    return number
