"""Choquette-Choo, Ganesh, Haque, Steinke, Thakurta 2024: "Near-exact privacy amplification".

All figures use δ = 1e-5, add-remove adjacency of one example, and RMSE of prefix sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from common import Builder, Drawing, Run, figures, main
from scipy import stats

from mfopt.experiments import families
from mfopt.experiments.comparison import Row, improvements
from mfopt.experiments.decision_plots import EPSILON, run_size
from mfopt.experiments.families import WIDTHS, Comparison
from mfopt.experiments.mechanisms import AmplifiedCell, Goal, SigmaCell
from mfopt.experiments.plots import Curve, Panel, around

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
DELTA = 1e-5
MAIN = (16, 128)
CURVE_SAMPLES = 2**13  # of σ where nothing but a curve is drawn: 0.05 to 0.2%
APPENDIX = [(epochs, bins) for epochs in (8, 16, 32) for bins in (32, 64, 128)]
SAMPLES = (2**7, 2**9, 2**11)  # of Figure 5, whose text names 2^9
MOST_SAMPLES = 2**18
SAMPLE_EPSILONS = (0.5, 2.0, 4.0)
SEEDS = tuple(range(5))  # of the samples
LOWEST = -40.0  # percent: a far worse mechanism would squeeze all the others into one line
BY_SAMPLING = ("unamplified", "poisson", "balls-in-bins")


def improvement_panel(setting: Comparison, rows: Sequence[Row], baseline: str) -> Panel:
    """Percent by which each family's RMSE is below the baseline's, against ε."""
    gains = improvements(rows, baseline)
    curves = []
    for family in dict.fromkeys(row.family for row in rows if row.family != baseline):
        at = sorted(e for f, e in gains if f == family)
        y, low, high = ([gains[family, e][k] for e in at] for k in range(3))
        curves.append(Curve(families.label(family), at, y, low, high))
    axis = f"RMSE below {families.label(baseline)} (%)\nhigher is better; bands: 95%"
    values = [value for curve in curves for value in curve.y]
    near = [value for value in values if value >= LOWEST]
    if len(near) == len(values) or len(near) < len(values) / 2:
        return Panel(curves, run_size(setting), EPSILON, axis, zero_line=True)
    curves = [curve for curve in curves if max(curve.y) >= LOWEST]
    limits = (min(LOWEST, min(near)), max(*near, 0) + 3)
    axis += f"; below {LOWEST:g}% not shown"
    return Panel(curves, run_size(setting), EPSILON, axis, zero_line=True, y_range=limits)


def improvements_figure(
    epochs: int,
    bins: int,
    include: tuple[str, ...],
    widths: tuple[int, ...] = WIDTHS,
    samples: int = 2**15,
) -> Builder:
    """Percent by which RMSE is below that of the first of some families, against ε.

    Args:
      epochs, bins: of the run.
      include: families.
      widths: numbers of bands; up to the iterations of an epoch, beyond which columns overlap.
      samples: of each σ.
    """

    def build(run: Run) -> Drawing:
        fitting = tuple(width for width in widths if width <= bins)
        setting = Comparison(bins, epochs, EPSILONS, DELTA, include, fitting, samples=samples)
        rows = run.compare(setting)
        panel = improvement_panel(setting, rows, include[0])
        bands = f"{widths[0]} bands, " if len(widths) == 1 < widths[0] else ""
        return Drawing([panel._replace(title=bands + panel.title)])

    return build


def best_width(epochs: int, bins: int) -> Builder:
    """Figure 3(a) and the even figures of Appendix B: each curve at its best number of bands."""
    include = tuple(f"banded+{sampling}" for sampling in BY_SAMPLING)
    # the cells of the main size are the comparison's too, a table
    count = 2**15 if (epochs, bins) == MAIN else CURVE_SAMPLES
    return improvements_figure(epochs, bins, include, samples=count)


def optimized(epochs: int, bins: int) -> Builder:
    """Figure 3(b) and the odd figures of Appendix B: optimized C over the best banded C."""
    three = ("blt-3",) if (epochs, bins) == MAIN else ()
    return improvements_figure(epochs, bins, ("banded+poisson", *three, "blt-4", "toeplitz"))


def samples(run: Run) -> Drawing:
    """Figure 5: RMSE lost by optimizing with fewer frozen samples, over seeds of the samples."""
    epochs, bins = MAIN

    def optimum(epsilon: float, seed: int, count: int | None = None) -> AmplifiedCell:
        goal = Goal(bins, epochs, epsilon, DELTA, seed=seed)
        return AmplifiedCell(goal, "blt", buffers=4, samples=count)

    def error(source: AmplifiedCell) -> SigmaCell:
        # on the same fresh samples for every C: their errors mostly cancel
        return SigmaCell(source, dataclasses.replace(source.goal, seed=0))

    cells: dict[tuple[float, int, int], SigmaCell] = {}
    for epsilon in SAMPLE_EPSILONS:
        for count in SAMPLES:
            for seed in SEEDS:
                cells[epsilon, count, seed] = error(optimum(epsilon, seed, count))
        # from the optimum of the default search: so many samples polish rather than search
        last = optimum(epsilon, SEEDS[0])
        cells[epsilon, MOST_SAMPLES, 0] = error(
            dataclasses.replace(last, samples=MOST_SAMPLES, start=last)
        )
    results = run.records(cells)
    # of the mean over seeds, by Student's t
    reach = float(stats.t.ppf(0.975, len(SEEDS) - 1)) / math.sqrt(len(SEEDS))
    curves = []
    for epsilon in SAMPLE_EPSILONS:
        least = results[epsilon, MOST_SAMPLES, 0]["rmse"]
        losses = np.array(
            [[100 * (results[epsilon, n, s]["rmse"] / least - 1) for s in SEEDS] for n in SAMPLES]
        )
        half = reach * losses.std(1, ddof=1)
        curves.append(around(f"ε = {epsilon:g}", SAMPLES, losses.mean(1), half))
    panel = Panel(
        curves,
        f"BLT with 4 buffers, {epochs} epochs × {bins} iterations, δ = {DELTA:g}; "
        f"{len(SEEDS)} seeds, 95%",
        "frozen samples per optimization step (log scale)",
        f"RMSE above that with {MOST_SAMPLES:,} samples (%)\nlower is better",
        zero_line=True,
    )
    return Drawing([panel])


# Figures 18 and 19 of the appendix are Figures 3(a) and 3(b) printed again.
FIGURES = figures(
    {
        "near-exact-2a": improvements_figure(*MAIN, tuple(f"dpsgd+{s}" for s in BY_SAMPLING), (1,)),
        "near-exact-2b": improvements_figure(
            *MAIN, tuple(f"banded+{s}" for s in BY_SAMPLING), (64,)
        ),
        "near-exact-3a": best_width(*MAIN),
        "near-exact-3b": optimized(*MAIN),
        "near-exact-5": samples,
        **{
            f"near-exact-{8 + 2 * position + column}": draw(*size)
            for position, size in enumerate(APPENDIX)
            for column, draw in enumerate((best_width, optimized))
            if size != MAIN
        },
    }
)


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
