"""A limit of the address space (``ulimit -v``), told before JAX meets it.

XLA starts threads for each core, each with a stack and an arena of its own. Where one of them gets
no address space the process is aborted in the midst of C++, or its threads wait for one another for
ever, deaf to signals: neither can be caught.
"""

from __future__ import annotations

import functools
import math
import os
import resource
from pathlib import Path

from mfopt.errors import FailureError

GIB = 2**30
# bytes by VmPeak of a search at 2 × 4 and at 16 × 128, on one core and on two, and for each more
_JAX, _PER_CORE = 1.5 * GIB, 0.25 * GIB
_COUNTED = 0.5 * GIB  # Python and JAX in the counts of what work needs: here they are taken already


def usable() -> float:
    """Bytes that work may need, Python and JAX in it, under the limit; infinite without one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf
    try:
        resident = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        resident = 0
    return max(limit - resident, 0) + _COUNTED


@functools.cache
def require() -> None:
    """Refuse to begin work for which the limit leaves JAX too little.

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
