"""What the main command takes: wall and CPU seconds and memory of whole processes, start to file.

    python tests/benchmarks/bench_optimize.py --out artifacts/bench-optimize.json

cold is with nothing compiled before, as after an installation; warm is once more with what the cold
one kept; --repeats of both, taking turns with each other. Sizes are run once each, cold. yardstick
is a plain loop of Python, timed before and after: what a slow hour of a shared machine is seen by.
The whole takes half an hour, most of it for 16,384 bins.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from harness import Bench, choice, cpu, machine

# epochs × bins; the last has a million iterations in few bins
SIZES = {"8x1024": (8, 1024), "8x4096": (8, 4096), "8x16384": (8, 16384), "7813x128": (7813, 128)}
COMMANDS = {"main": (16, 128), "toy": (2, 8)}
_PROGRAM = """
import resource, sys
from mfopt_cli.main import main
try:
    main()
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, file=sys.stderr)
"""

bench = Bench(
    __file__, __doc__, repeats=(5, "Rounds of the everyday commands."), sizes=choice(SIZES)
)


def command(folder, kept, *words):
    """What one process takes, and what it says of its result; ``kept``: its compiled programs."""
    # this process has a cache of its own, which another would take for its host's choice
    ours = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words],
        cwd=folder,
        env={**inherited, "MFOPT_COMPILED": str(kept)},
        capture_output=True,
        text=True,
        check=True,
    )
    wall = time.perf_counter() - begun
    spent, memory = map(float, done.stderr.split()[-2:])
    participated = {"wall seconds": wall, "CPU seconds": spent, "GiB": memory}
    if "--json" not in words:
        return participated
    printed = json.loads(done.stdout)
    said = {name: printed[name] for name in ("rmse", "noise_multiplier", "certified")}
    return {**participated, **said, "evaluations": printed["provenance"]["evaluations"]}


def optimized(folder, kept, epochs, bins):
    """A whole search with its certificate, at ε = 2."""
    words = f"optimize --epochs {epochs} --iters {bins} --eps 2 --force --json --out found.npz"
    return command(folder, kept, *words.split())


def yardstick():
    """CPU seconds of twenty million steps of a loop."""
    return cpu(lambda: sum(number for number in range(20_000_000)))[1]


def started(folder, repeats):
    """The everyday commands, cold and warm: medians, and all wall times."""
    rows = {}
    for number in range(repeats):
        for name, size in COMMANDS.items():
            for state in ("cold", "warm"):
                kept = folder / f"{name}-{number}"
                rows.setdefault(f"{name}, {state}", []).append(optimized(folder, kept, *size))
        rows.setdefault("show", []).append(command(folder, kept, "show", "found.npz"))
        print(number, {name: row[-1]["wall seconds"] for name, row in rows.items()}, flush=True)
    numbers = ("wall seconds", "CPU seconds", "GiB")
    return {
        name: {number: median(row[number] for row in some) for number in numbers}
        | {"all wall seconds": [row["wall seconds"] for row in some]}
        for name, some in rows.items()
    }


@bench.work
def measured(options):
    """Everyday commands, then sizes."""
    actual, ticks = machine("jax", "numpy"), [yardstick()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        actual["commands"], actual["sizes"] = started(folder, options.repeats), {}
        for size in options.sizes:
            actual["sizes"][size] = optimized(folder, folder / size, *SIZES[size])
            print(size, actual["sizes"][size], flush=True)
    return {**actual, "yardstick": [*ticks, yardstick()]}


if __name__ == "__main__":
    bench.main()
