"""Chua et al. 2024: "Mind the privacy unit!", noise with and without the concentration filter.

The publication does not print the number of users, batch and iterations behind its figures. Here:
N = 10,000 users, 1,024 records a step (1,024/k users of k records each), 1,000 steps, δ = 1e-5,
add-remove adjacency of one user. The noise is the standard deviation on the mean gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from mfopt.experiments.accounts import filter_task
from mfopt.experiments.cache import Task
from mfopt.experiments.figures.context import Context, Drawing
from mfopt.experiments.plots import Curve, Panel

PAPER = "Chua et al. 2024, Mind the privacy unit"
USERS, RECORDS, STEPS, DELTA = 10_000, 1024, 1000, 1e-5
PER_USER = (2, 5, 10, 20)
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
EPSILONS = (1.0, 3.0, 8.0)


def _cell(epsilon: float, per_user: int) -> Task:
    return filter_task(epsilon, DELTA, STEPS, USERS, RECORDS / per_user)


def _panels(context: Context, epsilons: tuple[float, ...]) -> list[Panel]:
    found = context.run([_cell(e, k) for e in epsilons for k in PER_USER])
    panels = []
    for epsilon in epsilons:
        records = {k: found[_cell(epsilon, k)].record for k in PER_USER}
        # the filter uses all users in each step, whatever k is: one curve
        slope = records[PER_USER[0]]["filter_noise_per_threshold"]
        curves = [Curve("with filter (all users)", THRESHOLDS, [slope * t for t in THRESHOLDS])]
        for k in PER_USER:
            plain = records[k]["plain_noise"]
            label = f"user-wise DP-SGD, k = {k} records per user"
            curves.append(Curve(label, THRESHOLDS, [plain] * len(THRESHOLDS)))
        panels.append(
            Panel(
                curves,
                f"ε = {epsilon:g}",
                "concentration over clip norm, τ/C (log scale)",
                "noise on the mean gradient\n(clip norms, log scale)",
                log_y=True,
            )
        )
    return panels


def one(context: Context) -> Drawing:
    """Figure 3."""
    return Drawing(_panels(context, (3.0,)))


def several(context: Context) -> Drawing:
    """Figure 7."""
    title = f"{USERS:,} users, {RECORDS:,} records a step, {STEPS:,} steps, δ = {DELTA:g}"
    return Drawing(_panels(context, EPSILONS), title)


FIGURES: dict[str, tuple[str, str, Callable[[Context], Drawing]]] = {
    "privacy-unit-3": ("Figure 3", "noise with and without the filter, ε = 3", one),
    "privacy-unit-7": ("Figure 7", "noise with and without the filter, more ε", several),
}
