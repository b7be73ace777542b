"""One picture of a factorization: C, C⁻¹, the error of each step, the optimization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mfopt import words
from mfopt.experiments.plots import COLOURS, write_figure
from mfopt.factorization import Factorization

_BLUE, _ORANGE, _GREEN = COLOURS[:3]


def plot(factorization: Factorization, path: Path) -> None:
    """Draw the four panels and write them atomically to ``path`` (.png, .svg or .pdf)."""
    write_figure(draw(factorization), path)


def draw(factorization: Factorization) -> Figure:
    """The four panels as one figure."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    for panel, fill in zip(figure.subplots(2, 2).ravel(), _PANELS, strict=True):
        fill(panel, factorization)
    guarantee = factorization.guarantee
    figure.suptitle(
        f"{words.described(factorization.strategy.describe())}: {factorization.sampling.words()}\n"
        f"RMSE {factorization.rmse:.4g}, σ {factorization.noise_multiplier:.4g}, "
        f"ε = {guarantee.epsilon:g}, δ = {guarantee.delta:g} ({guarantee.status})"
    )
    return figure


def apart(factorization: Factorization) -> list[Figure]:
    """The four panels as four figures, each readable on a narrow screen."""
    figures = [Figure(figsize=(5.2, 3.6), layout="constrained") for _ in _PANELS]
    for figure, fill in zip(figures, _PANELS, strict=True):
        fill(figure.subplots(), factorization)
    return figures


def _column(panel: Axes, factorization: Factorization) -> None:
    column = np.asarray(factorization.strategy.multiply(_first(factorization)))
    _coefficients(panel, column, "C", "first column of C")


def _inverse(panel: Axes, factorization: Factorization) -> None:
    inverse = np.asarray(factorization.strategy.solve(_first(factorization)))
    _coefficients(panel, np.abs(inverse), "|C⁻¹|", "first column of C⁻¹, absolute value")


def _first(factorization: Factorization) -> np.ndarray:
    unit: np.ndarray = np.eye(1, factorization.iterations)[0]
    return unit


def _coefficients(panel: Axes, values: np.ndarray, name: str, title: str) -> None:
    lag = np.arange(len(values))
    shown = values > max(values.max() * 1e-9, 0)
    panel.loglog(lag[shown] + 1, values[shown], color=_BLUE, marker=".", markersize=3, linewidth=1)
    panel.set(title=title, xlabel="lag + 1 (iterations)", ylabel=f"entry of {name}")
    panel.grid(alpha=0.3)


def _errors(panel: Axes, factorization: Factorization) -> None:
    deviation = factorization.noise_multiplier * np.sqrt(factorization.row_variances)
    step = np.arange(1, len(deviation) + 1)
    panel.plot(step, deviation, color=_BLUE, label="each query")
    panel.axhline(factorization.rmse, color=_ORANGE, linestyle="--", label="root mean square")
    title = f"error per step, {factorization.workload.kind} workload"
    label = "standard deviation (clip norms)"
    panel.set(title=title, xlabel="iteration", ylabel=label, ylim=(0, None))
    panel.legend(loc="lower right")
    panel.grid(alpha=0.3)


def _history(panel: Axes, factorization: Factorization) -> None:
    history = factorization.history
    panel.set(title="optimization", xlabel="evaluation", ylabel="error on frozen samples")
    panel.grid(alpha=0.3)
    if len(history) == 0:
        panel.text(0.5, 0.5, "nothing to optimize", ha="center", transform=panel.transAxes)
        return
    value = np.exp(history[:, 1])
    evaluation = np.arange(1, len(value) + 1)
    panel.plot(evaluation, value, ".", color=_GREEN, markersize=4, label="evaluated")
    panel.plot(evaluation, np.fmin.accumulate(value), color=_BLUE, label="best so far")
    low, high = np.nanmin(value), np.nanmin(value) * 1.25
    panel.set_ylim(low - 0.05 * (high - low), high)
    panel.legend(loc="upper right")


_PANELS = (_column, _inverse, _errors, _history)
