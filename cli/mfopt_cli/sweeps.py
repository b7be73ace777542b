"""Arguments that may be swept: ``1:64``, ``0.5:8:0.5``, ``1e-9:1e-5:x10``, ``1,2,4``, one value."""

from __future__ import annotations

import math
from typing import Any

import click

from mfopt._runtime._types import JsonObject
from mfopt.errors import UsageError
from mfopt_cli import options


class Sweep(click.ParamType):  # type: ignore[type-arg]  # no runtime argument in click 8.1
    """A number, a range ``start:stop[:step]`` or a list ``a,b,c``, of ``kind``, up to ``maximum``.

    A range includes both its ends; a step ``xF`` multiplies by F. Converts to a tuple of values; an
    option that was not given stays None.
    """

    def __init__(self, kind: type[int] | type[float], maximum: int | None = None) -> None:
        self.kind, self.maximum = kind, maximum
        self.name = "integers" if kind is int else "numbers"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "INT|A:B[:STEP]|A,B,.." if self.kind is int else "NUM|A:B[:STEP]|A,B,.."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        if isinstance(value, int | float):
            return (value,)
        try:
            ranged = ":" in value
            numbers = (
                self._range(value.split(":")) if ranged else map(self._number, value.split(","))
            )
            return tuple(options.at_most(self.maximum, number, param) for number in numbers)
        except UsageError:
            raise
        except ValueError as problem:
            self.fail(f"{value!r}: {problem}", param, ctx)

    def _number(self, text: str) -> float:
        return options.whole(text) if self.kind is int else float(text)

    def _range(self, parts: list[str]) -> tuple[float, ...]:
        if len(parts) not in (2, 3):
            raise ValueError("a range is FIRST:LAST, FIRST:LAST:STEP or FIRST:LAST:xFACTOR")
        start, stop = self._number(parts[0]), self._number(parts[1])
        increment = parts[2] if len(parts) == 3 else "1"
        factor = float(increment[1:]) if increment.startswith("x") else None
        step = self._number(increment) if factor is None else 1
        if not (math.isfinite(start) and math.isfinite(stop) and step > 0 and stop >= start):
            raise ValueError("a range needs FIRST <= LAST and STEP > 0")
        if factor is not None:
            if not (start > 0 and 1 < factor < math.inf):
                raise ValueError("xFACTOR needs FIRST > 0 and FACTOR > 1")
            width = math.log(stop / start) / math.log(factor)
        else:
            width = (stop - start) / step
        if len(parts) == 2 and 0 < width < 1:
            rule = "the step 1 leaves only the two ends: give FIRST:LAST:STEP or FIRST:LAST:xFACTOR"
            raise ValueError(rule)
        if width >= options.MOST_POINTS:
            rule = f"{math.floor(width) + 1} values; a sweep has at most {options.MOST_POINTS}"
            raise ValueError(rule)
        steps = range(math.ceil(width * (1 - 1e-12)))
        inner = (start + i * step if factor is None else start * factor**i for i in steps)
        return *(self.kind(value) for value in inner), stop


def option(
    name: str, kind: type[int] | type[float], text: str, maximum: int | None = None, **keywords: Any
) -> options.Decorator:
    """An option that may be swept.

    Args:
      name, text, keywords: as for :func:`mfopt_cli.options.option`.
      kind, maximum: as for :class:`Sweep`.
    """
    return options.option(name, Sweep(kind, maximum), text, **keywords)


def points(
    arguments: dict[str, tuple[float, ...] | None],
) -> tuple[str | None, list[JsonObject]]:
    """(name of the swept argument or None, one dictionary of plain values per point).

    Raises a usage error if more than one argument has several values.
    """
    swept = [name for name, values in arguments.items() if values is not None and len(values) > 1]
    if len(swept) > 1:
        raise click.UsageError(f"only one argument can be swept, not {' and '.join(swept)}")
    point = {option: values and values[0] for option, values in arguments.items()}
    if not swept:
        return None, [point]
    (name,) = swept
    return name, [{**point, name: value} for value in arguments[name] or ()]
