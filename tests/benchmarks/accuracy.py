"""Test loss that mechanisms train to, each at its best learning rate, with its own sampling.

    python tests/benchmarks/accuracy.py --mechanism a.npz --mechanism b.npz \
        --task softmax --task mlp --schedule constant --schedule linear --seeds 8

prints the mean test loss ± standard error over paired seeds for each schedule, and the paired
difference to the first mechanism. DP-SGD with Poisson sampling at the ε of the first file comes
first unless --no-baseline is given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from accuracy_runs import OPTIMIZERS, SCHEDULES, TASKS, Mechanism, Score, scores

import mfopt
from mfopt.sampling import Poisson
from mfopt.strategies import Identity


def dpsgd(bins: int, epochs: int, epsilon: float, delta: float) -> Mechanism:
    """DP-SGD with Poisson sampling of expected batches as large as one of ``bins`` bins."""
    scheme = Poisson(1 / bins, bins * epochs)
    sigma = mfopt.account(scheme, epsilon=epsilon, delta=delta).noise_multiplier
    return Mechanism.build("DP-SGD, Poisson", Identity(), sigma, scheme)


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Mean of paired differences and half its 95% interval (Student)."""
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return float(differences.mean()), float(error * scipy.stats.t.ppf(0.975, len(differences) - 1))


def evaluate(
    mechanisms: Sequence[Mechanism],
    tasks: Sequence[str] = ("softmax",),
    schedules: Sequence[str] = ("constant", "linear"),
    optimizer: str = "sgd",
    seeds: int = 8,
    show: Any = None,
) -> list[dict[str, Any]]:
    """One row per task, mechanism, schedule and reading; differences are to the first mechanism.

    Args:
      mechanisms: what is trained with.
      tasks, schedules, optimizer: names.
      seeds: number of paired seeds.
      show: callback (task, mechanism, {(schedule, reading): score}, baseline's, seconds).
    """
    rows = []
    for task in tasks:
        baseline: dict[tuple[str, str], Score] = {}
        begin: dict[tuple[str, str], int] = {}
        for mechanism in mechanisms:
            started = time.perf_counter()
            results = scores(mechanism, task, optimizer, schedules, seeds, begin)
            baseline = baseline or results
            begin = {cell: score.exponent for cell, score in results.items()}
            if show is not None:
                show(task, mechanism, results, baseline, time.perf_counter() - started)
            for (schedule, reading), score in results.items():
                change, half = interval(score.losses - baseline[schedule, reading].losses)
                rows.append(
                    {
                        "task": task,
                        "optimizer": optimizer,
                        "mechanism": mechanism.label,
                        "schedule": schedule,
                        "reading": reading,
                        "rate": 2 ** (score.exponent / 2),
                        "loss": score.mean,
                        "standard_error": score.standard_error,
                        "error_rate": float(score.errors.mean()),
                        "difference": change,
                        "difference_half_interval": half,
                        "losses": score.losses.tolist(),
                    }
                )
    return rows


def _show(task: str, mechanism: Mechanism, results: Any, baseline: Any, seconds: float) -> None:
    for (schedule, reading), score in results.items():
        change, half = interval(score.losses - baseline[schedule, reading].losses)
        print(
            f"{task:<13} {mechanism.label:<28} {schedule:<19} {reading:<8} "
            f"{score.mean:.4f} ± {score.standard_error:.4f}  {change:+.4f} ± {half:.4f}  "
            f"rate 2^{score.exponent / 2:g}  wrong {score.errors.mean():.1%}",
            flush=True,
        )
    print(f"    {seconds:.1f} s", flush=True)


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--mechanism", action="append", type=Path, default=[], metavar="FILE")
    words.add_argument("--task", action="append", choices=[*TASKS])
    words.add_argument("--schedule", action="append", choices=[*SCHEDULES])
    words.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    words.add_argument("--seeds", type=int, default=8)
    words.add_argument("--no-baseline", action="store_true", help="Leave out DP-SGD, Poisson.")
    words.add_argument("--out", type=Path, help="JSON file of the rows.")
    options = words.parse_args()
    mechanisms = [Mechanism.load(path) for path in options.mechanism]
    if options.mechanism and not options.no_baseline:
        stored = mfopt.load(options.mechanism[0])
        bins = round(1 / (stored.sampling.expected_batch(10**6) / 10**6))
        goal = stored.guarantee
        epochs = stored.iterations // bins
        mechanisms.insert(0, dpsgd(bins, epochs, goal.epsilon, goal.delta))
    rows = evaluate(
        mechanisms,
        options.task or ["softmax"],
        options.schedule or ["constant", "linear"],
        options.optimizer,
        options.seeds,
        _show,
    )
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
