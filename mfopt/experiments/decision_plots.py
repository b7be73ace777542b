"""Plots of a comparison: error for ε, for memory and for time, gain over a baseline; best first.

A mechanism has one colour in all of them, by its kind of C, and one line or marker, by the sampling
that it is run under. At most eight curves are drawn, each with its name at its end; what is left
out is in the CSV beside the plot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator
from matplotlib.typing import LineStyleType
from scipy.optimize import isotonic_regression

from mfopt.experiments import comparison, families
from mfopt.experiments.comparison import DEFAULT_BASELINE, Z95, Row, improvements
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import B_MIN_SEP, BALLS, FRESH, POISSON, UNAMPLIFIED
from mfopt.experiments.plots import (
    COLOURS,
    EVERY,
    Curve,
    Panel,
    named_ticks,
    plain_ticks,
    tidy,
    write_files,
)
from mfopt.experiments.recommendation import TIE

MOST_CURVES = 8
EPSILON = "privacy budget ε (log scale)"
_LOWEST = -40.0  # percent: a far worse mechanism would squeeze all the others into one line
_APART = 0.05  # of the axes' height, between two names

# by kind of C; a kind that is not named here is black
_COLOUR = {
    "blt": COLOURS[0],
    "toeplitz": COLOURS[2],
    "banded": COLOURS[1],
    "banded-toeplitz": COLOURS[4],
    "cyclic-blocks": COLOURS[5],
    "wave-blt": COLOURS[3],
    "identity": "0.45",
    "dense": COLOURS[7],
    "banded-inverse-sqrt": "#882255",
    "sqrt": "#44AA99",
    "tree": "#999933",
}
_SAMPLING: dict[str, tuple[str, LineStyleType, str]] = {
    BALLS: ("balls-in-bins", "-", "o"),
    FRESH: ("fresh bins", "-.", "D"),
    POISSON: ("Poisson, cyclic Poisson", "--", "s"),
    B_MIN_SEP: ("b-min-sep", (0, (5, 1, 1, 1, 1, 1)), "v"),
    UNAMPLIFIED: ("no amplification", ":", "^"),
}


class _Look(NamedTuple):
    colour: str
    line: LineStyleType
    marker: str
    face: str  # filled where C is time-scaled

    @property
    def points(self) -> dict[str, Any]:
        return {"color": self.colour, "marker": self.marker, "markerfacecolor": self.face}


def _look(name: str) -> _Look:
    family = families.find(name)
    colour = _COLOUR.get(family.kind, "black")
    _, line, marker = _SAMPLING[family.sampling]
    return _Look(colour, line, marker, colour if family.scaled else "white")


def where(setting: Comparison) -> str:
    """The size of a run and its δ, in words."""
    return f"{setting.epochs} epochs × {setting.bins} iterations, δ = {setting.delta:g}"


def error_figure(setting: Comparison, rows: Sequence[Row], baseline: str | None) -> Figure:
    """Figure of RMSE relative to the lowest at each ε, with 95% intervals: the best families.

    Below each ε stands the least RMSE of all.
    """
    chosen, least = best_families(rows, baseline), comparison.least(rows)
    figure = Figure(figsize=(8.6, 5.2), layout="constrained")
    axis = figure.subplots()
    ends = []
    for name in chosen:
        mine = sorted((row for row in rows if row.family == name), key=lambda row: row.epsilon)
        look, relative = _look(name), [row.rmse / least[row.epsilon] for row in mine]
        excess = [100 * (each - 1) for each in relative]
        axis.errorbar(
            [row.epsilon for row in mine],
            excess,
            # with caps: a band so narrow would not be seen
            [100 * Z95 * row.relative_error * row.rmse / least[row.epsilon] for row in mine],
            linestyle=look.line,
            markersize=5,
            linewidth=1.6,
            capsize=4,
            **look.points,
        )
        ends.append((min(excess[-1], -_LOWEST), families.label(name), look.colour))
    axis.set_xscale("log")
    axis.set_xlabel("privacy budget ε (log scale)\nand the least RMSE, in clip norms")
    axis.set_ylabel("RMSE of prefix sums above the least (%)\nlower is better")
    named_ticks(axis, least)
    axis.xaxis.set_major_formatter(
        FuncFormatter(lambda at, _: f"{at:g}\n{least[at]:.4g}" if at in least else "")
    )
    axis.set_ylim(-0.5, min(axis.get_ylim()[1], -_LOWEST))
    tidy(axis)
    _name_ends(axis, ends)
    left_out = len({row.family for row in rows}) - len(chosen)
    rest = f"; {left_out} more are in the CSV" if left_out else ""
    axis.set_title(f"{where(setting)}{rest}", fontsize="medium")
    _sampling_legend(figure, chosen)
    return figure


def memory_figure(setting: Comparison, sizes: Sequence[Row]) -> Figure:
    """RMSE against the memory of the noise, a panel for each ε; the Pareto front is joined.

    Mechanisms off the front are grey; those on it are named. What makes past draws again in place
    of keeping them pays for its memory in time: it is never on the front.
    """
    one_each = len({(row.family, row.epsilon) for row in sizes}) == len(sizes)
    best = "; each at its best size" if one_each else ""
    crosses = "; ×: regenerates past draws" if any(row.draws > 1 for row in sizes) else ""
    return _front_figure(
        [row for row in sizes if row.draws <= 1],
        [row for row in sizes if row.draws > 1],
        lambda row: row.memory,
        lambda row: f"{row.memory}",
        f"Error and memory: {where(setting)}\nnamed: the front, with its buffers{best}{crosses}",
        "noise buffers, × model size (log scale from 1 on)",
    )


def time_figure(setting: Comparison, rows: Sequence[Row], parameters: int) -> Figure:
    """RMSE against the measured time of a step's noise, as :func:`memory_figure`."""
    return _front_figure(
        rows,
        [],
        lambda row: 1e3 * (row.noise_seconds or math.nan),
        lambda row: f"{1e3 * (row.noise_seconds or math.nan):.3g} ms",
        f"Error and time of the noise: {where(setting)}; measured on this machine",
        f"noise of a step of {parameters:,} parameters (ms, log scale)",
    )


