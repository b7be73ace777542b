"""Weak scaling: so many samples for each device, on 1, 2, 4, 8 devices of this machine.

    mfopt bench devices --out artifacts/bench-devices.json

A process for each number of devices; a CPU is shown to JAX as so many. They share its cores, so
that the wall time of equal work for each cannot stay as it is: what can be seen is whether CPU
seconds grow by more than the work, that is what it costs to spread it. On accelerators wall time
tells. Both are medians of calls after the first, which compiles: of a certificate's sums, and of
one tangent of a search, whose design points and tables every device makes for itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Bench, Options, child, cpu

BINS, EPOCHS, EPSILON, DELTA, SIGMA = 32, 4, 2.0, 1e-5, 2.0

bench = Bench(
    __file__,
    __doc__,
    devices=([1, 2, 4, 8], "How many; a list."),
    samples=(2**15, "Of a certificate, for each device."),
    frozen=(2**14, "Of a search, for each device."),
    repeats=(9, "Calls that medians are of."),
    here=(False, "Only the devices that JAX sees as it is."),
)
parser, main = bench.parser, bench.main


def timed(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians of CPU and wall seconds of so many calls; one before them compiles."""
    work()
    spent = []
    for _ in range(rounds):
        wall = time.perf_counter()
        spent.append((cpu(work)[1], time.perf_counter() - wall))
    cpu_seconds, seconds = np.median(spent, axis=0)
    return {"CPU seconds": float(cpu_seconds), "seconds": float(seconds)}


def here(options: Options) -> dict[str, Any]:
    """Times on the devices of this process, with so many samples for each."""
    import jax

    from mfopt.accounting.monte_carlo import chunked
    from mfopt.accounting.monte_carlo.evidence import Point
    from mfopt.accounting.monte_carlo.protocol import law
    from mfopt.optimize import kinds
    from mfopt.optimize.objective import AmplifiedObjective, log_rmse
    from mfopt.sampling import BallsInBins
    from mfopt.strategies import BLT
    from mfopt.workloads import PrefixSums

    devices = jax.local_device_count()
    scheme, strategy = BallsInBins(BINS, EPOCHS), BLT(np.array([0.3, 0.1]), np.array([0.5, 0.9]))
    loss, point = law(scheme).loss(strategy), Point(SIGMA, EPSILON)
    tilt, key = loss.least("remove", point), chunked.seed_key(0)
    mapping = kinds.find("blt").parameterize(strategy, scheme.iterations)
    error = log_rmse(PrefixSums(), scheme.iterations)
    what = error, mapping, scheme, EPSILON, DELTA
    target = AmplifiedObjective(*what, samples=devices * options.frozen, seed=0)
    work = {
        "certificate": lambda: loss.pilot(tilt, point, devices * options.samples, key),
        "tangent": lambda: target.placed(mapping.start),
    }
    return {"devices": devices, **{k: timed(v, options.repeats) for k, v in work.items()}}


@bench.work
def measured(options: Options) -> dict[str, Any] | None:
    """A row for each number of devices."""
    if options.here:
        print(json.dumps(here(options)))
        return None
    from mfopt.experiments import runner

    words = [f"--{name}={getattr(options, name)}" for name in ("samples", "frozen", "repeats")]
    rows = []
    for devices in options.devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count="
        shown = {"XLA_FLAGS": f"{flags}{devices}".strip(), "JAX_PLATFORMS": "cpu"}
        row, problem = child(__file__, "--here", *words, **shown)
        if not row:
            raise SystemExit(problem)
        rows.append(row)
        print(json.dumps(row), flush=True)
    first = rows[0]
    for row in rows:
        for what in ("certificate", "tangent"):
            work = row["devices"] / first["devices"]
            spent = row[what]["CPU seconds"] / first[what]["CPU seconds"]
            row[what]["CPU seconds over the work"] = spent / work
    return {
        "device": runner.device(),
        "cores": os.cpu_count(),
        "devices are": f"virtual: they share {os.cpu_count()} cores, so that wall time grows with "
        "the work; CPU seconds over the work of the first row show what spreading costs",
        "scheme": f"balls-in-bins, {EPOCHS} × {BINS}, BLT",
        "samples per device, certificate": options.samples,
        "samples per device, search": options.frozen,
        "load average": os.getloadavg()[0],
        "rows": rows,
    }


if __name__ == "__main__":
    raise SystemExit(main())
