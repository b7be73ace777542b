"""A sweep over group sizes by mfopt against calling dp_accounting once per K, in one run.

    python tests/benchmarks/bench_account.py --out artifacts/bench-account.json

Both compute ε of DP-SGD for groups of K = 1..``--group-size`` examples (binomial mixture of
Gaussians) from scratch for every K, dp_accounting directly with its default grid of 1e-4; times are
CPU seconds. dp_accounting takes minutes for a whole sweep, so it is timed at a few K, each right
after mfopt at the same K, and its total is the trapezoidal sum through those times, which the
result says; ``--all`` times every K.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from harness import Bench, Options, cpu, machine
from scipy import stats

DELTA = 1e-6
INTERVAL = 1e-4  # dp_accounting's default

bench = Bench(
    __file__,
    __doc__,
    group_size=(128, "Largest K.", "--most"),
    timed=([16, 32, 64, 96], "K of dp_accounting, besides first and last; a list.", "--sizes"),
    all=(False, "Time dp_accounting at every K."),
    probability=(0.001, "Chance to be in a batch."),
    iters=(10_000, "Iterations, n.", "--iterations"),
    noise_multiplier=(2.0, "σ relative to the clip norm."),
)
parser, main = bench.parser, bench.main


def ours(size: int, probability: float, iters: int, sigma: float) -> float:
    """ε by mfopt."""
    from mfopt.accounting import Mechanism, account
    from mfopt.sampling import Poisson

    mechanism = Mechanism(Poisson(probability, iters), group_size=size)
    return account(mechanism, noise_multiplier=sigma, delta=DELTA).epsilon


def theirs(size: int, probability: float, iters: int, sigma: float) -> float:
    """ε by dp_accounting, called as its users call it."""
    from dp_accounting.pld import privacy_loss_distribution

    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, probability)
    one_round = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma, counts.tolist(), weights.tolist(), value_discretization_interval=INTERVAL
    )
    return float(one_round.self_compose(iters).get_epsilon_for_delta(DELTA))


def calibrated(options: Options) -> dict[str, Any]:
    """σ for a user with Stack Overflow's median number of examples at (8, 1e-6)."""
    from mfopt.accounting import Mechanism, account
    from mfopt.sampling import Poisson

    mechanism = Mechanism(Poisson(options.probability, options.iters), group_size=183)
    actual, seconds = cpu(lambda: account(mechanism, epsilon=8.0, delta=DELTA))
    sigma = actual.noise_multiplier
    return {"group_size": 183, "epsilon": 8.0, "noise_multiplier": sigma, "seconds": seconds}


@bench.work
def sweep(options: Options) -> dict[str, Any]:
    """Times of both over K = 1..most."""
    ours(2, options.probability, 10, 2.0), theirs(2, options.probability, 10, 2.0)  # imports
    setting = options.probability, options.iters, options.noise_multiplier
    sizes = range(1, options.group_size + 1)
    sizes_to_time = {*sizes} if options.all else {*options.timed, 1, options.group_size} & {*sizes}
    own_seconds, rows = [], []
    for size in sizes:
        epsilon, seconds = cpu(ours, size, *setting)
        own_seconds.append(seconds)
        if size in sizes_to_time:
            reference, reference_seconds = cpu(theirs, size, *setting)
            rows.append(
                {
                    "group_size": size,
                    "mfopt_seconds": seconds,
                    "dp_accounting_seconds": reference_seconds,
                    "mfopt_epsilon": epsilon,
                    "dp_accounting_epsilon": reference,
                    "relative_difference": epsilon / reference - 1,
                }
            )
            print(f"K = {size}: {seconds:.2f} s, {reference_seconds:.2f} s", file=sys.stderr)
    position, took = zip(
        *((r["group_size"], r["dp_accounting_seconds"]) for r in rows), strict=True
    )
    total = float(np.interp(sizes, position, took).sum())
    between = f"interpolated between the {len(rows)} group sizes that were timed"
    actual = {
        "what": f"epsilon for K = 1..{options.group_size}, each K from scratch; CPU seconds",
        **dict(zip(("probability", "iterations", "noise_multiplier"), setting, strict=True)),
        "delta": DELTA,
        "mfopt_seconds": sum(own_seconds),
        "dp_accounting_seconds": total,
        "dp_accounting_total_is": between
        if len(rows) < len(own_seconds)
        else "measured at every K",
        "ratio": total / sum(own_seconds),
        "ratio_at_the_timed_sizes": sum(took) / sum(r["mfopt_seconds"] for r in rows),
        "dp_accounting_interval": INTERVAL,
        "timed": rows,
    }
    return {"sweep": actual, "calibration": calibrated(options), **machine("dp_accounting")}


if __name__ == "__main__":
    raise SystemExit(main())