def _front_figure(
    rows: Sequence[Row],
    apart: Sequence[Row],
    cost: Callable[[Row], float],
    says: Callable[[Row], str],
    title: str,
    x_label: str,
) -> Figure:
    """RMSE against a cost, a panel for each ε; rows ``apart`` are drawn and never on the front."""

    def draw(axis: Axes, epsilon: float) -> None:
        front = pareto_front([row for row in rows if row.epsilon == epsilon], cost)
        here = [row for row in (*rows, *apart) if row.epsilon == epsilon]
        for some, marker in ((rows, "o"), (apart, "x")):
            mine = [row for row in some if row.epsilon == epsilon]
            x, y = [cost(row) for row in mine], [row.rmse for row in mine]
            axis.scatter(x, y, s=14, color="0.75", marker=marker)
        joined = [cost(row) for row in front], [row.rmse for row in front]
        axis.step(*joined, where="post", color="0.3", linewidth=1)
        for row in front:
            axis.plot(cost(row), row.rmse, **_look(row.family).points)
        axis.set_yscale("log")
        if min(cost(row) for row in here) > 0:
            axis.set_xscale("log")
            plain_ticks(axis.xaxis, [cost(row) for row in here])
        else:
            axis.set_xscale("symlog", linthresh=1, linscale=0.5)
            most = max(cost(row) for row in here)
            ticks = [0, *(4**k for k in range(10) if 4**k <= max(most, 1))]
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.xaxis.set_minor_locator(NullLocator())
        # the whole front, and of the rest what is not far above it
        top = max(1.1 * front[0].rmse, min(2.5 * front[-1].rmse, max(row.rmse for row in here)))
        axis.set_ylim(0.93 * front[-1].rmse, top)
        plain_ticks(axis.yaxis, [front[-1].rmse, top])
        _name_ends(
            axis, [(r.rmse, f"{_sized(r)}: {says(r)}", _look(r.family).colour) for r in front]
        )

    labels = x_label, "RMSE of prefix sums (clip norms, log scale)"
    return _panels([*rows, *apart], title, labels, draw, size=(5.4, 3.4))


