"""Chua et al. 2024: "Mind the privacy unit!", noise with and without the concentration filter.

The publication does not print the number of users, batch and iterations behind its figures. Here:
N = 10,000 users, 1,024 records a step (1,024/k users of k records each), 1,000 steps, δ = 1e-5,
add-remove adjacency of one user. The noise is the standard deviation on the mean gradient.
"""

from __future__ import annotations

from common import Builder, Drawing, Run, figures, main

from mfopt.experiments.concentration_filter import compare
from mfopt.experiments.plots import Curve, Panel

USERS, RECORDS, STEPS, DELTA = 10_000, 1024, 1000, 1e-5
PER_USER = (2, 5, 10, 20)
THRESHOLDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def noise(*epsilons: float) -> Builder:
    """Figures 3 and 7: the filter's noise grows with τ, that of user-wise DP-SGD does not."""

    def build(run: Run) -> Drawing:
        panels = []
        for epsilon in epsilons:
            found = {k: compare(epsilon, DELTA, STEPS, USERS, RECORDS / k) for k in PER_USER}
            # the filter uses all users in each step, whatever k is: one curve
            slope = found[PER_USER[0]].filter_noise_per_threshold
            curves = [Curve("with filter (all users)", THRESHOLDS, [slope * t for t in THRESHOLDS])]
            for k in PER_USER:
                label = f"user-wise DP-SGD, k = {k} records per user"
                curves.append(Curve(label, THRESHOLDS, [found[k].plain_noise] * len(THRESHOLDS)))
            axis = "concentration over clip norm, τ/C (log scale)"
            label = "noise on the mean gradient\n(clip norms, log scale)"
            panels.append(Panel(curves, f"ε = {epsilon:g}", axis, label, log_y=True))
        title = f"{USERS:,} users, {RECORDS:,} records a step, {STEPS:,} steps, δ = {DELTA:g}"
        return Drawing(panels, title)

    return build


FIGURES = figures({"privacy-unit-3": noise(3.0), "privacy-unit-7": noise(1.0, 3.0, 8.0)})


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
