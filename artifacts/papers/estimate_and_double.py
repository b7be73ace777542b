"""Compute budget in ULS: Estimate-and-Double and its rivals, estimating a mean.

Charles et al. 2024, appendix F: B = G M gradients a step, G of each of M users. A strategy doubles
one of the two until the budget is spent. Noise on the averaged gradient has standard deviation
L(G) σ(M)/M (their equation 6), so Estimate-and-Double (Algorithm 3) doubles G where L(2G)/L(G) is
below [σ(2M)/(2M)] / [σ(M)/M]. Their equation 11 leaves out the 1/M of equation 6; σ never falls
with M, and without it G alone would ever be doubled.

A choice on one half of the trials is made from the losses of the other half: it is judged by trials
that it has not seen.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from common import Results, Row, interval, main, pick, relative, studies
from means import ULS, Descent, MeanStudy, tuned

from mfopt.experiments.plots import Panel, around

Place = tuple[int, int]  # (G, M)
BEST, ORACLE, ESTIMATE = "best of the grid", "greedy local oracle", "Estimate-and-Double"
RANDOM, COHORT, GROUP = "random", "max cohort", "max group size"
STRATEGIES = (ESTIMATE, ORACLE, RANDOM, COHORT, GROUP)


class Choice(NamedTuple):
    """Choice of a strategy for each half of the trials, and losses there, (budgets, trials)."""

    places: tuple[list[Place], list[Place]]
    losses: np.ndarray


def choices(
    loss: Mapping[Place, np.ndarray], noise: Mapping[int, float], scale: Mapping[int, float]
) -> dict[str, Choice]:
    """The choice of each strategy at each budget G M, from the smallest to the largest.

    ``loss`` is (trials,) at each place of the grid, ``noise`` σ(M)/M and ``scale`` L(G).
    """
    budgets = sorted({group * cohort for group, cohort in loss})
    each = [[p for p in loss if p[0] * p[1] == budget] for budget in budgets]

    def paths(half: int) -> dict[str, list[Place]]:
        known = {place: float(values[1 - half :: 2].mean()) for place, values in loss.items()}
        return {
            BEST: [min(some, key=known.__getitem__) for some in each],
            ESTIMATE: walk(loss, lambda g, m: scale[2 * g] / scale[g] < noise[2 * m] / noise[m]),
            ORACLE: walk(loss, lambda g, m: known[2 * g, m] < known[g, 2 * m]),
            COHORT: [max(some, key=lambda place: place[1]) for some in each],
            GROUP: [max(some, key=lambda place: place[0]) for some in each],
        }

    even, odd = paths(0), paths(1)
    # the mean over all places of a budget is what a random one of them expects
    anywhere = np.array([np.mean([loss[place] for place in some], axis=0) for some in each])
    chosen = {RANDOM: Choice(([], []), anywhere)}
    for name in even:
        losses = np.array([loss[place] for place in even[name]])
        losses[:, 1::2] = [loss[place][1::2] for place in odd[name]]
        chosen[name] = Choice((even[name], odd[name]), losses)
    return chosen


def walk(grid: Mapping[Place, object], double_group: Callable[[int, int], bool]) -> list[Place]:
    """Places from the first of the grid to the last, each with one of (G, M) doubled."""
    (group, cohort), (most, largest) = min(grid), max(grid)
    path = [(group, cohort)]
    while (group, cohort) != (most, largest):
        if cohort == largest or (group != most and double_group(group, cohort)):
            group *= 2
        else:
            cohort *= 2
        path.append((group, cohort))
    return path


def lipschitz(descent: Descent, groups: Sequence[int], probed: int) -> dict[int, float]:
    """L(G) of each G: the median norm of users' averaged gradients at θ = 0.

    As in the publication, it is no part of the guarantee.
    """
    make, d = np.random.default_rng([descent.seed, 3]), descent.dimension
    users = make.standard_normal(d) + descent.across * make.standard_normal((probed, d))
    noise = descent.within * make.standard_normal((probed, descent.examples, d))
    data = users[:, None] + noise
    norms = {g: np.linalg.norm(data[:, :g].mean(1), axis=-1) for g in groups}
    return {group: float(np.median(each)) for group, each in norms.items()}


@dataclasses.dataclass(frozen=True)
class EstimateAndDouble(MeanStudy):
    """ULS: how many users a step, and how many examples of each."""

    name = "estimate-and-double"
    source = "Charles et al. 2024, appendix F, Algorithm 3, Figures 13 to 15"
    heading = "Choosing G and M of ULS on mean estimation, user-level DP"
    paper = "350 million parameters, 2,000 and 10,000 steps"

    epsilons: tuple[float, ...] = (1.0, 4.0, 16.0)  # ε of every grid.
    groups: tuple[int, ...] = (1, 2, 4, 8, 16)  # G, each the double of the one before.
    cohorts: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)  # M, each the double of the one before.
    within: float = 1.0  # σ₂, standard deviation of a user's examples.
    across: float = 1.0  # σ₁, standard deviation of users' means.
    probed: int = 128  # Users that L(G) is estimated by.

    def at(self, epsilon: float, place: tuple[int, int]) -> Descent:
        """ULS at one (G, M)."""
        group, cohort = place
        deviations = {"across": self.across, "within": self.within}
        arm = {"group": group, "batch": group * cohort, "epsilon": epsilon, **deviations}
        return self.descent(algorithm=ULS, **arm)

    def places(self) -> list[Place]:
        """The (G, M) to choose from."""
        return list(itertools.product(self.groups, self.cohorts))

    def cells(self) -> Iterable[Descent]:
        return [self.at(e, place) for e in self.epsilons for place in self.places()]

    def choices(self, results: Results, epsilon: float) -> dict[str, Choice]:
        """Choice of each strategy at each budget, with the losses of every trial there."""
        at = {place: results[self.at(epsilon, place)] for place in self.places()}
        loss = {place: tuned(result.arrays["errors"]) for place, result in at.items()}
        noise = {m: at[self.groups[0], m].record["noise_multiplier"] / m for m in self.cohorts}
        first = self.at(epsilon, self.places()[0])
        return choices(loss, noise, lipschitz(first, self.groups, self.probed))

    def rows(self, results: Results) -> list[Row]:
        budgets = sorted({group * cohort for group, cohort in self.places()})
        rows: list[Row] = []
        for epsilon in self.epsilons:
            chosen = self.choices(results, epsilon)
            best = chosen[BEST].losses
            for name, (k, budget) in itertools.product(STRATEGIES, enumerate(budgets)):
                halves, losses = chosen[name]
                places = dict.fromkeys(half[k] for half in halves if half)
                above, half = interval(losses[k] - best[k])
                row = {"strategy": name, "gradients": budget, "_losses": losses[k]}
                row["places"] = " or ".join(map(str, places)) or "any"
                row |= {"squared_error": float(losses[k].mean()), "suboptimality": above}
                cell = self.at(epsilon, next(iter(places), self.places()[0]))
                said = {"sampling": "Poisson, users, M of them", "noise_multiplier": None}
                rows.append(row | {"half95": half, **cell.privacy(**said)})
        return rows

    def panels(self, rows: list[Row]) -> list[Panel]:
        above = "squared error above the best\nof the grid (%; bands: 95%)"
        axis, panels = "gradients per step B (log scale)", []
        for epsilon in self.epsilons:
            curves = []
            for name in STRATEGIES:
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
                for name in (ESTIMATE, ORACLE)
            )
            whole, error = relative(np.mean(mine, axis=0), np.mean(greedy, axis=0))
            worst, spread = max(relative(a, b) for a, b in zip(mine, greedy, strict=True))
            said.append(
                f"ε = {epsilon:g}: over all budgets Estimate-and-Double's squared error is "
                f"{whole:.3f} ± {error:.3f} times the greedy oracle's; "
                f"at its worst budget {worst:.3f} ± {spread:.3f}"
            )
        return said


STUDIES = studies(__file__, EstimateAndDouble())

if __name__ == "__main__":
    main(__file__, __doc__, STUDIES)