def gains_figure(setting: Comparison, rows: Sequence[Row], baseline: str) -> Figure:
    """Percent by which each RMSE is below the baseline's, a panel for each ε; best mean on top.

    What is more than 40% above the baseline stands at the edge with its number.
    """
    gains = improvements(rows, baseline)
    of: dict[str, list[float]] = {}
    for (family, _), gain in gains.items():
        of.setdefault(family, []).append(max(gain.percent, _LOWEST))
    order = sorted(of, key=lambda family: sum(of[family]) / len(of[family]))

    def draw(axis: Axes, epsilon: float) -> None:
        for place, family in enumerate(order):
            if (gain := gains.get((family, epsilon))) is None:
                continue
            look = _look(family)
            if gain.percent < _LOWEST:
                axis.plot(_LOWEST, place, marker="<", color=look.colour, clip_on=False)
                axis.annotate(
                    f"{gain.percent:,.0f}%",
                    (_LOWEST, place),
                    textcoords="offset points",
                    xytext=(8, -3),
                    fontsize=7,
                    color="0.25",
                )
                continue
            reach = [[max(gain.percent - gain.low, 0)], [max(gain.high - gain.percent, 0)]]
            axis.errorbar(gain.percent, place, xerr=reach, capsize=3, markersize=5, **look.points)
        axis.axvline(0, color="0.6", linewidth=1, zorder=1)
        first = axis.get_subplotspec().is_first_col()  # type: ignore[union-attr]
        texts = [families.label(f) if first else "" for f in order]
        axis.set_yticks(range(len(order)), texts, fontsize=8)
        axis.set_xlim(_LOWEST, max(*(gain.percent for gain in gains.values()), 0) + 4)

    return _panels(
        [row for row in rows if (row.family, row.epsilon) in gains],
        f"Gain over {families.label(baseline)}, 95% intervals: {where(setting)}",
        ("RMSE below the baseline's (%)", ""),
        draw,
        size=(2.6, max(2.6, 0.9 + 0.145 * len(order))),
        columns=3,
        names=2.2,
    )


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
    least = comparison.least(rows)
    excess: dict[str, list[float]] = {}
    for row in rows:
        excess.setdefault(row.family, []).append(math.log(row.rmse / least[row.epsilon]))
    order = sorted(excess, key=lambda name: sum(excess[name]) / len(excess[name]))
    one_each = {
        families.find(name)._replace(label="", buffers=0, slow=False): name for name in order[::-1]
    }
    chosen = [name for name in order if name in one_each.values()][:MOST_CURVES]
    if baseline in excess and baseline not in chosen:
        chosen[-1] = baseline
    return chosen


