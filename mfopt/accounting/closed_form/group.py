"""Group privacy from what is known about one unit.

For a chain D_0, D_1, …, D_K of data sets that differ by one unit each,

    δ_K(ε) = min over ε_1 + … + ε_K = ε of Σ_j e^{ε_1 + … + ε_{j-1}} δ(ε_j)

bounds the divergence of the ends, whatever the mechanism. The textbook lemma takes all ε_j equal
and a single point of the profile; the whole profile is tighter, and as tight as a statement about
the profile alone can be (it is the K-fold composition of the trade-off function, Dong, Roth,
Su 2022, Theorem 2.14).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.guarantee import Guarantee

_MOST_RUNS = 64  # of equal steps, that a split is made of


def best_split(
    epsilons: np.ndarray, log_deltas: np.ndarray, group_size: int, epsilon: float
) -> np.ndarray:
    """The best split found of ``epsilon`` over the steps, by points of a one-unit profile.

    Step by step, the unit's bound min_i (e^{ε_i} q + δ_i) is applied to the probability q that was
    reached so far, from a first q that is chosen so that the sum is within ``epsilon``. Whatever
    the start, the split it picks is a valid one.

    Args:
      epsilons, log_deltas: shape (m,), increasing and >= 0, and upper bounds of log δ there.
      group_size: K.
      epsilon: that the steps may take in all.

    Returns:
      Indices of the points, shape (K,), in the order of the formula: the first one's δ has weight
      1.
    """

    def lines(log_start: float) -> np.ndarray:
        chosen: list[int] = []
        log_q = log_start
        # any split is valid: of many steps, a run of them takes what is best for its first
        run = -(-group_size // _MOST_RUNS)
        while run * len(chosen) < group_size:
            best = int(np.argmin(np.logaddexp(epsilons + log_q, log_deltas)))
            chosen.append(best)
            step, log_delta = float(epsilons[best]), float(log_deltas[best])
            log_q = float(
                np.logaddexp(run * step + log_q, log_delta + black_box_log_factor(step, run))
            )
        return np.repeat(chosen, run)[:group_size]

    def within(log_start: float) -> bool:
        return float(np.sum(epsilons[lines(log_start)])) <= epsilon

    # so small a probability that every step takes the last point
    smallest = min(float(log_deltas[-1]), 0.0) - group_size * float(epsilons[-1]) - 50
    log_start, _ = solve.halved(within, 0.0, smallest)
    split = lines(log_start) if log_start < 0 else np.full(group_size, np.argmin(epsilons))
    return split[::-1]


def black_box_log_factor(epsilon: float, group_size: int) -> float:
    """log of δ_K / δ in the textbook group privacy lemma, at ε_K = K ε: log Σ_{j<K} e^{jε}.

    (e^{Kε} - 1)/(e^ε - 1), as Ganesh 2024 (Lemma 1.1) and Chua et al. 2024 (section 2) use it; the
    latter prints e^{kε-1}/(e^ε-1), which is not 1 at k = 1.
    """
    if epsilon * group_size < 1e-12:
        return math.log(group_size)
    ratio = -math.expm1(-group_size * epsilon) / -math.expm1(-epsilon)
    return (group_size - 1) * epsilon + math.log(ratio)


def black_box_group(guarantee: Guarantee, group_size: int) -> Guarantee:
    """The statement for groups of K by the textbook lemma: (K ε, δ Σ_{j<K} e^{jε}).

    Raises:
      UsageError: the resulting δ is 1 or more, which says nothing.
    """
    if group_size == 1:
        return guarantee
    log_factor = black_box_log_factor(guarantee.epsilon, group_size)
    log_delta = math.log(guarantee.delta) + log_factor
    if log_delta >= 0:
        rule = f"black-box group privacy of {guarantee} gives a δ above 1, which says nothing"
        way_out = "Use tight group accounting, a smaller group, or much more noise."
        raise _check.reject("group_size", group_size, rule, way_out)
    return dataclasses.replace(
        guarantee,
        epsilon=group_size * guarantee.epsilon,
        delta=math.exp(log_delta),
        group_size=group_size,
        method=f"black-box group privacy of: {guarantee.method}",
        status="bound" if guarantee.status == "exact" else guarantee.status,
    )


def one_unit_target(epsilon: float, delta: float, group_size: int) -> tuple[float, float]:
    """(ε, δ) of one unit from which :func:`black_box_group` gives (``epsilon``, ``delta``)."""
    unit_epsilon = epsilon / group_size
    return unit_epsilon, delta * math.exp(-black_box_log_factor(unit_epsilon, group_size))
