"""Plots of a comparison: error for ε, for memory and for time; best first.

At most eight curves are drawn; what is left out is in the CSV beside the plot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from mfopt.experiments import comparison, families, plots
from mfopt.experiments.comparison import DEFAULT_BASELINE, Z95, Row
from mfopt.experiments.families import Comparison
from mfopt.experiments.plots import EVERY, Curve, Panel, around
from mfopt.experiments.recommendation import TIE

MOST_CURVES = 8
EPSILON = "privacy budget ε (log scale)"
_LOWEST = -40.0  # percent: a far worse mechanism would squeeze all the others into one line


def run_size(setting: Comparison) -> str:
    """The size of a run and its δ, in words."""
    return f"{setting.epochs} epochs × {setting.bins} iterations, δ = {setting.delta:g}"


def error_figure(setting: Comparison, rows: Sequence[Row], baseline: str | None) -> Figure:
    """Figure of RMSE relative to the lowest at each ε, with 95% intervals: the best families.

    Below each ε stands the least RMSE of all.
    """
    chosen, lowest = best_families(rows, baseline), comparison.lowest_rmse(rows)
    curves = []
    for name in chosen:
        mine = sorted((row for row in rows if row.family == name), key=lambda row: row.epsilon)
        above = np.array([100 * row.rmse / lowest[row.epsilon] for row in mine])
        half = Z95 * above * [row.relative_error for row in mine]
        epsilons = [row.epsilon for row in mine]
        curves.append(around(families.label(name), epsilons, above - 100, half))
    left_out = len({row.family for row in rows}) - len(chosen)
    note = f"; {left_out} more are in the CSV" if left_out else ""
    x_label = f"{EPSILON}\nand the least RMSE, in clip norms"
    y_label = "RMSE of prefix sums above the least (%)\nlower is better"
    top = min(1.05 * max(max(curve.y) for curve in curves) + 0.5, -_LOWEST)
    title = f"{run_size(setting)}{note}"
    figure = plots.draw([Panel(curves, title, x_label, y_label, y_range=(-0.5, top))])
    figure.axes[0].xaxis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x:g}\n{lowest[x]:.4g}" if x in lowest else "")
    )
    return figure


def memory_figure(setting: Comparison, sizes: Sequence[Row]) -> Figure:
    """RMSE against the memory of the noise, a panel for each ε; the Pareto front is joined.

    Mechanisms off the front are grey; those on it are named. What makes past draws again in place
    of keeping them pays for its memory in time: it is never on the front.
    """
    one_each = len({(row.family, row.epsilon) for row in sizes}) == len(sizes)
    best = "; each at its best size" if one_each else ""
    return _front_figure(
        [row for row in sizes if row.draws <= 1],
        [row for row in sizes if row.draws > 1],
        lambda row: row.memory,
        "",
        f"Error and memory: {run_size(setting)}\nnamed: the front, with its buffers{best}",
        "noise buffers, × model size\n(log scale from 1 on)",
    )


def time_figure(setting: Comparison, rows: Sequence[Row], parameters: int) -> Figure:
    """RMSE against the measured time of a step's noise, as :func:`memory_figure`."""
    return _front_figure(
        rows,
        [],
        lambda row: 1e3 * (row.noise_seconds or math.nan),
        " ms",
        f"Error and time of the noise: {run_size(setting)}; measured on this machine",
        f"noise of a step of\n{parameters:,} parameters (ms, log scale)",
    )