def _panels(
    rows: Sequence[Row],
    title: str,
    labels: tuple[str, str],
    draw: Callable[[Axes, float], None],
    size: tuple[float, float],
    columns: int = 2,
    names: float = 0.0,
) -> Figure:
    """A panel for each ε, with what sampling each marker stands for."""
    epsilons = sorted({row.epsilon for row in rows})
    columns = min(len(epsilons), columns)
    count = -(-len(epsilons) // columns)
    inches = names + size[0] * columns, size[1] * count + 0.9
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots(count, columns, squeeze=False).ravel()
    for axis, epsilon in zip(axes, epsilons, strict=False):
        draw(axis, epsilon)
        axis.set_title(f"ε = {epsilon:g}", fontsize="medium")
        tidy(axis)
    for axis in axes[len(epsilons) :]:
        axis.remove()
    for axis in axes[max(len(epsilons) - columns, 0) : len(epsilons)]:
        axis.set_xlabel(labels[0])
    figure.suptitle(title, fontsize="medium")
    if labels[1]:
        figure.supylabel(labels[1], fontsize="medium")
    _sampling_legend(figure, sorted({row.family for row in rows}))
    return figure


def _name_ends(axis: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names at the right border, each at the height of its value as far as they do not overlap."""
    axis.autoscale_view()  # places need the final limits
    to_axes, left = axis.transData + axis.transAxes.inverted(), axis.get_xlim()[0]
    wanted = [(float(to_axes.transform((left, value))[1]), name, c) for value, name, c in ends]
    wanted.sort()
    # to the name's left edge: to its middle a line would cross the names beside it
    arrow = {"arrowstyle": "-", "color": "0.8", "linewidth": 0.6}
    arrow |= {"relpos": (0.0, 0.5), "shrinkA": 1.0}
    for place, (height, name, colour) in zip(_spread([w[0] for w in wanted]), wanted, strict=True):
        axis.annotate(
            name,
            xy=(1.0, height),
            xytext=(1.03, place),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=8,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops=arrow,
        )


def _spread(heights: Sequence[float]) -> list[float]:
    """Increasing heights as near to these as keeps them apart, inside the axes."""
    steps = _APART * np.arange(len(heights))
    free = isotonic_regression(np.asarray(heights) - steps).x
    placed: list[float] = (np.clip(free, 0, max(1 - steps[-1], 0)) + steps).tolist()
    return placed


def _sampling_legend(figure: Figure, names: Sequence[str]) -> None:
    present = {families.find(name).sampling for name in names}
    grey: dict[str, Any] = {"color": "0.3"}
    handles = [
        Line2D([], [], linestyle=line, marker=marker, markerfacecolor="white", label=text, **grey)
        for sampling, (text, line, marker) in _SAMPLING.items()
        if sampling in present
    ]
    if any(families.find(name).scaled for name in names):
        filled = "filled: time-scaled C"
        handles.append(Line2D([], [], marker="o", linestyle="", label=filled, **grey))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize="small",
    )


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
    if baseline is not None and len(setting.include) > 1:
        yield "-improvement", gains_figure(setting, rows, baseline)
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
    """STEM.csv, .json, .txt and plots of RMSE, improvement over ``baseline``, memory and time.

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
    return write_files(stem, texts, drawn, kinds)


def improvement_panel(
    setting: Comparison, rows: Sequence[Row], baseline: str, title: str = ""
) -> Panel:
    """Percent by which each family's RMSE is below the baseline's, against ε.

    Args:
      setting: what is compared, and where.
      rows: the rows to show, one for each family and ε.
      baseline: family that improvements are over.
      title: heading.
    """
    gains = improvements(rows, baseline)
    curves = []
    for family in dict.fromkeys(row.family for row in rows if row.family != baseline):
        at = sorted(e for f, e in gains if f == family)
        y, low, high = ([gains[family, e][k] for e in at] for k in range(3))
        curves.append(Curve(families.label(family), at, y, low, high))
    axis = f"RMSE below {families.label(baseline)} (%)\nhigher is better; bands: 95%"
    values = [value for curve in curves for value in curve.y]
    near = [value for value in values if value >= _LOWEST]
    if len(near) == len(values) or len(near) < len(values) / 2:
        return Panel(curves, title or where(setting), EPSILON, axis, zero_line=True)
    curves = [curve for curve in curves if max(curve.y) >= _LOWEST]
    limits = (min(_LOWEST, min(near)), max(*near, 0) + 3)
    axis += f"; below {_LOWEST:g}% not shown"
    return Panel(curves, title or where(setting), EPSILON, axis, zero_line=True, y_range=limits)
