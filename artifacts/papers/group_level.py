"""Ganesh 2024: "Tight group-level DP guarantees for DP-SGD with sampling via mixture of Gaussians".

CIFAR-10 as in its section 4: 2,000 rounds at probability 1/100, 50,000 examples, batch 500.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import AccountCell, Builder, Drawing, GroupBaselineCell, Run, figures, main

from mfopt.experiments.cache import Cell
from mfopt.experiments.plots import Curve, Panel
from mfopt.sampling import FixedBatch, Poisson

ROUNDS, POPULATION, BATCH = 2000, 50_000, 500
DELTA = 1e-6
SIGMAS = (0.5, 1.0, 2.0, 4.0)
GROUPS = (1, 2, 4, 8, 16, 32, 64)
Line = list[tuple[int, float]]


def group_lines(
    run: Run, scheme: Any, sigmas: Sequence[float], groups: Sequence[int]
) -> dict[tuple[str, float], Line]:
    """(K, ε) of groups by method and σ: "tight", by the "lemma" where it has numbers, and "line".

    Args:
      run: computes them.
      scheme: that is accounted for.
      sigmas: noise multipliers.
      groups: group sizes K.
    """
    cells: dict[tuple[str, float, int], Cell] = {}
    for sigma in sigmas:
        for k in groups:
            cells["tight", sigma, k] = AccountCell(scheme, k, noise_multiplier=sigma, delta=DELTA)
            cells["lemma", sigma, k] = GroupBaselineCell(scheme, k, sigma, DELTA)
    results = run.records(cells)

    lines: dict[tuple[str, float], Line] = {}
    for name in ("tight", "lemma", "line"):
        method, value = ("lemma", "line") if name == "line" else (name, "epsilon")
        for sigma in sigmas:
            every = [(k, results[method, sigma, k][value]) for k in groups]
            lines[name, sigma] = [(k, e) for k, e in every if e is not None]
    return lines


def along(label: str, line: Line, like: str | None = None) -> Curve:
    """A curve of (K, ε)."""
    return Curve(label, [k for k, _ in line], [e for _, e in line], like=like)


def _groups(scheme: Any, sigmas: tuple[float, ...], title: str) -> Builder:
    """ε of a group against its size, for each σ: exact, by the black-box lemma, and K·ε₁."""

    def build(run: Run) -> Drawing:
        results = group_lines(run, scheme, sigmas, GROUPS)
        panels = []
        for sigma in sigmas:
            black = results["lemma", sigma]
            missing = f"numbers end at K = {black[-1][0]}" if black else "no number"
            ended = "" if len(black) == len(GROUPS) else f"; black box: {missing}"
            panels.append(
                Panel(
                    [
                        along("mixture of Gaussians (tight)", results["tight", sigma]),
                        along("black-box group privacy", black),
                        along(
                            "K·ε₁ (a line to compare with, no guarantee)", results["line", sigma]
                        ),
                    ],
                    f"σ = {sigma:g}{ended}",
                    "group size K (examples, log scale)",
                    f"ε of the group at δ = {DELTA:g}\n(log scale)",
                    log_y=True,
                )
            )
        return Drawing(panels, f"{title}, add-remove adjacency", 2)

    return build


FIGURES = figures(
    {
        "group-level-1": _groups(
            Poisson(BATCH / POPULATION, ROUNDS),
            SIGMAS,
            f"Poisson sampling, {ROUNDS:,} rounds at probability 1/100",
        ),
        "group-level-2": _groups(
            FixedBatch(BATCH, POPULATION, ROUNDS),
            # twice the noise, since one more unit drives another one out of the batch
            tuple(2 * sigma for sigma in SIGMAS),
            f"Batches of {BATCH} out of {POPULATION:,}, {ROUNDS:,} rounds",
        ),
    }
)


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
