"""Figures of fresh bins, this library's own.

δ = 1e-5, add-remove adjacency of one example, RMSE of prefix sums.
"""

from __future__ import annotations

import itertools

import numpy as np
from common import Drawing, Run, figures, main, proven

from mfopt.experiments.comparison import Z95
from mfopt.experiments.decision_plots import EPSILON
from mfopt.experiments.families import Comparison
from mfopt.experiments.mechanisms import FRESH, AmplifiedCell, Goal, SigmaCell
from mfopt.experiments.plots import Curve, Panel, around

DELTA = 1e-5
STUDIED = (8, 16)  # epochs × iterations of an epoch: every L that divides the epochs, at every ε
BANDS, EPSILONS = 8, (0.5, 1.0, 2.0, 4.0, 8.0)
MAIN, BUDGETS = (16, 128), (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # epochs × iterations, ε
GROUPS = (1, 2, 4, 8, 16, 32, 64, 128)  # bands to choose from under cyclic Poisson sampling


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


def certified(run: Run) -> Drawing:
    """Certified RMSE under three sampling schemes, each with the C that is best under it."""
    epochs, bins = MAIN
    forms = {
        f"banded Toeplitz ({bins} bands), fresh bins": "banded-toeplitz-scaled+fresh-bins",
        "BLT-4, balls-in-bins": "blt-4-scaled",
    }
    ours = Comparison(bins, epochs, BUDGETS, DELTA, tuple(forms.values()), (bins,))
    cells = {(form, e): proven(ours, form, e) for form in ours.include for e in BUDGETS}
    results = run.records(cells)
    at_one = run.records({key: cell.sigmas[0] for key, cell in cells.items()})
    rmse = {
        label: np.array(
            [
                results[form, e]["guarantee"]["noise_multiplier"] * at_one[form, e]["rmse_at_one"]
                for e in BUDGETS
            ]
        )
        for label, form in forms.items()
    }
    poisson = Comparison(bins, epochs, BUDGETS, DELTA, ("banded+poisson",), GROUPS)
    rmse["general banded, cyclic Poisson"] = np.array([r.rmse for r in run.compare(poisson)])
    first, *others = rmse.values()
    saved = [
        Curve(f"fresh bins over {name}", BUDGETS, (100 * (1 - first / other)).tolist())
        for name, other in zip(("balls-in-bins", "cyclic Poisson"), others, strict=True)
    ]
    drawn = [Curve(label, BUDGETS, values.tolist()) for label, values in rmse.items()]
    where = f"{epochs} epochs × {bins} iterations, δ = {DELTA:g}"
    return Drawing(
        [
            Panel(drawn, where, EPSILON, "certified RMSE (log scale)\nlower is better", log_y=True),
            Panel(saved, "what fresh bins save", EPSILON, "RMSE saved (%)", zero_line=True),
        ]
    )


FIGURES = figures({"fresh-bins-certified": certified, "fresh-bins-kept": kept})


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
