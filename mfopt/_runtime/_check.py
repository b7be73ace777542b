"""Argument checks shared by every layer.

An error names the argument, its value, the rule and the way out, so each helper takes the
argument's public name.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, SupportsFloat

from mfopt._runtime._types import T
from mfopt.errors import FailureError as FailureError
from mfopt.errors import UsageError as UsageError

LEAST = 1e-300
LARGEST_EPSILON = 1e6
SIGMAS = (1e-6, 1e50)  # noise multipliers whose squares, and losses, can be computed with
MOST = 2**53  # whole numbers up to here are exact in float64
SINGLES = (1e-37, 1e38)  # what single precision holds
_LARGEST_C = 1e50  # and the smallest is 1 over it: squares over σ can be computed with
_READ_BITS = 66  # of a whole number whose digits are read
_LINE = 80  # characters of a value in a message


def reject(name: str, value: object, rule: str, way_out: str = "") -> UsageError:
    """The error for ``name`` having ``value`` where ``rule`` is required.

    ``name`` is the argument's name in Python; other arguments that ``rule`` and ``way_out`` speak
    of stand in backticks (`force=True`), so that the command line can name its options instead.
    """
    tail = f" {way_out}" if way_out else ""
    error = UsageError(f"{name} = {in_message(value)}: {rule}.{tail}")
    error.argument, error.value, error.rule, error.way_out = name, value, rule, way_out
    return error


@contextlib.contextmanager
def renamed_arguments(names: Mapping[str, str]) -> Iterator[None]:
    """Name refused arguments as the caller knows them.

    Args:
      names: name inside the block -> name of the caller's argument.
    """
    try:
        yield
    except UsageError as problem:
        if problem.argument is None:
            raise
        parts = problem.argument.split(", ")
        typed = ", ".join(names.get(part, part) for part in parts)
        raise reject(typed, problem.value, problem.rule, problem.way_out) from None


def optional(check: Callable[..., T], name: str, value: object, **limits: object) -> T | None:
    """None, or ``value`` as ``check`` gives it."""
    return None if value is None else check(name, value, **limits)


def printable(text: str) -> str:
    """``text`` with control characters, line ends and changes of direction as escapes.

    For text from files and other people's programs, which must not steer a terminal.
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def kind(name: str, value: object, expected: type, way_out: str = "") -> Any:
    """``value``, an instance of ``expected``."""
    if not isinstance(value, expected):
        raise reject(name, type(value).__name__, f"must be of class {expected.__name__}", way_out)
    return value


def word(name: str, value: object) -> str:
    """``value``, a text to be printed in a line: not empty, without control characters."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        rule = "must be a word or some, such as example or user, without control characters"
        raise reject(name, printable(value) if isinstance(value, str) else value, rule)
    return value


def choice(name: str, value: object, choices: Iterable[str], way_out: str = "") -> str:
    """``value``, one of the ``choices``."""
    words = [*choices]
    if not isinstance(value, str) or value not in words:
        raise reject(name, value, f"must be one of {', '.join(words)}", way_out)
    return value


def path(name: str, value: object) -> Path:
    """``value`` as a path: a text that is not empty, or a ``Path``."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise reject(name, type(value).__name__, "must be a path: a str or pathlib.Path")
    possible = bool(text.strip())
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # nothing is there yet
    except (OSError, ValueError):  # too long, or with a null character
        possible = False
    if not possible:
        raise reject(name, printable(text), "cannot be the path of a file or folder")
    return Path(text)


def file(name: str, value: object) -> Path:
    """``value`` as a path where there is a file."""
    checked = path(name, value)
    if not checked.is_file():
        rule = "is not a file" if checked.exists() else "does not exist"
        raise reject(name, str(checked), rule)
    return checked


def _float(name: str, value: Any) -> float:
    """``value`` as a float: a number of Python, NumPy or JAX, neither text nor bool."""
    if isinstance(value, str | bytes | bool) or str(getattr(value, "dtype", "")) == "bool":
        raise reject(name, value, "must be a number")
    try:
        return float(value)
    except OverflowError:
        raise reject(name, value, "must be finite") from None
    except (TypeError, ValueError):
        raise reject(name, value, "must be a number") from None


