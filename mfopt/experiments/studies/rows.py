"""Selections, curves with bands, ranks, and comparisons in words, from the rows of studies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import mean
from typing import Any

import numpy as np
import scipy.stats

from mfopt.experiments.plots import Curve, Panel, around
from mfopt.experiments.studies.engine import Row

APART = 0.02  # relative difference of RMSE below which two mechanisms count as equal
RESAMPLED = 2000  # sets of seeds behind an interval


def pick(rows: Sequence[Row], **want: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in want.items())]


def curve(
    label: str,
    rows: Sequence[Row],
    x: str,
    y: str = "loss",
    band: tuple[str, str] | None = ("least", "largest"),
    half: tuple[str, float] | None = None,
) -> Curve:
    """One column of rows over another, with a band between two others.

    Args:
      label: in the legend.
      rows: one a point.
      x, y: names of columns.
      band: names of the columns of its lower and its upper border; None for no band.
      half: name of a column, and how many times it the band reaches to either side; before
        ``band``.
    """
    rows = sorted(rows, key=lambda row: row[x])
    place, value = ([row[name] for row in rows] for name in (x, y))
    if half:
        return around(label, place, value, [half[1] * row[half[0]] for row in rows])
    low, high = ([row[name] for row in rows] for name in band) if band else (None, None)
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
    """(mean, half the width of its 95% interval by Student's t over seeds)."""
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def intervals(rows: Sequence[Row], value: str, half: str, times: float = 1.0) -> Curve:
    """A column of rows by place, each with half of its interval, for a panel that names its rows.

    Args:
      rows: from the top down.
      value, half: names of the columns.
      times: of both.
    """
    each = [(times * row[value], times * row[half]) for row in rows]
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


def correlation(error: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rank correlation of errors and mean losses, with a 95% interval over seeds.

    Args:
      error: (mechanisms,).
      losses: (mechanisms, seeds); seeds are drawn again for the interval, the same for all.
    """
    random = np.random.default_rng(0)
    ranks = scipy.stats.rankdata(error)

    def of(values: np.ndarray) -> float:
        return float(np.corrcoef(ranks, scipy.stats.rankdata(values))[0, 1])

    seeds = losses.shape[1]
    drawn = [
        of(losses[:, random.integers(seeds, size=seeds)].mean(axis=1)) for _ in range(RESAMPLED)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return of(losses.mean(axis=1)), float(low), float(high)


def pairs(error: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Numbers of pairs (in the order of RMSE, not significantly different, against it), shape (3,).

    Args:
      error: (mechanisms,).
      losses: (mechanisms, seeds); a pair is compared seed by seed.
    """
    counts = np.zeros(3, int)
    for i, j in itertools.permutations(range(len(error)), 2):
        if error[i] < error[j] * (1 - APART):
            mean, half = interval(losses[i] - losses[j])
            counts += mean + half < 0, abs(mean) <= half, mean - half > 0
    return counts


def answer(agree: int, tied: int, against: int) -> str:
    """The answer in words, from counts of pairs that differ in RMSE by more than 2%.

    >>> answer(8, 2, 0).partition(":")[0]
    'Less RMSE trained better'
    """
    pairs = agree + tied + against
    if against == 0 and agree:
        word = "Less RMSE trained better" if agree >= tied else "Less RMSE never trained worse"
    elif agree > 4 * against:
        word = "Less RMSE mostly trained better"
    else:
        word = "Less RMSE did not tell what trains better"
    return (
        f"{word}: of {pairs} pairs at least {APART:.0%} apart, the lower RMSE had less loss in "
        f"{agree}, more in {against}, and {tied} are not significantly different."
    )
