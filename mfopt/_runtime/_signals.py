"""Signals: what ends a process politely ends it as Ctrl-C does, and never in the middle of a save.

SIGTERM (a batch system's time limit, ``kill``) and SIGHUP (a terminal that closes) raise
KeyboardInterrupt in the main thread, so there is one way in which work is interrupted and one place
where its best result so far is kept. A signal that the process was told to ignore (``nohup``) stays
ignored.

An exception that is raised inside a callback of the garbage collector or of a weak reference, or
inside a ``__del__``, is printed and dropped by Python, and the signal with it: one that comes there
is sent once more, a moment later, and nothing is printed. Other libraries drop it silently (JAX has
dozens of bare ``except:``): the loops of long work ask, with each report, whether one came that
they should have felt (:func:`heard`).
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from mfopt._runtime._types import T

_POLITE = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


_DROPPED = ("_xla_gc_callback", "__del__")  # functions out of which no exception gets
_SOON = 0.05  # seconds

_last = int(signal.SIGINT)
_raised = 0  # interrupts so far


def exit_code() -> int:
    """Exit code of a process ended by a signal: 128 + its number; 130 after Ctrl-C."""
    return 128 + _last


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _last
    _last = number
    while frame is not None:
        if frame.f_code.co_name in _DROPPED:
            # not threading.Thread, whose locks the interrupted code may hold
            _thread.start_new_thread(_send, (number,))
            return
        frame = frame.f_back
    global _raised
    _raised += 1
    raise KeyboardInterrupt


def heard(report: Callable[[T], None]) -> Callable[[T], None]:
    """``report`` for a loop that every interrupt ends: one that was dropped on the way comes again.

    To be made where the loop begins. A signal that came since, while the loop still reports, was
    swallowed by someone below: the call after it raises KeyboardInterrupt.
    """
    raised_before = _raised

    def checked_report(event: T) -> None:
        report(event)
        if _raised != raised_before:
            raise KeyboardInterrupt

    return checked_report


def _send(number: int) -> None:
    time.sleep(_SOON)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP as Ctrl-C: KeyboardInterrupt. Without effect outside the main thread."""
    global _last
    _last = int(signal.SIGINT)
    with _handlers(dict.fromkeys([signal.SIGINT, *_POLITE], _interrupt)), _sent_again():
        yield


@contextlib.contextmanager
def _sent_again() -> Iterator[None]:
    """An interrupt that Python would drop comes once more, wherever it was raised."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _thread.start_new_thread(_send, (_last,))
        else:
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a short block that must be whole, such as a save, end before an interrupt comes through.

    Raises:
      KeyboardInterrupt: after the block, where a signal came during it.
    """
    with noted(patience=sys.maxsize) as came:
        yield
    if came:
        _interrupt(came[0], None)


@contextlib.contextmanager
def noted(*, patience: int = 1) -> Iterator[list[int]]:
    """Signals that ask for an end are only noted: for a loop that ends at a good moment by itself.

    The list that is yielded gets the number of each signal that comes. One beyond ``patience`` of
    them is impatient, and interrupts at once.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) > patience:
            _interrupt(number, frame)

    with _handlers(dict.fromkeys([signal.SIGINT, *_POLITE], note)):
        yield came


def interrupted(number: int, note: str) -> KeyboardInterrupt:
    """The interrupt for a signal that was :func:`noted`, with what its end has to say."""
    global _last
    _last = number
    stop = KeyboardInterrupt()
    stop.add_note(note)
    return stop


@contextlib.contextmanager
def _handlers(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    # None: a handler that was not set from Python, which could not be put back
    previous = {number: signal.getsignal(number) for number in handlers}
    changed = [n for n in handlers if previous[n] not in (signal.SIG_IGN, None)]
    try:
        for number in changed:
            signal.signal(number, handlers[number])
        yield
    finally:
        for number in changed:
            signal.signal(number, previous[number])
