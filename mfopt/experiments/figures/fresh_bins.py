"""This library's own figures of bins that are thrown afresh.

δ = 1e-5, add-remove adjacency of one example, RMSE of prefix sums.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mfopt.experiments import tasks
from mfopt.experiments.cache import Task
from mfopt.experiments.comparison import Z95, Comparison
from mfopt.experiments.comparison_plots import EPSILON
from mfopt.experiments.families import FRESH_BANDS
from mfopt.experiments.figures.context import Context, Drawing
from mfopt.experiments.plots import Curve, Panel

PAPER = "this library, bins thrown afresh"
DELTA = 1e-5
STUDIED = (8, 16)  # epochs × iterations of an epoch: every L that divides the epochs, at every ε
BANDS, EPSILONS = 8, (0.5, 1.0, 2.0, 4.0, 8.0)
MAIN, SMALL = (16, 128), (0.5, 1.0, 2.0)  # epochs × iterations, and the ε of small budgets
GROUPS = (2, 4, 8, 16)  # bands to choose from under cyclic Poisson sampling


def kept_cell(epsilon: float, rethrow: int) -> Task:
    """σ and RMSE of a banded Toeplitz C optimized for bins that are kept for so many epochs.

    Args:
      epsilon: ε of the statement.
      rethrow: L, epochs between two throws.
    """
    epochs, bins = STUDIED
    source = tasks.amplified_task(
        "banded-toeplitz",
        bins,
        epochs,
        epsilon,
        DELTA,
        sampling=tasks.FRESH,
        rethrow=rethrow,
        bands=BANDS,
    )
    return tasks.sigma_task(source, tasks.FRESH, bins, epochs, epsilon, DELTA, rethrow=rethrow)


def kept(context: Context) -> Drawing:
    """RMSE where bins are kept for L epochs, and what that costs over a throw in each.

    σ is estimated on fresh samples.
    """
    epochs, bins = STUDIED
    lengths = np.array([length for length in range(1, epochs + 1) if epochs % length == 0])
    cells = {epsilon: [kept_cell(epsilon, int(each)) for each in lengths] for epsilon in EPSILONS}
    found = context.run(task for each in cells.values() for task in each)
    errors, excess = [], []
    for epsilon, each in cells.items():
        records = [found[task].record for task in each]
        rmse = np.array([record["rmse"] for record in records])
        spread = Z95 * np.array([record["relative_error"] for record in records])
        label = f"ε = {epsilon:g}"
        errors.append(_curve(label, lengths, rmse, rmse * spread))
        above = rmse / rmse[0]
        # L = 1 is what the others are compared with
        reach = above * np.hypot(spread, spread[0]) * (lengths > 1)
        excess.append(_curve(label, lengths, 100 * (above - 1), 100 * reach))
    where = f"{epochs} epochs × {bins} iterations, {BANDS} bands, δ = {DELTA:g}"
    axis = f"epochs that bins are kept (log scale; {epochs}: balls-in-bins)"
    return Drawing(
        [
            Panel(errors, where, axis, "RMSE (log scale)\nlower is better", log_y=True),
            Panel(excess, "over a throw in each epoch", axis, "RMSE above it (%)", zero_line=True),
        ]
    )


def certified_cell(kind: str, sampling: str, epsilon: float) -> Task:
    """Certified σ and RMSE of a time-scaled C optimized under its sampling scheme.

    Args:
      kind: "blt" (4 buffers) or "banded-toeplitz" (16 bands).
      sampling: scheme by name.
      epsilon: ε of the statement.
    """
    epochs, bins = MAIN
    buffers, bands = (4, 1) if kind == "blt" else (0, FRESH_BANDS)
    source = tasks.amplified_task(
        kind,
        bins,
        epochs,
        epsilon,
        DELTA,
        sampling=sampling,
        scaled=True,
        bands=bands,
        buffers=buffers,
    )
    estimate = tasks.sigma_task(source, sampling, bins, epochs, epsilon, DELTA)
    return tasks.certified_task(estimate)


def certified(context: Context) -> Drawing:
    """Certified RMSE under three sampling schemes, each with the C that is best under it."""
    epochs, bins = MAIN
    cells = {
        f"banded Toeplitz ({FRESH_BANDS} bands), fresh bins": ("banded-toeplitz", tasks.FRESH),
        "BLT-4, balls-in-bins": ("blt", tasks.BALLS),
    }
    wanted = {
        label: [certified_cell(*each, epsilon) for epsilon in SMALL]
        for label, each in cells.items()
    }
    found = context.run(task for each in wanted.values() for task in each)
    poisson = Comparison(bins, epochs, SMALL, DELTA, ("banded+poisson",), GROUPS)
    baseline = np.array([row.rmse for row in context.compare(poisson)])
    errors = {
        label: np.array([found[task].record["rmse"] for task in each])
        for label, each in wanted.items()
    }
    first, second = errors.values()
    x = list(SMALL)
    where = f"{epochs} epochs × {bins} iterations, δ = {DELTA:g}"
    drawn = [Curve(label, x, rmse.tolist()) for label, rmse in errors.items()]
    drawn.append(Curve("general banded, cyclic Poisson", x, baseline.tolist()))
    saved = [
        Curve(f"fresh bins over {name}", x, (100 * (1 - first / rmse)).tolist())
        for name, rmse in (("balls-in-bins", second), ("cyclic Poisson", baseline))
    ]
    return Drawing(
        [
            Panel(drawn, where, EPSILON, "certified RMSE (log scale)\nlower is better", log_y=True),
            Panel(saved, "what fresh bins save", EPSILON, "RMSE saved (%)", zero_line=True),
        ]
    )


def _curve(label: str, x: np.ndarray, y: np.ndarray, half: np.ndarray) -> Curve:
    return Curve(label, x.tolist(), y.tolist(), (y - half).tolist(), (y + half).tolist())


FIGURES: dict[str, tuple[str, str, Callable[[Context], Drawing]]] = {
    "fresh-bins-certified": ("16 × 128", "certified RMSE under three samplings", certified),
    "fresh-bins-kept": ("8 × 16", "bins kept for several epochs", kept),
}
