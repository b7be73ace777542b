"""A sweep over group sizes by mfopt against calling dp_accounting once per K, in one run.

    mfopt bench account --out artifacts/bench-account.json

Both compute ε of DP-SGD for groups of K = 1..``--most`` examples (binomial mixture of Gaussians)
from scratch for every K, dp_accounting directly with its default grid of 1e-4; times are CPU
seconds. dp_accounting takes minutes for a whole sweep, so it is timed at a few K, each right after
mfopt at the same K, and its total is the trapezoidal sum through those times, which the result
says; ``--all`` times every K.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
from mfopt_cli.benchmarks import Parser, count, keep, listed
from scipy import stats

DELTA = 1e-6
INTERVAL = 1e-4  # dp_accounting's default


def ours(size: int, options: argparse.Namespace) -> float:
    """ε by mfopt."""
    from mfopt.accounting import Mechanism, account
    from mfopt.sampling import Poisson

    mechanism = Mechanism(Poisson(options.probability, options.iterations), group_size=size)
    return account(mechanism, noise_multiplier=options.noise_multiplier, delta=DELTA).epsilon


def theirs(size: int, options: argparse.Namespace) -> float:
    """ε by dp_accounting, called as its users call it."""
    from dp_accounting.pld import privacy_loss_distribution

    counts = np.arange(size + 1)
    weights = stats.binom.pmf(counts, size, options.probability)
    one = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        options.noise_multiplier,
        counts.tolist(),
        weights.tolist(),
        value_discretization_interval=INTERVAL,
    )
    return float(one.self_compose(options.iterations).get_epsilon_for_delta(DELTA))


def timed(call: Callable[..., float], *arguments: Any) -> tuple[float, float]:
    """(result, CPU seconds): both run on one core, and a busy machine changes neither much."""
    started = time.process_time()
    result = call(*arguments)
    return result, time.process_time() - started


def calibrated(options: argparse.Namespace) -> dict[str, Any]:
    """σ for a user with Stack Overflow's median number of examples at (8, 1e-6)."""
    from mfopt.accounting import Mechanism, account
    from mfopt.sampling import Poisson

    mechanism = Mechanism(Poisson(options.probability, options.iterations), group_size=183)
    sigma, seconds = timed(lambda: account(mechanism, epsilon=8.0, delta=DELTA).noise_multiplier)
    return {"group_size": 183, "epsilon": 8.0, "noise_multiplier": sigma, "seconds": seconds}


def sweep(options: argparse.Namespace) -> dict[str, Any]:
    """Times of both over K = 1..most."""
    for warm in (ours, theirs):
        warm(2, argparse.Namespace(**{**vars(options), "iterations": 10}))
    sizes = range(1, options.most + 1)
    asked = (
        sizes
        if options.all
        else sorted({k for k in options.sizes if k < options.most} | {1, options.most})
    )
    own, rows = [], []
    for size in sizes:
        epsilon, seconds = timed(ours, size, options)
        own.append(seconds)
        if size in asked:
            reference, reference_seconds = timed(theirs, size, options)
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
    total = float(
        np.interp(
            sizes, [r["group_size"] for r in rows], [r["dp_accounting_seconds"] for r in rows]
        ).sum()
    )
    measured = options.all or len(rows) == options.most
    return {
        "what": f"epsilon for K = 1..{options.most}, each K from scratch; CPU seconds",
        "probability": options.probability,
        "iterations": options.iterations,
        "noise_multiplier": options.noise_multiplier,
        "delta": DELTA,
        "mfopt_seconds": sum(own),
        "dp_accounting_seconds": total,
        "dp_accounting_total_is": "measured at every K"
        if measured
        else f"interpolated between the {len(rows)} group sizes that were timed",
        "ratio": total / sum(own),
        "ratio_at_the_timed_sizes": sum(r["dp_accounting_seconds"] for r in rows)
        / sum(r["mfopt_seconds"] for r in rows),
        "dp_accounting_interval": INTERVAL,
        "timed": rows,
    }


def parser() -> Parser:
    """Its options."""
    words = Parser("account", __doc__)
    words.word(
        "--group-size", dest="most", older=("--most",), type=count, default=128, help="Largest K."
    )
    words.word(
        "--timed",
        dest="sizes",
        older=("--sizes",),
        type=listed(count),
        default=[16, 32, 64, 96],
        help="K at which dp_accounting is timed, besides the first and last; a list.",
    )
    words.word("--all", action="store_true", help="Time dp_accounting at every K.")
    words.word("--probability", type=float, default=0.001, help="Chance to be in a batch.")
    words.word(
        "--iters",
        dest="iterations",
        older=("--iterations",),
        type=count,
        default=10_000,
        help="Iterations, n.",
    )
    words.word("--noise-multiplier", type=float, default=2.0, help="σ relative to the clip norm.")
    words.out()
    return words


def main(arguments: list[str]) -> None:
    """Print or write one JSON object."""
    words, begun = parser(), time.perf_counter()
    options = words.parse_args(arguments)
    found = {
        "sweep": sweep(options),
        "calibration": calibrated(options),
        "device": f"{os.cpu_count()}-core {platform.machine()} CPU",
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "date": datetime.date.today().isoformat(),
        "versions": {name: metadata.version(name) for name in ("mfopt", "dp_accounting")},
    }
    keep(options.out, found, how=words.command(arguments), begun=begun)
    print(json.dumps(found, indent=2))
