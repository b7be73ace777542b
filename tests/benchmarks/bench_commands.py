"""Commands with pinned seeds, and every number that they print: what a change must not move.

    mfopt bench commands --out before.json
    mfopt bench commands --against before.json

Each command runs with --json in a process of its own, in one temporary folder, with one cache of
compiled programs. All its numbers and digests are compared with those recorded, to the last digit:
nothing is random but by a pinned seed. The exit code is 1 where one differs by more than
--tolerance, is missing or new, or where a command ends with another exit code. Seconds and versions
are recorded and not compared. It takes about six CPU minutes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Bench, Options, choice

MADE = Path(__file__).parents[2] / "artifacts" / "factorizations"
BLT, TOEPLITZ = MADE / "blt-4-16x32-eps2.npz", MADE / "toeplitz-scaled-16x32-eps2.npz"

# name -> command line; a file that a command writes is read by later ones
COMMANDS = {
    "main": "optimize --epochs 16 --iters 128 --eps 2 --seed 1 --out main.npz",
    "toy": "optimize --epochs 2 --iters 8 --eps 2 --seed 1 --out toy.npz",
    "toeplitz": "optimize --epochs 4 --iters 16 --eps 1 --strategy toeplitz --seed 2",
    "banded-toeplitz": "optimize --epochs 4 --iters 32 --eps 2 --strategy banded-toeplitz "
    "--bands 8 --no-time-scale --seed 3",
    "banded": "optimize --epochs 2 --iters 8 --eps 2 --strategy banded --bands 4 --seed 4",
    "dense": "optimize --epochs 2 --iters 4 --eps 2 --strategy dense --seed 5",
    "cyclic-blocks": "optimize --epochs 4 --iters 8 --eps 4 --strategy cyclic-blocks --seed 6",
    "wave-blt": "optimize --epochs 8 --iters 32 --eps 8 --strategy wave-blt --seed 7",
    "small-epsilon": "optimize --epochs 16 --iters 128 --eps 0.5 --strategy blt --seed 103",
    "max-error": "optimize --epochs 4 --iters 16 --eps 2 --objective max --seed 8",
    "fresh-bins": "optimize --epochs 4 --iters 16 --eps 1 --sampling fresh-bins --bands 4 --seed 9",
    "sqrt": "optimize --epochs 4 --iters 32 --eps 2 --strategy sqrt --seed 10",
    "identity": "optimize --epochs 8 --iters 64 --eps 2 --strategy identity --seed 11",
    "show": "show main.npz",
    "certify": f"certify {BLT} --eps 2.1 --seed 12",
    "calibrate": f"calibrate {BLT} --eps 4 --delta 1e-6 --seed 13 --out calibrated.npz",
    "calibrate-scaled": f"calibrate {TOEPLITZ} --eps 1 --seed 14 --out toeplitz.npz",
    "noise": "noise toy.npz --params 1000",
    "compare": "compare --epochs 4 --iters 16 --eps 1,8 --include dpsgd,banded+poisson,blt-4 "
    "--bands 1,2,4 --jobs 1 --cache cells",
    "balls-in-bins": "account balls-in-bins --epochs 16 --iters 128 --eps 2 --delta 1e-5",
    "balls-in-bins-file": f"account balls-in-bins --strategy {BLT} --noise-multiplier 1 "
    "--delta 1e-5 --seed 15",
    "balls-in-bins-group": "account balls-in-bins --epochs 4 --iters 32 --group-size 2 --eps 4 "
    "--delta 1e-5 --seed 16",
    "fresh-bins-account": "account fresh-bins --epochs 4 --iters 16 --strategy banded-sqrt:4 "
    "--eps 2 --delta 1e-5 --seed 17",
    "dpsgd": "account dpsgd --probability 0.01 --iters 2000 --eps 2 --delta 1e-6",
    "dpsgd-replace": "account dpsgd --probability 0.01 --iters 500 --adjacency replace "
    "--noise-multiplier 1 --eps 2",
    "banded-poisson": "account banded --bands 4 --batch-size 500 --population 50000 --iters 2000 "
    "--eps 2 --delta 1e-6",
    "els": "account els --group-size 1:64:21 --probability 0.001 --iters 1000 --eps 8 --delta 1e-6",
    "uls": "account uls --batch-size 64 --population 10000 --iters 1000 --eps 8 --delta 1e-6",
    "fedavg": "account fedavg --batch-size 5000 --population 763430 --iters 5000 "
    "--noise-multiplier 1 --delta 1e-9",
    "fixed-batch": "account fixed-batch --batch-size 500 --population 50000 --iters 2000 "
    "--group-size 8 --eps 8 --delta 1e-6",
    "fixed-order": "account fixed-order --epochs 4 --iters 256 --strategy sqrt --eps 2 "
    "--delta 1e-5",
    "min-separation": "account min-separation --iters 2000 --separation 400 "
    "--max-participations 5 --strategy sqrt --eps 2 --delta 1e-6",
    "group": "account group --group-size 1,8 --noise-multiplier 1 --delta 1e-6 --probability 0.01 "
    "--iters 500",
    "filter": "account filter --eps 4 --delta 1e-6 --iters 1000 --population 100000 "
    "--batch-size 1000 --threshold 0.01:1:x4",
    "run": "account run poisson:probability=0.02,iterations=500@1.1 "
    "poisson:probability=0.05,iterations=200@1.6 --delta 1e-6 --points 3",
}
_PROGRAM = "from mfopt_cli.main import main; main()"
# what a clock, a machine or a version says, and paths
_PASSING = ("seconds", "path", "date", "command", "device", "jax", "mfopt", "python", "peak_bytes")


def values(found: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of a JSON value, without what says nothing of the mechanism."""
    if isinstance(found, dict | list):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, item in items:
            if not str(key).endswith(_PASSING):
                yield from values(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, found


def run(words: str, folder: Path) -> dict[str, Any]:
    """Exit code, values and CPU seconds of one command.

    Args:
      words: its command line, without --json.
      folder: where it runs and keeps what it compiles.
    """
    # this process has a cache of its own, which another would take for its host's choice
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *words.split(), "--json"],
        cwd=folder,
        env={**inherited, "MFOPT_COMPILED": str(folder), "MFOPT_DATA": str(folder / "proofs")},
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    said = dict(values(json.loads(done.stdout))) if done.stdout.strip() else {}
    if not said:
        said["error"] = done.stderr.strip().splitlines()[-1:]
    return {"exit": done.returncode, "cpu_seconds": round(cpu, 2), "values": said}


