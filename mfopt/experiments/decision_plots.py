"""Plots of a comparison: error for ε and for memory; best first.

At most eight curves are drawn; what is left out is in the CSV beside the plot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mfopt.experiments import comparison, plots
from mfopt.experiments.comparison import DEFAULT_BASELINE, Z95, Row
from mfopt.experiments.families import Comparison
from mfopt.experiments.plots import Curve, Panel, around
from mfopt.experiments.recommendation import TIE

MOST_CURVES = 8
EPSILON = "privacy budget ε (log scale)"


def run_size(setting: Comparison) -> str:
    """The size of a run and its δ, in words."""
    return f"{setting.epochs} epochs × {setting.bins} iterations, δ = {setting.delta:g}"


def _error_figure(setting: Comparison, rows: Sequence[Row], baseline: str | None) -> Figure:
    """Figure of RMSE relative to the lowest at each ε, with 95% intervals: the best families.

    Below each ε stands the least RMSE of all.
    """
    chosen, lowest = best_families(rows, baseline), _lowest_rmse(rows)
    curves = []
    for name in chosen:
        mine = sorted((row for row in rows if row.family == name), key=lambda row: row.epsilon)
        above = np.array([100 * row.rmse / lowest[row.epsilon] for row in mine])
        half = Z95 * above * [row.relative_error for row in mine]
        epsilons = [row.epsilon for row in mine]
        curves.append(around(mine[0].label, epsilons, above - 100, half))
    left_out = len({row.family for row in rows}) - len(chosen)
    note = f"; {left_out} more are in the CSV" if left_out else ""
    x_label = f"{EPSILON}\nand the least RMSE, in clip norms"
    y_label = "RMSE of prefix sums above the least (%)\nlower is better; up to 40 shown"
    # percent: a far worse mechanism would squeeze all the others into one line
    top = min(1.05 * max(max(curve.y) for curve in curves) + 0.5, 40.0)
    title = f"{run_size(setting)}{note}"
    figure = plots.draw([Panel(curves, title, x_label, y_label, y_range=(-0.5, top))])
    figure.axes[0].xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x:g}\n{lowest[x]:.4g}" if x in lowest else "")
    )
    return figure


def memory_figure(setting: Comparison, sizes: Sequence[Row]) -> Figure:
    """RMSE against the memory of the noise, a panel for each ε; the Pareto front is joined.

    Mechanisms off the front are grey; those on it are named. What regenerates past draws instead of
    keeping them pays for its memory in time: it is never on the front.
    """

    def points(label: str, rows: Sequence[Row], **look: object) -> Curve:
        look = {"linestyle": "", "marker": "o", **look}
        return Curve(label, [row.memory for row in rows], [row.rmse for row in rows], look=look)

    axis_words = (
        "noise buffers, × model size\n(log scale from 1 on)",
        "RMSE of prefix sums\n(clip norms, log scale)",
    )
    panels = []
    for epsilon in sorted({row.epsilon for row in sizes}):
        rows = [row for row in sizes if row.epsilon == epsilon]
        keeping = [row for row in rows if row.draws <= 1]
        regenerating = [row for row in rows if row.draws > 1]
        front = pareto_front(keeping)
        curves = [points("others", keeping, color="0.75", markersize=4)]
        if regenerating:
            look = {"color": "0.75", "markersize": 4, "marker": "x"}
            curves.append(points("regenerate past draws", regenerating, **look))
        line = {"linestyle": "-", "marker": "", "drawstyle": "steps-post", "color": "0.3"}
        curves.append(points("front", front, **line, linewidth=1))
        named = front + [row for row in rows if comparison.is_file(row.family) and row not in front]
        for row in named:
            size = f" ({row.bands})" if row.bands else ""
            curves.append(points(f"{row.label}{size}: {row.memory}", [row]))
        # the whole front, and of the rest what is not far above it
        top = max(1.1 * front[0].rmse, min(2.5 * front[-1].rmse, max(row.rmse for row in rows)))
        top = max(top, *(1.1 * row.rmse for row in named))
        limits = 0.93 * front[-1].rmse, top
        title = f"ε = {epsilon:g}"
        panels.append(Panel(curves, title, *axis_words, log_x=False, log_y=True, y_range=limits))
    single_size = len({(row.family, row.epsilon) for row in sizes}) == len(sizes)
    best = "; each at its best size" if single_size else ""
    title = f"Error and memory: {run_size(setting)}\nnamed: the front and files, with buffers{best}"
    figure, largest = plots.draw(panels, title=title), max(1, *(row.memory for row in sizes))
    for axis in figure.axes:
        axis.set_xscale("symlog", linthresh=1, linscale=0.5)
        ticks = [0, *(4**k for k in range(10) if 4**k <= largest)]
        axis.set_xlim(-0.3, 1.5 * largest)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.xaxis.set_minor_locator(NullLocator())
    return figure


def pareto_front(rows: Sequence[Row]) -> list[Row]:
    """Rows by memory, each with less error, by more than a tie, than any that keeps no more."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.memory, row.rmse)):
        if not front or row.rmse < front[-1].rmse * (1 - TIE):
            front.append(row)
    return front


def best_families(rows: Sequence[Row], baseline: str | None = None) -> list[str]:
    """Up to eight families by mean log RMSE over ε, lowest first.

    The baseline and all files are among them.
    """
    lowest = _lowest_rmse(rows)
    excess: dict[str, list[float]] = {}
    for row in rows:
        excess.setdefault(row.family, []).append(math.log(row.rmse / lowest[row.epsilon]))
    order = sorted(excess, key=lambda name: fmean(excess[name]))
    required = [name for name in order if name == baseline or comparison.is_file(name)]
    others = [name for name in order if name not in required]
    chosen = {*required, *others[: max(MOST_CURVES - len(required), 0)]}
    return [name for name in order if name in chosen]


def _lowest_rmse(rows: Sequence[Row]) -> dict[float, float]:
    """The least RMSE at each ε."""
    return {
        epsilon: min(row.rmse for row in rows if row.epsilon == epsilon)
        for epsilon in dict.fromkeys(row.epsilon for row in rows)
    }


def write(
    stem: Path,
    setting: Comparison,
    rows: Sequence[Row],
    sizes: Sequence[Row],
    baseline: str | None = DEFAULT_BASELINE,
) -> list[Path]:
    """STEM.csv, .json and plots of RMSE and memory.

    STEM-sizes.csv has the rows of all sizes.

    Args:
      stem: path without suffix of the files.
      setting: what is compared, and where.
      rows: the rows to show, one for each family and ε.
      sizes: rows of every size that was tried.
      baseline: family that improvements are over; None for none.
    """
    texts = {
        ".csv": comparison.csv_text(rows, baseline),
        "-sizes.csv": comparison.csv_text(sizes),
        ".json": json.dumps(comparison.described(setting, rows, baseline), indent=2) + "\n",
    }
    drawn = {
        "-rmse": _error_figure(setting, rows, baseline),
        "-memory": memory_figure(setting, sizes),
    }
    return plots.write_files(stem, texts, drawn)
