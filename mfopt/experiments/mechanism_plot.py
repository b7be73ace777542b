"""One picture of a factorization: C, C⁻¹, the error of each step, the optimization."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from mfopt import query_error, words
from mfopt.experiments import plots
from mfopt.experiments.plots import Curve, Panel
from mfopt.factorization import Factorization
from mfopt.strategies import Identity


def plot(
    factorization: Factorization, path: Path, reference: tuple[str, float] | None = None
) -> None:
    """Draw the panels and write them atomically to ``path`` (.png, .svg or .pdf)."""
    plots.write_figure(draw(factorization, reference), path)


def draw(factorization: Factorization, reference: tuple[str, float] | None = None) -> Figure:
    """The panels as one figure."""
    stated = factorization.guarantee
    title = (
        f"{words.described(factorization.strategy.describe())}: {factorization.sampling.words()}\n"
        f"RMSE {factorization.rmse:.4g}, σ {factorization.noise_multiplier:.4g}, "
        f"ε = {stated.epsilon:g}, δ = {stated.delta:g} ({stated.status})"
    )
    return plots.draw(panels(factorization, reference), title=title, columns=2)


def panels(factorization: Factorization, reference: tuple[str, float] | None = None) -> list[Panel]:
    """Coefficients of C and C⁻¹, the error of each query, and the optimization where there was.

    Args:
      factorization: what is drawn.
      reference: (label, σ) of independent noise whose error is drawn beside it.
    """
    impulse = np.eye(1, factorization.iterations)[0]
    column = np.asarray(factorization.strategy.multiply(impulse))
    inverse = np.abs(factorization.strategy.solve(impulse))
    deviation = factorization.noise_multiplier * np.sqrt(factorization.row_variances)
    count = len(deviation)
    errors = [
        Curve("each query", range(1, count + 1), deviation.tolist()),
        Curve("root mean square", (1, count), [factorization.rmse] * 2),
    ]
    title = f"error per step, {factorization.workload.kind} workload"
    if reference is not None:
        label, sigma = reference
        variances = query_error.row_variances(factorization.workload, Identity(), count)
        errors.append(Curve(label, range(1, count + 1), (sigma * np.sqrt(variances)).tolist()))
    top = 1.05 * max(max(curve.y) for curve in errors)
    axes = "iteration", "standard deviation (clip norms)"
    drawn = [
        _coefficients(column, "C", "first column of C"),
        _coefficients(inverse, "|C⁻¹|", "first column of C⁻¹, absolute value"),
        Panel(errors, title, *axes, log_x=False, y_range=(0.0, top)),
    ]
    if len(factorization.history):
        best = np.fmin.accumulate(np.exp(factorization.history[:, 1])).tolist()
        curve = Curve("best so far", range(1, len(best) + 1), best)
        limits = 0.99 * best[-1], 1.25 * best[-1]
        axes = "evaluation", "error on frozen samples"
        drawn.append(Panel([curve], "optimization", *axes, log_x=False, y_range=limits))
    return drawn


def _coefficients(values: np.ndarray, name: str, title: str) -> Panel:
    shown = np.flatnonzero(values > max(values.max() * 1e-9, 0))
    curve = Curve(name, (shown + 1).tolist(), values[shown].tolist())
    return Panel([curve], title, "lag + 1 (iterations)", f"entry of {name}", log_y=True)
