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
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mfopt_cli.benchmarks import Parser, count, keep, listed

BINS, EPOCHS, EPSILON, DELTA, SIGMA = 32, 4, 2.0, 1e-5, 2.0


def timed(work: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians of CPU and wall seconds of so many calls; one before them compiles."""
    work()
    spent = []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        spent.append((time.process_time() - cpu, time.perf_counter() - wall))
    cpu_seconds, seconds = np.median(spent, axis=0)
    return {"CPU seconds": float(cpu_seconds), "seconds": float(seconds)}


def measured(samples: int, frozen: int, rounds: int) -> dict[str, Any]:
    """On the devices of this process, with so many samples for each."""
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
    target = AmplifiedObjective(
        log_rmse(PrefixSums(), scheme.iterations),
        mapping,
        scheme,
        EPSILON,
        DELTA,
        samples=devices * frozen,
        seed=0,
    )
    return {
        "devices": devices,
        "certificate": timed(lambda: loss.pilot(tilt, point, devices * samples, key), rounds),
        "tangent": timed(lambda: target.placed(mapping.start), rounds),
    }


def in_a_process(devices: int, words: list[str]) -> dict[str, Any]:
    """:func:`measured` of a process whose CPU looks like so many devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}".strip(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, __file__, "--here", *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(done.stdout.splitlines()[-1], flush=True)
    return found


def parser() -> Parser:
    """Its options."""
    words = Parser("devices", __doc__)
    words.word("--devices", type=listed(count), default=[1, 2, 4, 8], help="How many; a list.")
    words.word("--samples", type=count, default=2**15, help="Of a certificate, for each device.")
    words.word("--frozen", type=count, default=2**14, help="Of a search, for each device.")
    words.word("--repeats", type=count, default=9, help="Calls that medians are of.")
    words.word("--here", action="store_true", help="Only the devices that JAX sees as it is.")
    words.out()
    return words


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    from mfopt.experiments import runner

    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    if options.here:
        print(json.dumps(measured(options.samples, options.frozen, options.repeats)))
        return 0
    begun = time.perf_counter()
    sizes = (("--samples", options.samples), ("--frozen", options.frozen))
    words = [
        word
        for name, value in (*sizes, ("--repeats", options.repeats))
        for word in (name, str(value))
    ]
    rows = [in_a_process(devices, words) for devices in options.devices]
    first = rows[0]
    for row in rows:
        for what in ("certificate", "tangent"):
            work = row["devices"] / first["devices"]
            row[what]["CPU seconds over the work"] = (
                row[what]["CPU seconds"] / first[what]["CPU seconds"] / work
            )
    report = {
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
    keep(options.out, report, how=parser().command(given), begun=begun)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
