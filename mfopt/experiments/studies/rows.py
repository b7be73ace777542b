"""Selections, curves with bands, and comparisons in words, from the rows of studies."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
import scipy.stats

from mfopt.experiments.plots import Curve, Panel
from mfopt.experiments.studies.engine import Row


def pick(rows: Sequence[Row], **want: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in want.items())]


def curve(
    label: str,
    rows: Sequence[Row],
    x: str,
    y: str = "loss",
    band: tuple[str, str] = ("least", "largest"),
) -> Curve:
    """A column of rows over another, with a band between two more.

    Args:
      label, rows: of the curve.
      x, y, band: names of the columns.
    """
    rows = sorted(rows, key=lambda row: row[x])
    place, value, low, high = ([row[name] for row in rows] for name in (x, y, *band))
    return Curve(label, place, value, low, high)


def level(label: str, ends: Sequence[float], value: float) -> Curve:
    """A horizontal line between the least and the largest of ``ends``."""
    return Curve(label, (min(ends), max(ends)), (value, value))


def alike(panels: list[Panel]) -> list[Panel]:
    """The panels with one range of values, so that they can be compared by eye."""
    drawn = [curve for panel in panels for curve in panel.curves]
    values = [y for c in drawn for line in (c.y, c.low, c.high) if line is not None for y in line]
    margin = 0.05 * (max(values) - min(values)) or 0.05
    return [p._replace(y_range=(min(values) - margin, max(values) + margin)) for p in panels]


def interval(values: np.ndarray) -> tuple[float, float]:
    """(mean, half the width of its 95% interval by Student's t)."""
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def relative(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(mean over mean, half the width of its 95% interval) of paired losses."""
    value = float(one.mean() / other.mean())
    return value, interval((one - value * other) / other.mean())[1]


def intervals(each: Sequence[tuple[float, float]]) -> Curve:
    """Values, each with half of its interval, for a panel that names them from the top down."""
    low, high = [x - reach for x, reach in each], [x + reach for x, reach in each]
    return Curve("mean and 95% over seeds", [x for x, _ in each], range(len(each)), low, high)


def spread(label: str, x: Sequence[float], each: Sequence[Sequence[float]]) -> Curve:
    """The mean over seeds of what was found at each place, between the least and the largest."""
    mid, low, high = ([of(values) for values in each] for of in (mean, min, max))
    return Curve(label, x, mid, low, high)


def ends(rows: Sequence[Row]) -> list[str]:
    """A warning where a best rate is an end of those tried."""
    count = sum(bool(row["rate_at_end"]) for row in rows)
    return [f"{count} of {len(rows)} best rates are an end of those tried"] if count else []


def about(values: Any) -> str:
    """The mean of values in words, with half of its 95% interval where there are several."""
    values = np.atleast_1d(values)
    half = f" ± {interval(values)[1]:.4f}" if len(values) > 1 else ""
    return f"{values.mean():.4f}{half}"


def apart(one: np.ndarray | float, other: np.ndarray | float) -> str:
    """Comparison of losses in words: of several, paired, with 95% of the mean.

    >>> apart(2.0, 2.5), apart(np.array([2.5, 2.7]), np.array([2.0, 2.2]))
    ('0.5000 below', '0.5000 ± 0.0000 above')
    """
    gaps = np.atleast_1d(np.subtract(one, other))
    below = gaps.mean() < 0
    return f"{about(-gaps if below else gaps)} {'below' if below else 'above'}"
