"""One progress display for all stages of a command, on standard error.

On a terminal two lines are redrawn a few times a second; elsewhere a plain line is written now
and then. The time left in a stage comes from the pace between finished pieces of work: what comes
before the first of them is taken for compilation and not counted. It is shown for steps of training
once a fifth of them was timed; of other stages it was measured off by more than a factor of two.
"""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace

import click
from rich.console import Group, RenderableType
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mfopt import words
from mfopt.progress import Progress
from mfopt_cli import display

COMPILING = "compiling (first run only)"  # what comes before the first report of JAX's work
_TIMED = 0.2  # part of a stage that is timed before its end is told
_SHORTEST = 10  # seconds left that are told: what follows the last step is not in them
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0  # seconds between lines where nothing can be redrawn


def of_command(arguments: SimpleNamespace, stage: str = "starting") -> Live:
    """The progress of a command, unless it is asked to be quiet or to print JSON."""
    return Live(not arguments.quiet and not arguments.as_json, stage)


class Live:
    """Shows what it is told; a context manager, so that a terminal is left as it was found."""

    def __init__(self, enabled: bool, stage: str = "starting") -> None:
        self._enabled = enabled
        self._console = display.console(sys.stderr)
        terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._event = Progress(stage)
        self._started = self._told = time.perf_counter()
        self._first: tuple[float, float] | None = None  # time and fraction at a finished piece
        self._shown, self._pause = 0.0, _FIRST_PAUSE
        self._closed = threading.Event()
        self._screen: RichLive | None = None
        if enabled and terminal:
            self._screen = RichLive(
                get_renderable=self._render,
                console=self._console,
                transient=True,
                refresh_per_second=8,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Live:
        if self._screen is not None:
            self._screen.start(refresh=True)
        elif self._enabled:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._screen is not None:
            self._screen.stop()

    def __call__(self, event: Progress) -> None:
        """Take note of where the work stands."""
        if not self._enabled or self._closed.is_set():
            return
        clock = time.perf_counter()
        new = event.stage != self._event.stage
        if event.lasting:
            if self._screen is not None:
                self._console.print(Text(display.fitting(event.note, sys.stderr)))
            else:
                click.echo(event.note, err=True)
            if event.total is None:
                return
        if new:
            self._first = None
        if self._first is None and event.fraction:
            self._first = clock, event.fraction
        if new or event.fraction != self._event.fraction:
            self._told = clock
        self._event = event
        if self._screen is None and (new or clock - self._shown > self._pause):
            self._line(clock)

    def _tick(self) -> None:
        """Say that work continues, however long one piece of it takes."""
        while not self._closed.wait(_FIRST_PAUSE):
            clock = time.perf_counter()
            if clock - max(self._shown, self._started) > max(self._pause, 5 * _FIRST_PAUSE):
                self._line(clock)

    def _line(self, clock: float) -> None:
        self._shown = clock
        self._pause = min(max(_FIRST_PAUSE, 0.1 * (clock - self._started)), _LONGEST_PAUSE)
        position = "  ".join(filter(None, [self._count(), self._event.note, self._left(clock)]))
        click.echo(
            f"[{self._elapsed(clock)}] {self._event.stage}{': ' if position else ''}{position}",
            err=True,
        )

    def _elapsed(self, clock: float) -> str:
        return words.duration(clock - self._started)

    def _count(self) -> str:
        event = self._event
        if event.total is None:
            return f"{event.done:,.10g} {event.unit}" if event.done else ""
        preposition = "of at most" if event.at_most else "of"
        if event.unit == "bytes":
            return f"{words.size(event.done)} {preposition} {words.size(event.total)}"
        return f"{event.done:,.10g} {preposition} {event.total:,.10g} {event.unit}".rstrip()

    def _left(self, clock: float) -> str:
        begun, fraction_then = self._first or (clock, 1.0)
        timed = self._event.fraction - fraction_then
        if timed < _TIMED or not self._event.paced:
            return ""
        seconds = (1 - self._event.fraction) * (self._told - begun) / timed - (clock - self._told)
        return f"about {words.duration(seconds)} left" if seconds >= _SHORTEST else ""

    def _render(self) -> RenderableType:
        event, clock = self._event, time.perf_counter()

        def line(text: str, style: str = "") -> Text:
            return Text(display.fitting(text, sys.stderr), style, no_wrap=True, overflow="ellipsis")

        headline = line(f"{event.stage}  ", "bold")
        headline.append(
            line("  ".join(filter(None, [self._count(), self._elapsed(clock)])), "not bold")
        )
        lines: list[RenderableType] = [headline]
        if event.total:
            width = min(40, max(self._console.width - 2, 10))
            bar = Table.grid()  # a row of its own: a bar by itself does not end its line
            bar.add_row(ProgressBar(total=1, completed=event.fraction, width=width))
            lines.append(bar)
        return Group(*lines, *(line(x, "dim") for x in (self._left(clock), event.note) if x))
