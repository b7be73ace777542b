"""Choquette-Choo, Ganesh, Haque, Steinke, Thakurta 2024: "Near-exact privacy amplification".

All figures use δ = 1e-5, add-remove adjacency of one example, and RMSE of prefix sums.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable

import numpy as np
from scipy import stats

from mfopt.experiments import tasks
from mfopt.experiments.cache import Task
from mfopt.experiments.comparison import WIDTHS, Comparison
from mfopt.experiments.comparison_plots import improvement_panel
from mfopt.experiments.figures.context import Context, Drawing
from mfopt.experiments.plots import Curve, Panel
from mfopt.optimize import kinds

PAPER = "Choquette-Choo et al. 2024, Near-exact privacy amplification"
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DELTA = 1e-5
MAIN = (16, 128)
CURVE_SAMPLES = 2**13  # of σ where nothing but a curve is drawn: 0.05 to 0.2%
APPENDIX = [(epochs, bins) for epochs in (8, 16, 32) for bins in (32, 64, 128)]
# Figure 5's range of sample counts, with the one that its text names, 2^9; the last is the default
# of a search for BLTs, whose optimum the grid has too.
SAMPLES = (2**7, 2**9, 2**11, 2**13)
MOST_SAMPLES = 2**20
SAMPLE_EPSILONS = (0.5, 1.0, 2.0, 4.0)
SEEDS = tuple(range(5))  # of what is random or is timed, each drawn or run so often
TIMED = [(epochs, bins) for bins in (32, 64, 128) for epochs in (16, 32, 64)]


def _setting(
    epochs: int, bins: int, include: tuple[str, ...], widths: tuple[int, ...]
) -> Comparison:
    return Comparison(bins, epochs, EPSILONS, DELTA, include, widths)


def fixed_identity(context: Context) -> Drawing:
    """Figure 2(a)."""
    include = ("dpsgd+unamplified", "dpsgd+poisson", "dpsgd+balls-in-bins")
    setting = _setting(*MAIN, include, (1,))
    return Drawing([improvement_panel(setting, context.compare(setting), include[0])])


def fixed_banded(context: Context) -> Drawing:
    """Figure 2(b)."""
    include = ("banded+unamplified", "banded+poisson", "banded+balls-in-bins")
    setting = _setting(*MAIN, include, (64,))
    rows = context.compare(setting)
    return Drawing(
        [improvement_panel(setting, rows, include[0], title="64 bands, 16 epochs × 128 iterations")]
    )


def best_width(epochs: int, bins: int) -> Callable[[Context], Drawing]:
    """Figure 3(a) and the even figures of Appendix B: each curve at its best number of bands."""

    def build(context: Context) -> Drawing:
        include = ("banded+unamplified", "banded+poisson", "banded+balls-in-bins")
        setting = _setting(epochs, bins, include, _widths(bins))
        if (epochs, bins) != MAIN:  # whose cells are the comparison's too, a table
            setting = setting._replace(samples=CURVE_SAMPLES)
        return Drawing([improvement_panel(setting, context.compare(setting), include[0])])

    return build


def _widths(bins: int) -> tuple[int, ...]:
    """Up to the iterations of an epoch, beyond which a unit's columns overlap."""
    return tuple(width for width in WIDTHS if width <= bins)


def optimized(epochs: int, bins: int) -> Callable[[Context], Drawing]:
    """Figure 3(b) and the odd figures of Appendix B: optimized C over the best banded C."""

    def build(context: Context) -> Drawing:
        include: tuple[str, ...] = ("banded+poisson", "blt-3", "blt-4", "toeplitz")
        if (epochs, bins) != MAIN:
            include = ("banded+poisson", "blt-4", "toeplitz")
        setting = _setting(epochs, bins, include, _widths(bins))
        return Drawing([improvement_panel(setting, context.compare(setting), include[0])])

    return build


