"""What a certificate costs: certified σ over the estimate from many samples, and CPU seconds.

    mfopt bench certify --seeds 20 --out artifacts/bench-certify.json

For each file and δ: σ is estimated once, from so many samples that its error is small against the
slack, and certified with every seed; the slack is certified over estimated σ, less one. CPU seconds
are those of one certificate, the first left out, whose time is compilation. The target is at most
0.15% at δ = 1e-5 and 0.25% at δ = 1e-8 and 1e-12 for every seed; exit code 1 where one missed it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from harness import Bench, Options, cpu

import mfopt
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.calibration import calibrate, release

TARGETS = {1e-5: 0.0015, 1e-8: 0.0025, 1e-12: 0.0025}
FILE = Path("artifacts/factorizations/optimize-blt-16x128-eps2.npz")

bench = Bench(
    __file__,
    __doc__,
    files=([FILE], "Factorizations; a list."),
    delta=([*TARGETS], "Targets δ; a list."),
    seeds=(20, "Certificates for each target."),
    samples=(2**20, "Samples of the estimate."),
)
parser, main = bench.parser, bench.main


def slack(
    pair: dominating_pair.DominatingPair, epsilon: float, delta: float, seeds: int, samples: int
) -> dict[str, Any]:
    """The slack of one mechanism at (ε, δ) over ``seeds`` seeds."""
    truth = calibrate(pair, epsilon, delta, samples=samples, seed=10**6)
    above, seconds = [], []
    for seed in range(seeds):
        (certificate, _), took = cpu(lambda s=seed: release(pair, epsilon, delta, seed=s))
        seconds.append(took)
        above.append(certificate.noise_multiplier / truth.noise_multiplier - 1)
        print(f"δ = {delta:g}, seed {seed}: {100 * above[-1]:.4f}%", flush=True)
    low, middle, high = 100 * np.percentile(above, [0, 50, 100])
    return {
        "epsilon": epsilon,
        "delta": delta,
        "estimated σ": truth.noise_multiplier,
        "its relative error": truth.relative_error,
        "seeds": seeds,
        "slack, percent": {"least": low, "median": middle, "largest": high},
        "within target": sum(x <= TARGETS.get(delta, np.inf) for x in above),
        "target, percent": 100 * TARGETS[delta] if delta in TARGETS else None,
        "CPU seconds, median": float(np.median(seconds[1:] or seconds)),
    }


@bench.work
def measured(options: Options) -> tuple[list[dict[str, Any]], bool]:
    """Certify with many seeds."""
    rows = []
    for path in options.files:
        found = mfopt.load(path)
        pair, epsilon = found.dominating_pair(), found.guarantee.epsilon
        for delta in options.delta:
            row = slack(pair, epsilon, delta, options.seeds, options.samples)
            rows.append({"file": path.name, "strategy": found.strategy.describe(), **row})
    return rows, any(row["within target"] < row["seeds"] for row in rows)
