"""Plots that can be read at a glance: one style, PNG and SVG, the data beside them as CSV."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator, StrMethodFormatter
from numpy.typing import ArrayLike

from mfopt._runtime._files import write

# Okabe and Ito's colours, distinct for any colour vision; markers repeat the distinction.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")
FORMATS = ("png", "svg")
EVERY = ("csv", "json", *FORMATS)  # kinds of files
_DPI = 150


class Curve(NamedTuple):
    """One line of a plot.

    Attributes:
      label: in the legend.
      x, y: points.
      low, high: borders of a 95% band, or None.
      like: label of a curve whose colour this one shares, dashed.
      look: of the line and its markers, in matplotlib's words, where it is not the usual one.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    like: str | None = None
    look: Mapping[str, Any] = {}


def around(label: str, x: Sequence[float], y: ArrayLike, half: ArrayLike) -> Curve:
    """A curve with a band.

    Args:
      label: in the legend.
      x, y: points.
      half: how far the band reaches on either side of each ``y``.
    """
    y, half = np.asarray(y, float), np.asarray(half, float)
    return Curve(label, list(x), y.tolist(), (y - half).tolist(), (y + half).tolist())


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
      curves: what is drawn.
      title, x_label, y_label: with units.
      log_x, log_y: logarithmic axes.
      zero_line: draw a line at y = 0.
      y_range: limits of the vertical axis.
    """

    curves: Sequence[Curve]
    title: str
    x_label: str
    y_label: str
    log_x: bool = True
    log_y: bool = False
    zero_line: bool = False
    y_range: tuple[float, float] | None = None


def draw(panels: Sequence[Panel], *, title: str = "", columns: int | None = None) -> Figure:
    """A figure with the panels in rows, one shared legend below them."""
    columns = min(len(panels), 3) if columns is None else columns
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    width = max(6.4, 4.4 * columns)
    longest = max(len(label) for label in labels)
    # about 14 characters of the legend's font an inch, and the line before them
    entry = 0.6 + longest / 14
    legend_columns = max(1, min(len(labels), int(width / entry)))
    legend_rows = -(-len(labels) // legend_columns)
    height = 3.9 * rows + (0.25 * (1 + title.count("\n")) if title else 0)
    size = width, height + 0.27 * legend_rows + 0.3
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    handles: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        _panel(axis, panel, labels, handles)
    for axis in axes[len(panels) :]:
        axis.remove()
    if title:
        long = max(map(len, title.split("\n"))) > 11 * width  # letters that fit beside one another
        lines = [textwrap.fill(line, int(13 * width)) for line in title.split("\n")]
        figure.suptitle("\n".join(lines), fontsize="medium" if long else "large")
    look: dict[str, Any] = {"frameon": False, "loc": "outside lower center", "fontsize": "small"}
    figure.legend([handles[label] for label in labels], labels, ncols=legend_columns, **look)
    return figure


def _panel(axis: Axes, panel: Panel, labels: Sequence[str], handles: dict[str, Any]) -> None:
    if panel.zero_line:
        axis.axhline(0, color="0.6", linewidth=1, zorder=1)
    for curve in panel.curves:
        colour_index = labels.index(curve.like or curve.label)
        colour = COLOURS[colour_index % len(COLOURS)]
        style = "--" if curve.like else DASHES[colour_index // len(COLOURS) % len(DASHES)]
        # shifted in each round through the colours, so that no colour meets a marker twice
        marker_index = labels.index(curve.label)
        marker_index += 3 * (marker_index // len(COLOURS))
        mark = MARKERS[marker_index % len(MARKERS)] if len(curve.x) <= 30 else ""
        look = {
            "color": colour,
            "linestyle": style,
            "marker": mark,
            "markersize": 5,
            "linewidth": 1.6,
        }
        (handle,) = axis.plot(curve.x, curve.y, **{**look, **curve.look})
        handles.setdefault(curve.label, handle)
        if curve.low is not None and curve.high is not None:
            axis.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.25, linewidth=0)
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    if panel.y_range is not None:
        axis.set_ylim(*panel.y_range)
    if panel.log_y:
        axis.set_yscale("log")
        plain_ticks(axis.yaxis, panel.y_range or [v for c in panel.curves for v in c.y])
    if panel.log_x:
        axis.set_xscale("log")
        _named_ticks(axis, [x for curve in panel.curves for x in curve.x])
    axis.grid(True, which="major", color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def _named_ticks(axis: Axes, places: Iterable[float]) -> None:
    """A tick with its number at each value of a logarithmic x where these are few."""
    values = sorted({float(x) for x in places})
    if len(values) <= 9:
        labels = [f"{value:g}" for value in values]
        axis.set_xticks(values, labels, rotation=45 if len(values) > 6 else 0)
        axis.xaxis.set_minor_locator(NullLocator())


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Round ticks in plain digits on a logarithmic axis of less than two decades."""
    finite = [v for v in values if np.isfinite(v) and v > 0]
    if not finite or max(finite) / min(finite) > 100 or max(finite) < 0.01:
        return
    axis.set_major_locator(MaxNLocator(6, steps=(1, 2, 5, 10)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


def write_files(
    stem: Path,
    texts: Mapping[str, str],
    figures: Mapping[str, Figure],
    kinds: Collection[str] = EVERY,
) -> list[Path]:
    """Write texts and figures beside one another, each file whole or not at all.

    Args:
      stem: path that the names begin with.
      texts: {end of the name: contents}.
      figures: {part of the name: figure}, each in every format.
      kinds: suffixes of the files that are wanted.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents: dict[str, str | bytes] = {
        end: text for end, text in texts.items() if end.rpartition(".")[2] in kinds
    }
    for part, figure in figures.items():
        contents |= {f"{part}.{kind}": rendered(figure, kind) for kind in FORMATS if kind in kinds}
    return [write(stem.with_name(f"{stem.name}{end}"), x) for end, x in contents.items()]


def rendered(figure: Figure, kind: str) -> bytes:
    """A figure as a file of this format; equal figures give equal bytes."""
    figure.set_dpi(_DPI)  # of the layout, in all formats
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mfopt", "svg.fonttype": "path"}):
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(buffer, format=kind, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a figure in the format that the suffix names."""
    return write(path, rendered(figure, path.suffix.lstrip(".") or "png"))