def finite(name: str, value: SupportsFloat) -> float:
    """``value`` as a finite float."""
    number = _float(name, value)
    if not math.isfinite(number):
        raise reject(name, value, "must be finite")
    return number


def real(name: str, value: SupportsFloat, *, at_most: float = math.inf) -> float:
    """``value`` as a float in [0, ``at_most``], which may be infinite where that is."""
    number = _float(name, value)
    if not 0 <= number <= at_most:
        raise reject(name, value, f"must lie in [0, {at_most:g}]")
    return number


def positive(name: str, value: SupportsFloat) -> float:
    """``value`` as a finite float > 0, and not so small that its reciprocal overflows."""
    number = finite(name, value)
    if number <= 0:
        raise reject(name, value, "must be greater than 0")
    if number < LEAST:
        raise reject(name, value, f"must be at least {LEAST:g} to be computed with")
    return number


def epsilon(name: str, value: SupportsFloat) -> float:
    """``value`` as an ε to reach: > 0, and small enough to say anything."""
    number = positive(name, value)
    if number > LARGEST_EPSILON:
        rule = f"must be at most {LARGEST_EPSILON:g}: a larger ε is no meaningful guarantee"
        raise reject(name, value, rule)
    return number


def noise_multiplier(value: SupportsFloat, name: str = "noise_multiplier") -> float:
    """``value`` as a σ to account for: > 0, and neither so small nor so large that sums break."""
    return _between(name, value, SIGMAS)


def single(name: str, value: SupportsFloat) -> float:
    """``value`` as a float > 0 to train with: single precision must hold it."""
    return _between(name, value, SINGLES, ": training is in single precision")


def _between(name: str, value: SupportsFloat, ends: tuple[float, float], why: str = "") -> float:
    """``value`` as a float > 0 between the ``ends``."""
    number = positive(name, value)
    if not ends[0] <= number <= ends[1]:
        raise reject(name, value, f"must lie between {ends[0]:g} and {ends[1]:g}{why}")
    return number


def scale_of_c(largest: float) -> None:
    """Refuse a C whose ``largest`` norm, or entry, leaves no room in float64 for squares."""
    if not 1 / _LARGEST_C <= largest <= _LARGEST_C:
        rule = f"its largest entry must lie in [{1 / _LARGEST_C:g}, {_LARGEST_C:g}]"
        way_out = "Multiply C by a constant: σ scales with it, and the mechanism stays the same."
        raise reject("C", largest, rule, way_out)


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
    if 0 < number < LEAST:
        raise reject(name, value, f"must be at least {LEAST:g} to be computed with")
    return number


def integer(name: str, value: Any, *, at_least: int = 1, at_most: int | None = MOST) -> int:
    """``value`` as an int in [at_least, at_most]; a bool or a fractional number is refused."""
    if isinstance(value, bool):
        raise reject(name, value, "must be a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        raise reject(name, value, "must be a whole number") from None
    if number < at_least:
        raise reject(name, value, f"must be at least {at_least}")
    if at_most is not None and number > at_most:
        raise reject(name, number, f"must be at most {at_most}")
    return number


def seed(name: str, value: object) -> int:
    """``value`` as an int >= 0, however large: a run's secret ones have 256 bits."""
    return integer(name, value, at_least=0, at_most=None)


def pinned(name: str, value: object) -> int:
    """``value`` as a seed that somebody types: an int >= 0 of 64 bits."""
    return integer(name, value, at_least=0, at_most=2**64 - 1)


def in_message(value: object) -> str:
    """``value`` as messages show it: its name, or its class where it would not fit into a line."""
    if isinstance(value, int) and value.bit_length() > _READ_BITS:
        is_written = value.bit_length() < 10_000  # a longer one takes seconds to write
        return f"{Decimal(value):.2e}" if is_written else "a number of thousands of digits"
    text = str(getattr(value, "__name__", repr(value)))
    is_line = isinstance(value, str) or (len(text) <= _LINE and "\n" not in text)
    return text if is_line else type(value).__name__
