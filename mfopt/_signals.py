"""Signals: what ends a process politely ends it as Ctrl-C does, and never in the middle of a save.

SIGTERM (a batch system's time limit, ``kill``) and SIGHUP (a terminal that closes) raise
KeyboardInterrupt in the main thread, so there is one way in which work is interrupted and one place
where its best result so far is kept. A signal that the process was told to ignore (``nohup``) stays
ignored.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_POLITE = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


_last = int(signal.SIGINT)


def exit_code() -> int:
    """Of a process that a signal has ended: 128 + its number; 130 after Ctrl-C."""
    return 128 + _last


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _last
    _last = number
    raise KeyboardInterrupt


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP as KeyboardInterrupt. Without effect outside the main thread."""
    global _last
    _last = int(signal.SIGINT)
    with _handlers(dict.fromkeys(_POLITE, _interrupt)):
        yield


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a short block that must be whole, such as a save, end before an interrupt comes through.

    Raises:
      KeyboardInterrupt: after the block, where a signal came during it.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with _handlers(dict.fromkeys([signal.SIGINT, *_POLITE], note)):
        yield
    if came:
        _interrupt(came[0], None)


@contextlib.contextmanager
def _handlers(wanted: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    # None: a handler that was not set from Python, which could not be put back
    before = {number: signal.getsignal(number) for number in wanted}
    changed = [n for n in wanted if before[n] not in (signal.SIG_IGN, None)]
    try:
        for number in changed:
            signal.signal(number, wanted[number])
        yield
    finally:
        for number in changed:
            signal.signal(number, before[number])
