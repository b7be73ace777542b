"""Compute budget in ULS: Estimate-and-Double and its rivals, estimating a mean.

Charles et al. 2024, appendix F: B = G M gradients a step, G of each of M users. A strategy doubles
one of the two until the budget is spent. Noise on the averaged gradient has standard deviation
L(G) σ(M)/M (their equation 6), so Estimate-and-Double (Algorithm 3) doubles G where L(2G)/L(G) is
below [σ(2M)/(2M)] / [σ(M)/M]. Their equation 11 leaves out the 1/M of equation 6; σ never falls
with M, and without it G alone would ever be doubled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.options import option
from mfopt.experiments.plots import Panel, around
from mfopt.experiments.runs import doubling
from mfopt.experiments.runs.means import ULS, Descent, tuned
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.mean_estimation import MeanStudy
from mfopt.experiments.studies.rows import interval, pick, relative


@dataclasses.dataclass(frozen=True)
class EstimateAndDouble(MeanStudy):
    """ULS: how many users a step, and how many examples of each."""

    name = "estimate-and-double"
    source = "Charles et al. 2024, appendix F, Algorithm 3, Figures 13 to 15"
    default_size = "mean estimation, 5 × 7 grid of (G, M), 3 ε, 64 trials"
    time = "about 2 CPU-minutes"
    columns = (
        "epsilon=ε; strategy; gradients=B; places=(G, M); squared_error=error²; "
        "suboptimality=above the best; half95=±; privacy_unit=unit; sampling"
    )
    scale = f"{MeanStudy.scale}; in the paper: 350 million parameters, 2,000 and 10,000 steps"
    title = "Choosing G and M of ULS on mean estimation, user-level DP, δ = {0.delta:g}"

    epsilons: tuple[float, ...] = option((1.0, 4.0, 16.0), "ε of every grid.", name="--eps")
    groups: tuple[int, ...] = option((1, 2, 4, 8, 16), "G, each the double of the one before.")
    cohorts: tuple[int, ...] = option(
        (4, 8, 16, 32, 64, 128, 256), "M, each the double of the one before."
    )
    within: float = option(1.0, "σ₂, standard deviation of a user's examples.")
    across: float = option(1.0, "σ₁, standard deviation of users' means.")
    probed: int = option(128, "Users that L(G) is estimated by.")

    def check_together(self) -> None:
        self.at_most("groups", "examples")
        self.at_most("cohorts", "users")
        for name in ("groups", "cohorts"):
            values = getattr(self, name)
            if any(b != 2 * a for a, b in itertools.pairwise(values)):
                raise _check.reject(name, values, "each must be twice the one before")
        super().check_together()

    def descent(self, epsilon: float, place: tuple[int, int]) -> Descent:
        """ULS at one (G, M)."""
        how = {"group": place[0], "batch": place[0] * place[1]}
        return Descent.of(self, algorithm=ULS, epsilon=epsilon, **how)

    def places(self) -> list[doubling.Place]:
        """The (G, M) to choose from."""
        return list(itertools.product(self.groups, self.cohorts))

    def cells(self) -> Iterable[Descent]:
        return [self.descent(e, place) for e in self.epsilons for place in self.places()]

    def choices(self, found: Found, epsilon: float) -> dict[str, doubling.Choice]:
        """Choice of each strategy at each budget, with the losses of every trial there."""
        at = {place: found[self.descent(epsilon, place)] for place in self.places()}
        loss = {place: tuned(result.arrays["errors"]) for place, result in at.items()}
        noise = {m: at[self.groups[0], m].record["noise_multiplier"] / m for m in self.cohorts}
        first = self.descent(epsilon, self.places()[0])
        return doubling.choices(loss, noise, doubling.lipschitz(first, self.groups, self.probed))

    def rows(self, found: Found) -> list[Row]:
        budgets = sorted({group * cohort for group, cohort in self.places()})
        rows: list[Row] = []
        for epsilon in self.epsilons:
            chosen = self.choices(found, epsilon)
            best = chosen[doubling.BEST].losses
            for name, (k, budget) in itertools.product(doubling.STRATEGIES, enumerate(budgets)):
                halves, losses = chosen[name]
                places = dict.fromkeys(half[k] for half in halves if half)
                above, half = interval(losses[k] - best[k])
                row = {"strategy": name, "gradients": budget, "_losses": losses[k]}
                row["places"] = " or ".join(map(str, places)) or "any"
                row |= {"squared_error": float(losses[k].mean()), "suboptimality": above}
                cell = self.descent(epsilon, next(iter(places), self.places()[0]))
                said = {"sampling": "Poisson, users, M of them", "noise_multiplier": None}
                rows.append(row | {"half95": half, **cell.privacy(**said)})
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        above = "squared error above the best\nof the grid (%; bands: 95%)"
        axis, panels = "gradients per step B (log scale)", []
        for epsilon in self.epsilons:
            curves = []
            for name in doubling.STRATEGIES:
                mine = pick(rows, epsilon=epsilon, strategy=name)
                best = np.array([row["squared_error"] - row["suboptimality"] for row in mine]) / 100
                gap, half = (
                    np.array([row[k] for row in mine]) / best for k in ("suboptimality", "half95")
                )
                curves.append(around(name, [row["gradients"] for row in mine], gap, half))
            panels.append(Panel(curves, f"ε = {epsilon:g}", axis, above, zero_line=True))
        return panels

    def findings(self, rows: list[Row]) -> list[str]:
        said = []
        for epsilon in self.epsilons:
            mine, greedy = (
                [row["_losses"] for row in pick(rows, epsilon=epsilon, strategy=name)]
                for name in (doubling.ESTIMATE, doubling.ORACLE)
            )
            whole, error = relative(np.mean(mine, axis=0), np.mean(greedy, axis=0))
            worst, spread = max(relative(a, b) for a, b in zip(mine, greedy, strict=True))
            said.append(
                f"ε = {epsilon:g}: over all budgets Estimate-and-Double's squared error is "
                f"{whole:.3f} ± {error:.3f} times the greedy oracle's; "
                f"at its worst budget {worst:.3f} ± {spread:.3f}"
            )
        return said
