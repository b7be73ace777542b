"""Choices of G and M of ULS within a compute budget, by doubling one of the two.

A choice on one half of the trials is made by what the other half knows: it is judged by trials that
it has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mfopt.experiments.runs.means import Descent

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
