"""What knots, buffers and samples are worth: the defaults of the main job, one changed at a time.

    mfopt bench defaults --settings 8x32,16x128 --eps 0.5,2,16 --out artifacts/bench-defaults.json

Each row is the RMSE of the C that was found, with σ from the same fresh samples for all, over that
of the default, as a difference in percent, with the CPU seconds of the search. Means over
``--seeds`` seeds. What is in ``--out`` already is kept and not run again.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from harness import Bench, Options, cpu

from mfopt import query_error
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.calibration import calibrate
from mfopt.optimize import optimize, time_scale
from mfopt.optimize.time_scale import Scaling
from mfopt.sampling import BallsInBins
from mfopt.workloads import PrefixSums

DELTA = 1e-5
DEFAULT: dict[str, int] = {"knots": time_scale.KNOTS, "buffers": 4, "samples": time_scale.SAMPLES}
CHANGES = {"knots": (6, 12, 16, 48), "buffers": (1, 2, 3, 6), "samples": (2**11, 2**12, 2**14)}
ROWS = {"default": DEFAULT} | {
    f"{name} {value}": {**DEFAULT, name: value}
    for name, values in CHANGES.items()
    for value in values
    if value != DEFAULT[name]
}

bench = Bench(
    __file__,
    __doc__,
    settings=(["8x32", "16x128"], "EPOCHSxITERS; a list."),
    eps=([0.5, 2.0, 16.0], "ε; a list."),
    seeds=(2, "Seeds of each search."),
    samples=(2**16, "Fresh samples of σ."),
)
parser, main = bench.parser, bench.main


def one(scheme: BallsInBins, epsilon: float, chosen: dict[str, int], options: Options) -> Any:
    """Mean RMSE of one variant, and what its search took."""
    how = {name: chosen[name] for name in ("buffers", "samples")}
    errors, seconds, evaluations = [], [], []
    for seed in range(options.seeds):
        scaling = Scaling(chosen["knots"])
        found, took = cpu(
            lambda s=seed, t=scaling: optimize(scheme, epsilon, DELTA, time_scale=t, seed=s, **how)
        )
        pair = dominating_pair.exact(found.strategy, scheme)
        fresh = calibrate(pair, epsilon, DELTA, samples=options.samples, seed=10**6)
        what = PrefixSums(), found.strategy, scheme.iterations, fresh.noise_multiplier
        errors.append(float(query_error.rmse(*what)))
        seconds.append(took)
        evaluations.append(len(found.history))
    return {
        "rmse": float(np.mean(errors)),
        "largest over mean, percent": 100 * (max(errors) / float(np.mean(errors)) - 1),
        "evaluations": float(np.mean(evaluations)),
        "CPU seconds, least": min(seconds),  # the first has compiled
    }


@bench.work
def measured(options: Options) -> dict[str, Any]:
    """Measure what is missing."""
    report = bench.earlier({})
    for setting in options.settings:
        epochs, bins = map(int, setting.split("x"))
        for epsilon in options.eps:
            rows = report.setdefault(f"{setting} eps {epsilon:g}", {})
            for name in (name for name in ROWS if name not in rows):
                row = rows[name] = one(BallsInBins(bins, epochs), epsilon, ROWS[name], options)
                difference = row["rmse"] / rows["default"]["rmse"] - 1
                row["against the default, percent"] = 100 * difference
                print(setting, epsilon, name, row, file=sys.stderr, flush=True)
                bench.keep(report)
    return report
