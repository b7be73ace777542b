"""Charles et al. 2024: "Fine-tuning large language models with user-level differential privacy".

ELS samples examples and protects a user's up to G of them as a group; ULS samples users. The noise
variance compared is that of the averaged gradient, (σ·L/B)² for ELS and (σ·L/M)² for ULS
(equations 5 and 6), with σ calibrated to user-level (ε, δ), add-remove adjacency.
"""

from __future__ import annotations

from typing import Any

from common import AccountCell, Builder, Drawing, Run, figures, main
from group_level import along, group_lines

from mfopt.experiments.cache import Cell
from mfopt.experiments.plots import Curve, Panel
from mfopt.sampling import Poisson

DELTA = 1e-6
USERS, EXAMPLES, ROUNDS = 1024, 32, 1000
LIPSCHITZ = 10.0  # L_ELS
GROUP_SIGMAS = (0.5, 1.0, 2.0, 4.0)
GROUPS = (1, 2, 4, 8, 16, 32)
EPSILONS = (1.0, 4.0, 16.0)
COHORTS = (16, 32, 64)
VARIANCE = "noise variance per coordinate\n(log scale)"


def _els(epsilon: float, batch: int, group: int) -> Cell:
    """σ of ELS: each user has ``group`` examples, sampled at batch / (group · users)."""
    scheme = Poisson(batch / (group * USERS), ROUNDS)
    return AccountCell(scheme, group, epsilon=epsilon, delta=DELTA)


def _uls(epsilon: float, cohort: int) -> Cell:
    """σ of ULS: users are sampled at cohort / users."""
    return AccountCell(Poisson(cohort / USERS, ROUNDS), epsilon=epsilon, delta=DELTA)


def _variance(record: dict[str, Any], units: int) -> float:
    """Variance of the averaged gradient, with ``units`` units expected in a step."""
    return float(record["noise_multiplier"] * LIPSCHITZ / units) ** 2


def groups(run: Run) -> Drawing:
    """Figure 1: ε of ELS against the group size."""
    results = group_lines(run, Poisson(0.01, 2000), GROUP_SIGMAS, GROUPS)
    label = "mixture of Gaussians, σ = {:g}".format
    tight = [along(label(s), results["tight", s]) for s in GROUP_SIGMAS]
    black = [along(f"black box, σ = {s:g}", results["lemma", s], label(s)) for s in GROUP_SIGMAS]
    panel = Panel(
        [*tight, *black],
        "ELS, 2,000 rounds at probability 1/100",
        "examples per user G (log scale)",
        f"user-level ε at δ = {DELTA:g} (log scale)",
        log_y=True,
    )
    return Drawing([panel])


def variance_by_group(run: Run) -> Drawing:
    """Figure 2(a): the group size hardly matters for ELS at a fixed batch of 64."""
    results = run.records({(e, g): _els(e, 64, g) for e in EPSILONS for g in GROUPS})
    curves = [
        Curve(f"ε = {e:g}", GROUPS, [_variance(results[e, g], 64) for g in GROUPS])
        for e in EPSILONS
    ]
    return Drawing(
        [Panel(curves, "ELS, batch 64", "examples per user G (log scale)", VARIANCE, log_y=True)]
    )


def variances(*cohorts: int) -> Builder:
    """Figures 2(b) and 9: ELS, and ULS with equal or orthogonal gradients of a user."""

    def build(run: Run) -> Drawing:
        at = [(m, e) for m in cohorts for e in EPSILONS]
        cells = {(m, e, g): _els(e, m * g, EXAMPLES) for m, e in at for g in GROUPS}
        results = run.records(cells | {(m, e, 0): _uls(e, m) for m, e in at})
        panels = []
        for m, e in at:
            batches, user = [m * g for g in GROUPS], _variance(results[m, e, 0], m)
            example = [_variance(results[m, e, g], m * g) for g in GROUPS]
            curves = [
                Curve("ELS", batches, example),
                Curve("ULS, L_ULS = L_ELS", batches, [user] * len(batches)),
                Curve("ULS, L_ULS = L_ELS / √G_ULS", batches, [user / g for g in GROUPS]),
            ]
            axis = "gradients per iteration B (log scale)"
            title = f"cohort M = {m}, ε = {e:g}"
            panels.append(Panel(curves, title, axis, VARIANCE, log_y=True))
        return Drawing(panels, f"{USERS:,} users of {EXAMPLES} examples, {ROUNDS:,} rounds")

    return build


FIGURES = figures(
    {
        "user-level-1": groups,
        "user-level-2a": variance_by_group,
        "user-level-2b": variances(16),
        "user-level-9": variances(*COHORTS),
    }
)


if __name__ == "__main__":
    main(__file__, __doc__, FIGURES)