def samples(context: Context) -> Drawing:
    """Figure 5: RMSE lost by optimizing with fewer frozen samples, over seeds of the samples."""
    epochs, bins = MAIN

    def optimum(epsilon: float, count: int, seed: int) -> Task:
        asked = None if count == kinds.find("blt").samples else count
        return tasks.amplified_task(
            "blt", bins, epochs, epsilon, DELTA, buffers=4, samples=asked, seed=seed
        )

    def best(epsilon: float) -> Task:
        # from the optimum of the largest count drawn: so many samples polish rather than search
        last = optimum(epsilon, SAMPLES[-1], SEEDS[0])
        return Task.of("amplified", (last,), **{**last.arguments, "samples": MOST_SAMPLES})

    def error(source: Task) -> Task:
        # on the same fresh samples for every C: their errors mostly cancel
        given = source.arguments["epsilon"]
        return tasks.sigma_task(source, tasks.BALLS, bins, epochs, given, DELTA)

    references = {epsilon: error(best(epsilon)) for epsilon in SAMPLE_EPSILONS}
    cells = {
        (epsilon, count): [error(optimum(epsilon, count, seed)) for seed in SEEDS]
        for epsilon in SAMPLE_EPSILONS
        for count in SAMPLES
    }
    found = context.run([*references.values(), *(t for each in cells.values() for t in each)])
    # of the mean over seeds, by Student's t
    reach = float(stats.t.ppf(0.975, len(SEEDS) - 1)) / math.sqrt(len(SEEDS))
    curves = []
    for epsilon, reference in references.items():
        least = found[reference].record["rmse"]
        losses = np.array(
            [
                [100 * (found[task].record["rmse"] / least - 1) for task in cells[epsilon, count]]
                for count in SAMPLES
            ]
        )
        mean, half = losses.mean(1), reach * losses.std(1, ddof=1)
        curves.append(
            Curve(
                f"ε = {epsilon:g}",
                SAMPLES,
                mean.tolist(),
                (mean - half).tolist(),
                (mean + half).tolist(),
            )
        )
    return Drawing(
        [
            Panel(
                curves,
                f"BLT with 4 buffers, {epochs} epochs × {bins} iterations, δ = {DELTA:g}; "
                f"{len(SEEDS)} seeds, 95%",
                "frozen samples per optimization step (log scale)",
                f"RMSE above that with {MOST_SAMPLES:,} samples (%)\nlower is better",
                zero_line=True,
            )
        ]
    )


def timings(context: Context) -> Drawing:
    """Figure 4: seconds to optimize C at ε = 1 (here: to convergence, not 300 steps).

    Of processors, which other work on the machine does not lengthen; the CSV has wall time too.
    """
    cells = {
        (epochs, bins): [
            tasks.amplified_task("blt", bins, epochs, 1.0, DELTA, buffers=4, seed=seed)
            for seed in SEEDS
        ]
        for epochs, bins in TIMED
    }
    found = context.run(task for runs in cells.values() for task in runs)
    epochs_list = sorted({epochs for epochs, _ in TIMED})
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "epochs",
            "iterations_per_epoch",
            "seed",
            "seconds",
            "cpu_seconds",
            "evaluations",
            "device",
            "made",
        ]
    )
    medians = {}
    for (epochs, bins), runs in cells.items():
        records = [found[task].record for task in runs]
        for seed, r in zip(SEEDS, records, strict=True):
            measured = r["seconds"], r["cpu_seconds"], r["evaluations"]
            writer.writerow([epochs, bins, seed, *measured, r["device"], r["made"]])
        medians[epochs, bins] = [
            statistics.median(r[name] for r in records) for name in ("cpu_seconds", "evaluations")
        ]
    lines = [
        "Processor seconds to optimize a BLT with 4 buffers at ε = 1, δ = 1e-5, to convergence:",
        f"medians of {len(SEEDS)} runs, evaluations of the objective in parentheses",
        "(in each process the first run of a shape compiles)",
        f"{'iterations per epoch':<24}" + "".join(f"{f'{e} epochs':>16}" for e in epochs_list),
    ]
    for bins in sorted({bins for _, bins in TIMED}):
        values = [medians[epochs, bins] for epochs in epochs_list]
        texts = [f"{seconds:.1f} ({evaluations:g})" for seconds, evaluations in values]
        lines.append(f"{bins:<24}" + "".join(f"{text:>16}" for text in texts))
    return Drawing(table="\n".join(lines) + "\n", csv=buffer.getvalue())


FIGURES: dict[str, tuple[str, str, Callable[[Context], Drawing]]] = {
    "near-exact-2a": ("Figure 2(a)", "DP-SGD: improvement by amplification", fixed_identity),
    "near-exact-2b": ("Figure 2(b)", "64 bands: improvement by amplification", fixed_banded),
    "near-exact-3a": ("Figure 3(a)", "best number of bands, by amplification", best_width(*MAIN)),
    "near-exact-3b": ("Figure 3(b)", "optimized C over the best banded C", optimized(*MAIN)),
    "near-exact-4": ("Figure 4", "table of optimization times", timings),
    "near-exact-5": ("Figure 5", "RMSE lost by fewer samples per step", samples),
    **{
        f"near-exact-{8 + 2 * i + j}": (
            f"Figure {8 + 2 * i + j}",
            f"{epochs} epochs × {bins} iterations: {what}",
            make(epochs, bins),
        )
        for i, (epochs, bins) in enumerate(APPENDIX)
        for j, (what, make) in enumerate(
            [("best number of bands", best_width), ("optimized C", optimized)]
        )
    },
}
