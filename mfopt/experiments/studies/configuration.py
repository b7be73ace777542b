"""How to spend a compute budget in ULS: Estimate-and-Double and its rivals, estimating a mean.

Charles et al. 2024, appendix F: B = G M gradients a step, G of each of M users. A strategy doubles
one of the two until the budget is spent. Noise on the averaged gradient has standard deviation
L(G) σ(M)/M (their equation 6), so Estimate-and-Double (Algorithm 3) doubles G where L(2G)/L(G) is
below [σ(2M)/(2M)] / [σ(M)/M]. Their equation 11 leaves out the 1/M of equation 6; σ never falls
with M, and without it G alone would ever be doubled.

L(G) is estimated as the median norm of users' averaged gradients at the first iterate, by users
that take no part in any trial: as in the publication, it is no part of the guarantee.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mfopt import _check
from mfopt.experiments.plots import Panel
from mfopt.experiments.runs.means import ULS, Z95, Descent, mean_error, relative
from mfopt.experiments.studies.engine import Found, Row, option
from mfopt.experiments.studies.means import MeanStudy
from mfopt.experiments.studies.rows import curve, pick

Place = tuple[int, int]  # (G, M)
BEST, ORACLE, ESTIMATE = "best of the grid", "greedy local oracle", "Estimate-and-Double"
RANDOM, COHORT, GROUP = "random", "max cohort", "max group size"
STRATEGIES = (ESTIMATE, ORACLE, RANDOM, COHORT, GROUP)


class Choice(NamedTuple):
    """What a strategy chose for one half of the trials, and the losses of that half there."""

    places: tuple[list[Place], list[Place]]
    losses: np.ndarray


@dataclasses.dataclass(frozen=True)
class EstimateAndDouble(MeanStudy):
    """Loss of ULS where G and M are chosen by each strategy, at every budget and ε."""

    name = "estimate-and-double"
    summary = "ULS: how many users a step, and how many examples of each."
    source = "Charles et al. 2024, appendix F, Algorithm 3, Figures 13 to 15"
    default_size = "mean estimation, 5 × 7 grid of (G, M), 3 ε, 64 trials"
    time = "about 4 CPU-minutes"
    full = "epsilons=1,4,16,64 trials=128 clips=0.5,1,2,4,8,16"
    full_size = "4 ε, 128 trials, a wider sweep (their language models: `mfopt train`)"
    columns = (
        "epsilon=ε; strategy; gradients=B; places=(G, M); squared_error=error²; "
        "suboptimality=above the best; standard_error=± s.e.; privacy_unit=unit; sampling; "
        "noise_multiplier=σ"
    )

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

    def descent(self, epsilon: float, place: Place) -> Descent:
        """ULS at one (G, M)."""
        group, cohort = place
        batch = group * cohort
        return Descent.of(self, algorithm=ULS, group=group, batch=batch, epsilon=epsilon)

    def places(self) -> list[Place]:
        """The grid."""
        return [(group, cohort) for group in self.groups for cohort in self.cohorts]

    def budgets(self) -> list[int]:
        """From the first place, where every strategy begins, to the last."""
        first, last = self.places()[0], self.places()[-1]
        doublings = (last[0] * last[1] // (first[0] * first[1])).bit_length()
        return [first[0] * first[1] << k for k in range(doublings)]

    def cells(self) -> Iterable[Descent]:
        return [self.descent(e, place) for e in self.epsilons for place in self.places()]

    def lipschitz(self) -> dict[int, float]:
        """L(G) for every G: the median norm of users' averaged gradients at θ = 0."""
        make, d = np.random.default_rng([self.seed, 3]), self.dimension
        users = make.standard_normal(d) + self.across * make.standard_normal((self.probed, d))
        noise = self.within * make.standard_normal((self.probed, self.examples, d))
        data = users[:, None] + noise
        norms = {g: np.linalg.norm(data[:, :g].mean(1), axis=-1) for g in self.groups}
        return {group: float(np.median(each)) for group, each in norms.items()}

    def choices(self, found: Found, epsilon: float) -> dict[str, Choice]:
        """What each strategy chooses at each budget, with the losses of every trial there.

        What a strategy knows of losses comes from the other half of the trials: a choice is judged
        by trials that it has not seen.
        """
        at = {place: found[self.descent(epsilon, place)] for place in self.places()}
        loss = {place: self.best(result).losses for place, result in at.items()}
        scale = self.lipschitz()
        noise = {m: at[self.groups[0], m].record["noise_multiplier"] / m for m in self.cohorts}

        def estimated(group: int, cohort: int) -> bool:
            shrunk = noise[2 * cohort] / noise[cohort]
            return bool(scale[2 * group] / scale[group] < shrunk)

        each = [[p for p in loss if p[0] * p[1] == budget] for budget in self.budgets()]
        halves = []
        for half in (0, 1):
            known = {place: float(values[1 - half :: 2].mean()) for place, values in loss.items()}

            def oracle(group: int, cohort: int, known: Mapping[Place, float] = known) -> bool:
                return known[2 * group, cohort] < known[group, 2 * cohort]

            halves.append(
                {
                    BEST: [min(some, key=known.__getitem__) for some in each],
                    ESTIMATE: walk(self.groups, self.cohorts, estimated),
                    ORACLE: walk(self.groups, self.cohorts, oracle),
                    COHORT: [max(some, key=lambda place: place[1]) for some in each],
                    GROUP: [max(some, key=lambda place: place[0]) for some in each],
                }
            )
        # the mean over all places of a budget is what a random one of them expects
        anywhere = np.array([np.mean([loss[place] for place in some], axis=0) for some in each])
        chosen = {RANDOM: Choice(([], []), anywhere)}
        for name in halves[0]:
            losses = np.empty_like(anywhere)
            for half, paths in enumerate(halves):
                losses[:, half::2] = [loss[place][half::2] for place in paths[name]]
            chosen[name] = Choice((halves[0][name], halves[1][name]), losses)
        return chosen

    def rows(self, found: Found) -> list[Row]:
        rows = []
        for epsilon in self.epsilons:
            chosen = self.choices(found, epsilon)
            for name in STRATEGIES:
                for k, budget in enumerate(self.budgets()):
                    row = self._row(found, epsilon, chosen[name], chosen[BEST], k)
                    rows.append({"strategy": name, "gradients": budget, **row})
        return rows

    def _row(self, found: Found, epsilon: float, choice: Choice, best: Choice, k: int) -> Row:
        """One strategy at the budget of number ``k``."""
        places = list(dict.fromkeys(half[k] for half in choice.places if half))
        cohorts = {m for _, m in places}
        cell = self.descent(epsilon, places[0] if places else self.places()[0])
        suboptimality, error = mean_error(choice.losses[k] - best.losses[k])
        shares = " or ".join(f"{m / self.users:.4g}" for m in sorted(cohorts)) or "any"
        sigma = found[cell].record["noise_multiplier"] if len(cohorts) == 1 else None
        return {
            "places": " or ".join(f"({g}, {m})" for g, m in places) or "any",
            "squared_error": float(choice.losses[k].mean()),
            "suboptimality": suboptimality,
            "standard_error": error,
            **cell.privacy(sampling=f"Poisson, users, {shares}"),
            "noise_multiplier": sigma,
            "within": self.within,
            "trials": self.trials,
            "_losses": choice.losses[k],
        }

    def title(self, rows: list[Row]) -> str:
        return f"Choosing G and M of ULS on mean estimation, user-level DP, δ = {self.delta:g}"

    def panels(self, rows: list[Row]) -> list[Panel]:
        axis = "gradients per step B (log scale)"
        above = "squared error above the best\nof the grid (%)"

        def relative_to_best(row: Row) -> Row:
            scale = 100 / (row["squared_error"] - row["suboptimality"])
            return row | {k: scale * row[k] for k in ("suboptimality", "standard_error")}

        return [
            Panel(
                [
                    curve(name, mine, "gradients", "suboptimality", half=("standard_error", Z95))
                    for name in STRATEGIES
                    for mine in [
                        list(map(relative_to_best, pick(rows, epsilon=epsilon, strategy=name)))
                    ]
                ],
                f"ε = {epsilon:g}",
                axis,
                above,
                zero_line=True,
            )
            for epsilon in self.epsilons
        ]

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
                f"{whole:.3f} ± {Z95 * error:.3f} times the greedy oracle's; "
                f"at its worst budget {worst:.3f} ± {Z95 * spread:.3f}"
            )
        return said


def walk(
    groups: Sequence[int], cohorts: Sequence[int], double_group: Callable[[int, int], bool]
) -> list[Place]:
    """Places from the first to the last, each with one of (G, M) doubled.

    Args:
      groups: G to choose from.
      cohorts: M to choose from.
      double_group: of (G, M), whether G is doubled next; asked only where both can be.
    """
    group, cohort = groups[0], cohorts[0]
    path = [(group, cohort)]
    while (group, cohort) != (groups[-1], cohorts[-1]):
        if cohort == cohorts[-1] or (group != groups[-1] and double_group(group, cohort)):
            group *= 2
        else:
            cohort *= 2
        path.append((group, cohort))
    return path
