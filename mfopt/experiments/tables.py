"""Tables as CSV and as aligned text."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV.

    >>> csv_text(["a", "b"], [(1, None)])
    'a,b\\n1,\\n'
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


def csv_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as CSV, in the order of the first one's."""
    header = list(rows[0])
    return csv_text(header, ([row[name] for name in header] for row in rows))


def aligned(header: Sequence[str], rows: Iterable[Sequence[Any]], least: int = 0) -> str:
    """A table as lines of text: the first column to the left, at least ``least`` for each other.

    >>> print(aligned(["of", "x"], [("one", 0.12345), ("two", None)]))
    of        x
    one  0.1235
    two       -
    """
    lines = [[*map(shown, row)] for row in (header, *rows)]
    width, *each = (max(map(len, column)) for column in zip(*lines, strict=True))
    widths = [max(width + 2, least) for width in each]
    return "\n".join(
        f"{name:<{width}}" + "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        for name, *cells in lines
    )


def shown(value: Any) -> str:
    """A value of a table for people: four digits of a number, "-" for none.

    >>> shown(0.12345), shown(None)
    ('0.1235', '-')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
