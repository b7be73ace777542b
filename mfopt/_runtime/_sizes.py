"""Memory limits of work before it begins: what cannot fit is refused.

Costs are counted at their modules; here is how much memory is free.

A limit of the address space (``ulimit -v``) is told before JAX meets it. XLA starts threads for
each core, each with a stack and an arena of its own. Where one of them gets no address space the
process is aborted in the midst of C++, or its threads wait for one another for ever, deaf to
signals: neither can be caught.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Callable
from pathlib import Path

from mfopt._runtime import _check
from mfopt.errors import FailureError

GIB = 2**30
_SPARE = 0.9  # share of what is free that may be planned with
# bytes by VmPeak of a search at 2 × 4 and at 16 × 128, on one core and on two, and for each more
_JAX, _PER_CORE = 1.5 * GIB, 0.25 * GIB
_COUNTED = GIB // 2  # Python and JAX in the counts of what work needs: here they are taken already


def free_memory() -> int:
    """Bytes that this process can still take, as far as the system says; 2^63 where it does not.

    The least of what the machine has free and what control groups and limits of this process allow.
    """
    limits = [2**63]
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
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
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        try:
            resident = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        except OSError:  # not Linux
            resident = 0
        limits.append(max(address_space - resident, 0) + _COUNTED)
    return int(min(limits))


@functools.cache
def require_address_space() -> None:
    """Refuse to begin work for which the limit of the address space leaves JAX too little.

    Raises:
      FailureError: with the limit, what is needed, and the way out.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    need = _JAX + _PER_CORE * (cores or 1)
    if resource.RLIM_INFINITY != limit < need:
        raise FailureError(
            f"the address space of this process is limited to {limit / GIB:.1f} GiB, and JAX takes "
            f"about {need / GIB:.1f} GiB of it before any work on {cores} cores. Raise the limit "
            "(`ulimit -v`); memory is better limited by a control group"
        )


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


def iterations(n: int, bytes_each: float = 64) -> int:
    """``n``, a number of iterations that arrays of ``bytes_each`` bytes an iteration fit for."""
    require("n", _check.integer("n", n), bytes_each.__mul__)
    return n
