"""Figures of fresh bins, this library's own.

δ = 1e-5, add-remove adjacency of one example, RMSE of prefix sums.
"""

from __future__ import annotations

import itertools

import numpy as np
from common import Drawing, Run, figures, main

from mfopt.experiments.comparison import Z95
from mfopt.experiments.mechanisms import FRESH, AmplifiedCell, Goal, SigmaCell
from mfopt.experiments.plots import Panel, around

DELTA = 1e-5
STUDIED = (8, 16)  # epochs × iterations of an epoch: every L that divides the epochs, at every ε
BANDS, EPSILONS = 8, (0.5, 1.0, 2.0, 4.0, 8.0)


def kept(run: Run) -> Drawing:
    """RMSE where bins are kept for L epochs, and what that costs over new bins in each.

    σ is estimated on fresh samples, of a banded Toeplitz C that is optimized for each L.
    """
    epochs, bins = STUDIED
    lengths = [length for length in range(1, epochs + 1) if epochs % length == 0]
    cells = {}
    for epsilon, length in itertools.product(EPSILONS, lengths):
        goal = Goal(bins, epochs, epsilon, DELTA, FRESH, length)
        cells[epsilon, length] = SigmaCell(
            AmplifiedCell(goal, "banded-toeplitz", bands=BANDS), goal
        )
    results = run.records(cells)
    errors, excess = [], []
    for epsilon in EPSILONS:
        rmse = np.array([results[epsilon, each]["rmse"] for each in lengths])
        spread = Z95 * np.array([results[epsilon, each]["relative_error"] for each in lengths])
        label, above = f"ε = {epsilon:g}", rmse / rmse[0]
        errors.append(around(label, lengths, rmse, rmse * spread))
        # L = 1 is what the others are compared with
        reach = above * np.hypot(spread, spread[0]) * (np.array(lengths) > 1)
        excess.append(around(label, lengths, 100 * (above - 1), 100 * reach))
    where = f"{epochs} epochs × {bins} iterations, {BANDS} bands, δ = {DELTA:g}"
    axis = f"epochs that bins are kept (log scale; {epochs}: balls-in-bins)"
    return Drawing(
        [
            Panel(errors, where, axis, "RMSE (log scale)\nlower is better", log_y=True),
            Panel(
                excess,
                "compared with new bins in each epoch",
                axis,
                "RMSE above it (%)",
                zero_line=True,
            ),
        ]
    )


FIGURES = figures({"fresh-bins-kept": kept})


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
