"""Memory and time limits of work before it begins: refuse what cannot fit, announce what takes
long.

Costs are counted at their modules; here is how much memory is free, and how fast this machine is
against the one that they were measured on.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mfopt import words
from mfopt._runtime import _address_space, _check
from mfopt.progress import Progress, Report

GIB = 2**30
SPEED = 50.0  # of the two cores that costs were measured on, as :func:`speed`
_SLOWEST = 3.0  # times slower than those, at most
_SPARE = 0.9  # share of what is free that may be planned with
_LONG = 120.0  # seconds worth telling of
# seconds too short for it on any machine: neither speed is then measured, by 25 products, nor do
# threads of the BLAS wait for more
SHORT = _LONG / _SLOWEST


def free_memory() -> int:
    """Bytes that this process can still take, as far as the system says; 2^63 where it does not.

    The least of what the machine has free and what control groups and limits of this process allow.
    """
    limits = [2**63]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        facts = dict(line.split(":", 1) for line in lines)
        limits.append(int(facts["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):  # not Linux: what is installed, not what is free
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            allowed = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such limit
            continue
        limits.append(max(allowed, 0))
    return int(min(*limits, _address_space.usable()))


def usable_memory() -> float:
    """Bytes that may be planned with."""
    return free_memory() * _SPARE


def require(name: str, value: int, need: Callable[[int], float]) -> None:
    """Refuse ``value`` if the memory it needs is not free, and say what would fit.

    Args:
      name: of the argument that the need grows with.
      value: what was asked for.
      need: bytes for a value of that argument; grows with it.

    Raises:
      UsageError: with the need, what is free, and the largest value that fits.
    """
    free = usable_memory()
    if need(value) <= free:
        return
    low, high = 0, value
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if need(middle) <= free else (low, middle)
    rule = f"needs about {need(value) / GIB:,.1f} GiB of memory, and {free / GIB:,.1f} GiB are free"
    way_out = f"Here {low} would fit." if low else "Nothing as large as this fits on this machine."
    raise _check.reject(name, value, rule, way_out)


@functools.cache
def speed() -> float:
    """Operations on doubles, in matrix products, that this machine makes now: 10⁹ a second."""
    size = 256
    matrix, best = np.ones((size, size)), np.inf
    for _ in range(25):  # on a busy machine few of them are undisturbed
        begun = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - begun)
    return float(2 * size**3 / best / 1e9)


def on_this_machine(seconds: float) -> float:
    """Estimated seconds on this machine's CPU of work that took ``seconds`` where it was measured.

    A machine that seems far slower is mostly busy at this moment, and will not be all the time.
    """
    return seconds * min(SPEED / speed(), _SLOWEST)


def announce(seconds: float, report: Report, *, work: str = "this", note: str = "") -> None:
    """Report the estimated duration of long work, in one line.

    Args:
      seconds: estimated, on this machine.
      report: callback, called once; its note stays in view.
      work: what takes so long.
      note: what the user can do about it, or what is kept.
    """
    if seconds >= _LONG:
        text = f"{work} may take about {words.duration(seconds)} here"
        report(Progress("starting", note=f"{text} ({note})" if note else text, lasting=True))
