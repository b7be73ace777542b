"""What knots, buffers and samples are worth: the defaults of the main job, one changed at a time.

    mfopt bench defaults --settings 8x32,16x128 --eps 0.5,2,16 --out artifacts/bench-defaults.json

Each row is the RMSE of the C that was found, with σ from the same fresh samples for all, over that
of the default, as a difference in percent, with the CPU seconds of the search. Means over
``--seeds`` seeds. What is in ``--out`` already is kept and not run again.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
from mfopt_cli.benchmarks import Parser, count, keep, listed

from mfopt import query_error
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.calibration import calibrate
from mfopt.optimize import optimize, time_scale
from mfopt.optimize.time_scale import Scaling
from mfopt.sampling import BallsInBins
from mfopt.workloads import PrefixSums

DELTA = 1e-5
DEFAULT: dict[str, int] = {"knots": time_scale.KNOTS, "buffers": 4, "samples": time_scale.SAMPLES}
CHANGES: dict[str, tuple[int, ...]] = {
    "knots": (6, 12, 16, 48),
    "buffers": (1, 2, 3, 6),
    "samples": (2**11, 2**12, 2**14),
}


def variants() -> dict[str, dict[str, int]]:
    """The default, and each change of one number of it."""
    rows = {"default": DEFAULT}
    for name, values in CHANGES.items():
        rows |= {f"{name} {v}": {**DEFAULT, name: v} for v in values if v != DEFAULT[name]}
    return rows


def measure(
    scheme: BallsInBins, epsilon: float, chosen: dict[str, int], seeds: int, samples: int
) -> dict[str, Any]:
    """Mean RMSE of one variant, and what its search took."""
    errors, seconds, evaluations = [], [], []
    for seed in range(seeds):
        begun = time.process_time()
        found = optimize(
            scheme,
            epsilon,
            DELTA,
            buffers=chosen["buffers"],
            samples=chosen["samples"],
            time_scale=Scaling(chosen["knots"]),
            seed=seed,
        )
        seconds.append(time.process_time() - begun)
        pair = dominating_pair.exact(found.strategy, scheme)
        sigma = calibrate(pair, epsilon, DELTA, samples=samples, seed=10**6).noise_multiplier
        rmse = query_error.rmse(PrefixSums(), found.strategy, scheme.iterations, sigma)
        errors.append(float(rmse))
        evaluations.append(len(found.history))
    return {
        "rmse": float(np.mean(errors)),
        "largest over mean, percent": 100 * (max(errors) / float(np.mean(errors)) - 1),
        "evaluations": float(np.mean(evaluations)),
        "CPU seconds, least": min(seconds),  # the first has compiled
    }


def parser() -> Parser:
    """Its options."""
    words = Parser("defaults", __doc__)
    words.word(
        "--settings", type=listed(str), default=["8x32", "16x128"], help="EPOCHSxITERS; a list."
    )
    words.word("--eps", type=listed(float), default=[0.5, 2.0, 16.0], help="ε; a list.")
    words.word("--seeds", type=count, default=2, help="Seeds of each search.")
    words.word("--samples", type=count, default=2**16, help="Fresh samples of σ.")
    words.out("JSON file; what is in it is kept.")
    return words


def main(arguments: list[str]) -> None:
    """Measure what is missing."""
    words, begun = parser(), time.perf_counter()
    options = words.parse_args(arguments)
    report: dict[str, Any] = {}
    if options.out and options.out.exists():
        report = json.loads(options.out.read_text())
    for setting in options.settings:
        epochs, bins = map(int, setting.split("x"))
        for epsilon in options.eps:
            rows = report.setdefault(f"{setting} eps {epsilon:g}", {})
            for name, chosen in variants().items():
                if name in rows:
                    continue
                row = measure(
                    BallsInBins(bins, epochs), epsilon, chosen, options.seeds, int(options.samples)
                )
                row |= {"against the default, percent": 0.0}
                rows[name] = row
                row["against the default, percent"] = 100 * (
                    row["rmse"] / rows["default"]["rmse"] - 1
                )
                print(setting, epsilon, name, row, file=sys.stderr, flush=True)
                keep(options.out, report, how=words.command(arguments), begun=begun)
    print(json.dumps(report, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
