"""Choices of G and M of ULS within a compute budget, by doubling one of the two.

A strategy's choice on one half of the trials is made by what the other half knows: it is judged by
trials that it has not seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mfopt.experiments.runs.means import Descent

Place = tuple[int, int]  # (G, M)
BEST, ORACLE, ESTIMATE = "best of the grid", "greedy local oracle", "Estimate-and-Double"
RANDOM, COHORT, GROUP = "random", "max cohort", "max group size"
STRATEGIES = (ESTIMATE, ORACLE, RANDOM, COHORT, GROUP)


class Choice(NamedTuple):
    """Choice of a strategy for each half of the trials, and that half's losses there."""

    places: tuple[list[Place], list[Place]]
    losses: np.ndarray


class BudgetGrid(NamedTuple):
    """G and M to choose from, each value the double of the one before."""

    groups: Sequence[int]
    cohorts: Sequence[int]

    def places(self) -> list[Place]:
        """Places of the grid."""
        return list(itertools.product(self.groups, self.cohorts))

    def budgets(self) -> list[int]:
        """Gradients G M from the first place, where every strategy begins, to the last."""
        return sorted({group * cohort for group, cohort in self.places()})

    def choices(
        self,
        loss: Mapping[Place, np.ndarray],
        noise: Mapping[int, float],
        scale: Mapping[int, float],
    ) -> dict[str, Choice]:
        """The choice of each strategy at each budget, with the losses of every trial there.

        Args:
          loss: (trials,) of each place.
          noise: σ(M)/M of each M.
          scale: L(G) of each G.
        """
        each = [[p for p in loss if p[0] * p[1] == budget] for budget in self.budgets()]

        def estimated(group: int, cohort: int) -> bool:
            return scale[2 * group] / scale[group] < noise[2 * cohort] / noise[cohort]

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


def walk(
    groups: Sequence[int], cohorts: Sequence[int], double_group: Callable[[int, int], bool]
) -> list[Place]:
    """Places from the first to the last, each with one of (G, M) doubled."""
    group, cohort = groups[0], cohorts[0]
    path = [(group, cohort)]
    while (group, cohort) != (groups[-1], cohorts[-1]):
        if cohort == cohorts[-1] or (group != groups[-1] and double_group(group, cohort)):
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
