"""Ganesh 2024: "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians".

CIFAR-10 as in its section 4: 2,000 rounds at probability 1/100, 50,000 examples, batch 500.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mfopt.experiments.accounts import account_task, group_baseline_task
from mfopt.experiments.figures.context import Context, Drawing
from mfopt.experiments.plots import Curve, Panel
from mfopt.sampling import FixedBatch, Poisson

PAPER = "Ganesh 2024, Tight group-level DP guarantees"
ROUNDS, POPULATION, BATCH = 2000, 50_000, 500
DELTA = 1e-6
SIGMAS = (0.5, 1.0, 2.0, 4.0)
GROUPS = (1, 2, 4, 8, 16, 32, 64)


def group_panels(context: Context, scheme: Any, sigmas: tuple[float, ...]) -> list[Panel]:
    """ε of a group against its size, for each σ: exact, by the black-box lemma, and K·ε₁."""
    adjacency = "add-remove"
    exact = {
        (sigma, k): account_task(
            scheme, group_size=k, adjacency=adjacency, noise_multiplier=sigma, delta=DELTA
        )
        for sigma in sigmas
        for k in GROUPS
    }
    baseline = {
        (sigma, k): group_baseline_task(
            scheme, group_size=k, adjacency=adjacency, noise_multiplier=sigma, delta=DELTA
        )
        for sigma in sigmas
        for k in GROUPS
    }
    found = context.run([*exact.values(), *baseline.values()])
    panels = []
    for sigma in sigmas:
        tight = [found[exact[sigma, k]].record["epsilon"] for k in GROUPS]
        black = [found[baseline[sigma, k]].record["epsilon"] for k in GROUPS]
        shown = [(k, e) for k, e in zip(GROUPS, black, strict=True) if e is not None]
        line = [found[baseline[sigma, k]].record["line"] for k in GROUPS]
        missing = "" if len(shown) == len(GROUPS) else _ending([k for k, _ in shown])
        panels.append(
            Panel(
                [
                    Curve("mixture of Gaussians (tight)", GROUPS, tight),
                    Curve(
                        "black-box group privacy",
                        [k for k, _ in shown],
                        [e for _, e in shown],
                    ),
                    Curve("K·ε₁ (a line to compare with, no guarantee)", GROUPS, line),
                ],
                f"σ = {sigma:g}{missing}",
                "group size K (examples, log scale)",
                f"ε of the group at δ = {DELTA:g}\n(log scale)",
                log_y=True,
            )
        )
    return panels


def _ending(finite: list[int]) -> str:
    return f"; black box: numbers end at K = {finite[-1]}" if finite else "; black box: no number"


def poisson(context: Context) -> Drawing:
    """Figure 1."""
    panels = group_panels(context, Poisson(BATCH / POPULATION, ROUNDS), SIGMAS)
    title = f"Poisson sampling, {ROUNDS:,} rounds at probability 1/100, add-remove adjacency"
    return Drawing(panels, title, 2)


def fixed_batch(context: Context) -> Drawing:
    """Figure 2: with twice the noise, since one more unit drives another one out of the batch."""
    doubled = tuple(2 * sigma for sigma in SIGMAS)
    panels = group_panels(context, FixedBatch(BATCH, POPULATION, ROUNDS), doubled)
    title = f"Batches of {BATCH} out of {POPULATION:,}, {ROUNDS:,} rounds, add-remove adjacency"
    return Drawing(panels, title, 2)


FIGURES: dict[str, tuple[str, str, Callable[[Context], Drawing]]] = {
    "group-level-1": ("Figure 1", "ε of a group under Poisson sampling", poisson),
    "group-level-2": ("Figure 2", "ε of a group under fixed batches", fixed_batch),
}