def distance(new: Any, old: Any) -> float:
    """Relative difference of two values; infinite where they are not both numbers, or no match."""
    if new == old:
        return 0.0
    numbers = [type(x) in (int, float) and math.isfinite(x) for x in (new, old)]
    return abs(new - old) / max(abs(new), abs(old)) if all(numbers) else math.inf


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[tuple[float, str]]:
    """What differs between two records of one command: (relative difference, sentence)."""
    found = []
    if new["exit"] != old["exit"]:
        found.append((math.inf, f"exit code {new['exit']}, was {old['exit']}"))
    for name in sorted({*new["values"], *old["values"]}):
        here, there = (one["values"].get(name, "missing") for one in (new, old))
        if apart := distance(here, there):
            change = f" ({here / there - 1:+.3e})" if math.isfinite(apart) and there else ""
            found.append((apart, f"{name} = {here}, was {there}{change}"))
    return found


bench = Bench(
    __file__,
    __doc__,
    only=choice(COMMANDS),
    against=(None, "A report to compare with.", Path),
    tolerance=(0.0, "Relative difference allowed."),
)
parser, main = bench.parser, bench.main


@bench.work
def compared(options: Options) -> tuple[dict[str, Any] | None, bool]:
    """Run all, record, compare; exit code 1 if anything differs."""
    old = json.loads(options.against.read_text())["commands"] if options.against else {}
    new: dict[str, Any] = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        for which in options.only:
            new[which] = found = run(COMMANDS[which], Path(name))
            print(f"{which}: exit {found['exit']}, {found['cpu_seconds']} CPU s", flush=True)
            if old:
                apart = differences(found, old.get(which, {"exit": None, "values": {}}))
                worst = max([worst, *(size for size, _ in apart)])
                print("".join(f"  {line}\n" for _, line in apart) or "  the same", flush=True)
    total = sum(one["cpu_seconds"] for one in new.values())
    print(f"{total:.1f} CPU s" + (f"; largest difference {worst:.3g}" if old else ""))
    bench.keep({"cpu_seconds": round(total, 1), "commands": new})
    return None, worst > options.tolerance