def _front_figure(
    rows: Sequence[Row],
    regenerating: Sequence[Row],
    cost: Callable[[Row], float],
    unit: str,
    title: str,
    x_label: str,
) -> Figure:
    """RMSE against a cost, a panel for each ε; rows ``apart`` are drawn and never on the front."""

    def points(label: str, some: Sequence[Row], **look: Any) -> Curve:
        look = {"linestyle": "", "marker": "o", **look}
        return Curve(label, [cost(row) for row in some], [row.rmse for row in some], look=look)

    panels = []
    for epsilon in sorted({row.epsilon for row in (*rows, *regenerating)}):
        kept_rows, aside = (
            [row for row in chosen if row.epsilon == epsilon] for chosen in (rows, regenerating)
        )
        front = pareto_front(kept_rows, cost)
        curves = [points("others", kept_rows, color="0.75", markersize=4)]
        if aside:
            label = "regenerate past draws"
            curves.append(points(label, aside, color="0.75", markersize=4, marker="x"))
        line = {"linestyle": "-", "marker": "", "drawstyle": "steps-post", "color": "0.3"}
        curves.append(points("front", front, **line, linewidth=1))
        curves += [points(f"{_sized(row)}: {cost(row):.4g}{unit}", [row]) for row in front]
        # the whole front, and of the rest what is not far above it
        highest = max(row.rmse for row in (*kept_rows, *aside))
        top = max(1.1 * front[0].rmse, min(2.5 * front[-1].rmse, highest))
        words = f"ε = {epsilon:g}", x_label, "RMSE of prefix sums\n(clip norms, log scale)"
        limits = 0.93 * front[-1].rmse, top
        panels.append(Panel(curves, *words, log_x=False, log_y=True, y_range=limits))
    figure, costs = plots.draw(panels, title=title), [cost(row) for row in (*rows, *regenerating)]
    for axis in figure.axes:
        if min(costs) > 0:
            axis.set_xscale("log")
            plots.plain_ticks(axis.xaxis, costs)
        else:
            axis.set_xscale("symlog", linthresh=1, linscale=0.5)
            ticks = [0, *(4**k for k in range(10) if 4**k <= max(*costs, 1))]
            axis.set_xlim(-0.3, 1.5 * max(*costs, 1))
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.xaxis.set_minor_locator(NullLocator())
    return figure


def pareto_front(rows: Sequence[Row], cost: Callable[[Row], float]) -> list[Row]:
    """Pareto front: rows by cost, each with less error, by more than a tie, than any that costs no
    more."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (cost(row), row.rmse)):
        if not front or row.rmse < front[-1].rmse * (1 - TIE):
            front.append(row)
    return front


def best_families(rows: Sequence[Row], baseline: str | None = None) -> list[str]:
    """Names of up to eight families by mean log RMSE over ε, lowest first; the baseline is among
    them.

    Of those that differ in their size alone there is one, the best.
    """
    lowest = comparison.lowest_rmse(rows)
    excess: dict[str, list[float]] = {}
    for row in rows:
        excess.setdefault(row.family, []).append(math.log(row.rmse / lowest[row.epsilon]))
    order = sorted(excess, key=lambda name: fmean(excess[name]))
    one_each = {
        families.find(name)._replace(label="", buffers=0, slow=False): name for name in order[::-1]
    }
    chosen = [name for name in order if name in one_each.values()][:MOST_CURVES]
    if baseline in excess and baseline not in chosen:
        chosen[-1] = baseline
    return chosen


def _sized(row: Row) -> str:
    name = families.label(row.family)
    return f"{name} ({row.size})" if families.find(row.family).bands and row.size else name


def figures(
    setting: Comparison,
    rows: Sequence[Row],
    sizes: Sequence[Row],
    baseline: str | None,
    parameters: int | None = None,
) -> Iterator[tuple[str, Figure]]:
    """Every plot of a comparison with the part of its file's name.

    Args:
      setting, rows, sizes, baseline, parameters: as of :func:`write`.
    """
    yield "-rmse", error_figure(setting, rows, baseline)
    yield "-memory", memory_figure(setting, sizes)
    if parameters is not None:
        yield "-time", time_figure(setting, rows, parameters)


def write(
    stem: Path,
    setting: Comparison,
    rows: Sequence[Row],
    sizes: Sequence[Row],
    baseline: str | None = DEFAULT_BASELINE,
    parameters: int | None = None,
    kinds: Collection[str] = EVERY,
) -> list[Path]:
    """STEM.csv, .json, .txt and plots of RMSE, memory and time.

    STEM-sizes.csv has the rows of all sizes.

    Args:
      stem: path without suffix of the files.
      setting: what is compared, and where.
      rows: the rows to show, one for each family and ε.
      sizes: rows of every size that was tried.
      baseline: family that improvements are over; None for none.
      parameters: of the model that the rows' noise was timed for; None where it was not.
      kinds: suffixes of the files that are wanted.
    """
    texts = {
        ".csv": comparison.csv_text(rows, baseline),
        "-sizes.csv": comparison.csv_text(sizes),
        ".json": json.dumps(comparison.described(setting, rows, baseline), indent=2) + "\n",
        ".txt": comparison.text_table(rows, baseline) + "\n",
    }
    drawn = dict(figures(setting, rows, sizes, baseline, parameters))
    return plots.write_files(stem, texts, drawn, kinds)
