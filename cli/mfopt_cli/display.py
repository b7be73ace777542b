"""Output of commands: tables that fit the terminal, one JSON object, plain text in a pipe.

On a terminal rich lays out and colours (NO_COLOR and TERM=dumb are honoured). Elsewhere every row
is one line, whatever its length, so that output can be searched and cut.
"""

from __future__ import annotations

import codecs
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mfopt._runtime._types import JsonObject
from mfopt_cli.messages import SCHEMA

Rows = list[tuple[str, str]]  # of a table: names and values
_NO_WRAP = 10_000  # columns of a pipe
# for terminals and files whose encoding lacks the letter
# fmt: off
_SPELLED = {
    "ε": "epsilon", "δ": "delta", "σ": "sigma", "β": "beta", "∞": "inf", "√": "sqrt",
    "×": "x", "·": "*", "±": "+-", "≤": "<=", "≥": ">=", "→": "->", "…": "...",
    "⁻": "^-", "¹": "1", "²": "2", "‖": "|", "│": "|",
    "–": "-", "—": "-", "━": "-", "╸": "-", "╺": "-", "─": "-",
}
# fmt: on


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lost = error.object[error.start : error.end]
    return "".join(_SPELLED.get(letter, "?") for letter in lost), error.end


codecs.register_error("mfopt-spell", _spell)


def speak_plainly() -> None:
    """Make standard output and error spell what their encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="mfopt-spell")


def console(stream: IO[str] | None = None) -> Console:
    """A console on ``stream`` (standard output); no markup, no guessing of highlights."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else _NO_WRAP
    return Console(
        file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=False
    )


def fitting(text: str, stream: IO[str] | None = None) -> str:
    """``text`` as the stream's encoding can show it; before layout, so that columns stay even."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "mfopt-spell").decode(encoding)


def table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """A name and its value a row; long values go on in their own column."""
    screen = console()
    grid = Table.grid(padding=(0, 2, 0, 0))
    narrow = screen.width < 60
    grid.add_column(no_wrap=not narrow, style="dim" if screen.is_terminal else "")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(fitting(f"  {name}")), Text(fitting(value)))
    print_text(title, style="bold")
    _print(screen, grid)


def columns(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; where the terminal is too narrow for it, each row becomes a block of lines."""
    screen = console()
    headers = [fitting(text) for text in headers]
    cells = [[fitting(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    # words may be folded, numbers may not
    narrowest = [
        min(width, 16) if _words(column) else width
        for width, column in zip(widths, zip(*cells, strict=True), strict=True)
    ]
    if sum(narrowest) + 2 * (len(narrowest) - 1) > screen.width:
        for row in cells:
            table(f"{headers[0]} {row[0]}", list(zip(headers[1:], row[1:], strict=True)))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in zip(*cells, strict=True):
        numbers = all(cell[:1].isdigit() or cell in ("", "-") for cell in column)
        grid.add_column(
            no_wrap=not _words(column), overflow="fold", justify="right" if numbers else "left"
        )
    grid.add_row(*(Text(text, style="bold" if screen.is_terminal else "") for text in headers))
    for row in cells:
        grid.add_row(*(Text(cell) for cell in row))
    _print(screen, grid)


def _words(cells: Sequence[str]) -> bool:
    return any(" " in cell for cell in cells)


def _print(screen: Console, grid: Table) -> None:
    """Print without the blanks that pad the last column."""
    if screen.is_terminal:
        screen.print(grid)
        return
    with screen.capture() as captured:
        screen.print(grid)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_text(text: str, style: str = "") -> None:
    """One text on standard output, folded at words on a terminal."""
    screen = console()
    if screen.is_terminal:
        screen.print(Text(fitting(text), style=style))
    else:
        click.echo(text)


def json_object(values: JsonObject | None) -> None:
    """Print one JSON object of schema :data:`SCHEMA` (docs/json.md): ``values`` and their command.

    Numbers that are not finite become null, as JSON has none.
    """
    context = click.get_current_context(silent=True)
    name = "" if context is None else context.command_path.partition(" ")[2]
    print_json({"schema": SCHEMA, "command": name, **_plain(values or {})})


def print_json(values: JsonObject) -> None:
    """Print one JSON object as it is."""
    click.echo(json.dumps(values, indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """JSON-compatible copy of ``value``; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "item"):
        return _plain(value.item())
    return value
