"""Charles et al. 2024: "Fine-tuning large language models with user-level differential privacy".

ELS samples examples and protects a user's up to G of them as a group; ULS samples users. The noise
variance compared is that of the averaged gradient, (σ·L/B)² for ELS and (σ·L/M)² for ULS
(equations 5 and 6), with σ calibrated to user-level (ε, δ), add-remove adjacency.
"""

from __future__ import annotations

from collections.abc import Callable

from mfopt.experiments.accounts import account_task, group_baseline_task
from mfopt.experiments.cache import Task
from mfopt.experiments.figures.context import Context, Drawing
from mfopt.experiments.plots import Curve, Panel
from mfopt.sampling import Poisson

PAPER = "Charles et al. 2024, Fine-tuning with user-level DP"
DELTA = 1e-6
USERS, EXAMPLES, ROUNDS = 1024, 32, 1000
LIPSCHITZ = 10.0  # L_ELS
GROUP_SIGMAS = (0.5, 1.0, 2.0, 4.0)
GROUP_SIZES = (1, 2, 4, 8, 16, 32)
GROUPS = (1, 2, 4, 8, 16, 32)
EPSILONS = (1.0, 4.0, 16.0)
COHORTS = (16, 32, 64)
VARIANCE = "noise variance per coordinate\n(log scale)"


def els_task(epsilon: float, batch: int, group: int) -> Task:
    """σ of ELS: each user has ``group`` examples, sampled at batch / (group · users)."""
    scheme = Poisson(batch / (group * USERS), ROUNDS)
    return account_task(scheme, group_size=group, epsilon=epsilon, delta=DELTA)


def uls_task(epsilon: float, cohort: int) -> Task:
    """σ of ULS: users are sampled at cohort / users."""
    return account_task(Poisson(cohort / USERS, ROUNDS), epsilon=epsilon, delta=DELTA)


def groups(context: Context) -> Drawing:
    """Figure 1: ε of ELS against the group size."""
    scheme = Poisson(0.01, 2000)

    def exact(sigma: float, k: int) -> Task:
        return account_task(scheme, group_size=k, noise_multiplier=sigma, delta=DELTA)

    def lemma(sigma: float, k: int) -> Task:
        return group_baseline_task(
            scheme, group_size=k, adjacency="add-remove", noise_multiplier=sigma, delta=DELTA
        )

    found = context.run(
        [f(s, k) for f in (exact, lemma) for s in GROUP_SIGMAS for k in GROUP_SIZES]
    )
    curves = []
    for sigma in GROUP_SIGMAS:
        tight = [found[exact(sigma, k)].record["epsilon"] for k in GROUP_SIZES]
        curves.append(Curve(f"mixture of Gaussians, σ = {sigma:g}", GROUP_SIZES, tight))
    for sigma in GROUP_SIGMAS:
        black = [(k, found[lemma(sigma, k)].record["epsilon"]) for k in GROUP_SIZES]
        shown = [(k, e) for k, e in black if e is not None]
        label, like = f"black box, σ = {sigma:g}", f"mixture of Gaussians, σ = {sigma:g}"
        x, y = [k for k, _ in shown], [e for _, e in shown]
        curves.append(Curve(label, x, y, like=like))
    panel = Panel(
        curves,
        "ELS, 2,000 rounds at probability 1/100",
        "examples per user G (log scale)",
        f"user-level ε at δ = {DELTA:g} (log scale)",
        log_y=True,
    )
    return Drawing([panel])


def variance_by_group(context: Context) -> Drawing:
    """Figure 2(a): the group size hardly matters for ELS at a fixed batch of 64."""
    found = context.run([els_task(e, 64, g) for e in EPSILONS for g in GROUPS])
    curves = []
    for e in EPSILONS:
        sigmas = [found[els_task(e, 64, g)].record["noise_multiplier"] for g in GROUPS]
        curves.append(Curve(f"ε = {e:g}", GROUPS, [(s * LIPSCHITZ / 64) ** 2 for s in sigmas]))
    return Drawing(
        [Panel(curves, "ELS, batch 64", "examples per user G (log scale)", VARIANCE, log_y=True)]
    )


def _variances(context: Context, cohorts: tuple[int, ...]) -> list[Panel]:
    """One panel per cohort and ε: ELS, and ULS with equal or orthogonal gradients of a user."""

    def budgets(cohort: int) -> list[int]:
        return [cohort * g for g in GROUPS]

    def els(epsilon: float, batch: int) -> Task:
        return els_task(epsilon, batch, EXAMPLES)

    found = context.run(
        [els(e, b) for e in EPSILONS for m in cohorts for b in budgets(m)]
        + [uls_task(e, m) for e in EPSILONS for m in cohorts]
    )
    panels = []
    for cohort in cohorts:
        for epsilon in EPSILONS:
            batches = budgets(cohort)
            user = (
                found[uls_task(epsilon, cohort)].record["noise_multiplier"] * LIPSCHITZ / cohort
            ) ** 2
            example = [
                (found[els(epsilon, b)].record["noise_multiplier"] * LIPSCHITZ / b) ** 2
                for b in batches
            ]
            panels.append(
                Panel(
                    [
                        Curve("ELS", batches, example),
                        Curve("ULS, L_ULS = L_ELS", batches, [user] * len(batches)),
                        Curve("ULS, L_ULS = L_ELS / √G_ULS", batches, [user / g for g in GROUPS]),
                    ],
                    f"cohort M = {cohort}, ε = {epsilon:g}",
                    "gradients per iteration B (log scale)",
                    VARIANCE,
                    log_y=True,
                )
            )
    return panels


def variance(context: Context) -> Drawing:
    """Figure 2(b)."""
    return Drawing(
        _variances(context, (16,)), f"{USERS:,} users of {EXAMPLES} examples, {ROUNDS:,} rounds"
    )


def variance_all(context: Context) -> Drawing:
    """Figure 9."""
    return Drawing(
        _variances(context, COHORTS), f"{USERS:,} users of {EXAMPLES} examples, {ROUNDS:,} rounds"
    )


FIGURES: dict[str, tuple[str, str, Callable[[Context], Drawing]]] = {
    "user-level-1": ("Figure 1", "ε of ELS against the group size", groups),
    "user-level-2a": ("Figure 2(a)", "noise variance of ELS by group size", variance_by_group),
    "user-level-2b": ("Figure 2(b)", "noise variance of ELS and ULS", variance),
    "user-level-9": ("Figure 9", "noise variance of ELS and ULS, more cohorts", variance_all),
}
