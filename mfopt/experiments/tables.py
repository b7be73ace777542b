"""Tables as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence


def csv_text(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV.

    >>> csv_text(["a", "b"], [(1, None)])
    'a,b\\n1,\\n'
    """
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


def csv_of_rows(rows: Sequence[Mapping[str, object]]) -> str:
    """Rows with the same keys as CSV, in the order of the first one's."""
    header = list(rows[0])
    return csv_text(header, ([row[name] for name in header] for row in rows))
