"""How far the result of the main job depends on its seed.

    mfopt bench seeds --epochs 16 --iters 128 --eps 2 --seeds 10 --out artifacts/bench-seeds.json

Every seed is a whole optimization with its certificate. Certified RMSE is what the user gets;
estimated RMSE is that of the same C with σ from fresh samples, the same ones for every seed. What
is in ``--out`` already is kept and not run again. The target is a spread of at most 0.1%.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from mfopt_cli.benchmarks import Parser, count, keep

from mfopt import query_error
from mfopt.calibration import calibrate
from mfopt.optimize import factorize
from mfopt.sampling import BallsInBins

TARGET = 0.1  # percent


def run(
    scheme: BallsInBins, epsilon: float, delta: float, seed: int, samples: int
) -> dict[str, Any]:
    """One seed."""
    begun = time.process_time()
    found = factorize(scheme, epsilon, delta, seed=seed)
    seconds = time.process_time() - begun
    fresh = calibrate(found.dominating_pair(), epsilon, delta, samples=samples, seed=10**6)
    sigma = fresh.noise_multiplier
    return {
        "certified rmse": found.rmse,
        "estimated rmse": float(
            query_error.rmse(found.workload, found.strategy, found.iterations, sigma)
        ),
        "relative error of the estimate": fresh.relative_error,
        "evaluations": found.provenance["evaluations"],
        "stopped because": found.provenance["optimizer_status"],
        "CPU seconds": seconds,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Least, median, largest, and how far the ends are from the median."""
    middle = float(np.median(values))
    worst = max(max(values) - middle, middle - min(values))
    return {
        "least": min(values),
        "median": middle,
        "largest": max(values),
        "off the median by at most, percent": 100 * worst / middle,
    }


def parser() -> Parser:
    """Its options."""
    words = Parser("seeds", __doc__)
    words.word("--epochs", type=count, default=16, help="Epochs.")
    words.word("--iters", type=count, default=128, help="Iterations an epoch.")
    words.word("--eps", type=float, default=2.0, help="Target ε.")
    words.word("--delta", type=float, default=1e-5, help="Target δ.")
    words.word("--seeds", type=count, default=10, help="How many seeds, from 0.")
    words.word("--samples", type=count, default=2**17, help="Samples of the estimate.")
    words.out("JSON file; seeds already in it are kept.")
    return words


def main(arguments: list[str]) -> int:
    """Run the seeds that are missing; exit code 1 where the spread missed its target."""
    words, begun = parser(), time.perf_counter()
    options = words.parse_args(arguments)
    setting = f"{options.epochs}x{options.iters} eps {options.eps:g} delta {options.delta:g}"
    report: dict[str, Any] = {"setting": setting, "seeds": {}}
    if options.out and options.out.exists():
        earlier = json.loads(options.out.read_text())
        report = earlier if earlier["setting"] == setting else report
    rows = report["seeds"]
    scheme = BallsInBins(bins=options.iters, epochs=options.epochs)
    for seed in range(options.seeds):
        if str(seed) in rows:
            continue
        rows[str(seed)] = run(scheme, options.eps, options.delta, seed, int(options.samples))
        print(seed, rows[str(seed)], file=sys.stderr, flush=True)
        for name in ("certified rmse", "estimated rmse"):
            report[name] = spread([row[name] for row in rows.values()])
        keep(options.out, report, how=words.command(arguments), begun=begun)
    print(json.dumps(report, indent=2, ensure_ascii=False))
    worst = report["certified rmse"]["off the median by at most, percent"]
    return int(worst > TARGET)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
