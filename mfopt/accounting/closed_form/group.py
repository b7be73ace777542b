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
from collections.abc import Callable

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.guarantee import Guarantee

_MOST_RUNS = 64  # of equal steps, that a split is made of


@dataclasses.dataclass(frozen=True)
class GroupProfile:
    """Bound for groups of K from points of the one-unit profile, in one direction.

    Attributes:
      epsilons, log_deltas: shape (m,), increasing and >= 0, and upper bounds of log δ there.
      group_size: K.
    """

    epsilons: np.ndarray
    log_deltas: np.ndarray
    group_size: int

    def log_delta(self, epsilon: float) -> float:
        """Upper bound of log δ_K(ε): between two computed splits, their chord in e^ε."""
        epsilon = _check.non_negative("epsilon", epsilon)
        low, high = self._around(lambda point: point[0] <= epsilon)
        if high is None:
            return min(low[1], 0.0)
        share = math.expm1(epsilon - low[0]) / math.expm1(high[0] - low[0])
        chord = scipy.special.logsumexp([low[1], high[1]], b=[1 - share, share])
        return min(float(chord), 0.0)

    def epsilon(self, delta: float) -> float:
        """Smallest ε at which this bound is at most ``delta``; infinite if the points end first."""
        target = math.log(_check.probability("delta", delta))
        if self.log_delta(0.0) <= target:
            return 0.0
        low, high = self._around(lambda point: point[1] > target)
        if high is None:
            return math.inf
        # e^ε at which the chord between the two splits meets the target
        share = -math.expm1(target - low[1]) / -math.expm1(high[1] - low[1])
        return low[0] + math.log1p(share * math.expm1(high[0] - low[0]))

    def split(self, log_start: float) -> tuple[float, float]:
        """(ε, log δ_K) of the split that is optimal for events of probability e^log_start.

        Step by step, the unit's bound min_i (e^{ε_i} q + δ_i) is applied to the probability q
        that was reached so far. Whatever the start, the split it picks is a valid one.
        """
        epsilon, log_delta = 0.0, -math.inf
        for line in self._lines(log_start):
            epsilon += float(self.epsilons[line])
            log_delta = float(np.logaddexp(self.epsilons[line] + log_delta, self.log_deltas[line]))
        return epsilon, log_delta

    def lines_within(self, epsilon: float) -> np.ndarray:
        """Indices of the points of the best split found with total at most ``epsilon``.

        In the order of the formula above: the first one's δ has weight 1.
        """

        def within(start: float) -> bool:
            return float(np.sum(self.epsilons[self._lines(start)])) <= epsilon

        low, _ = solve.halved(within, 0.0, self._smallest_start())
        lines = self._lines(low) if low < 0 else np.full(self.group_size, np.argmin(self.epsilons))
        return lines[::-1]

    def _lines(self, log_start: float) -> np.ndarray:
        lines: list[int] = []
        log_q = log_start
        # any split is valid: of many steps, a run of them takes what is best for its first
        run = -(-self.group_size // _MOST_RUNS)
        while run * len(lines) < self.group_size:
            values = np.logaddexp(self.epsilons + log_q, self.log_deltas)
            best = int(np.argmin(values))
            lines.append(best)
            epsilon, log_delta = float(self.epsilons[best]), float(self.log_deltas[best])
            log_q = float(np.logaddexp(run * epsilon + log_q, log_delta + _log_sum(epsilon, run)))
        return np.repeat(lines, run)[: self.group_size]

    def _smallest_start(self) -> float:
        """A log probability so small that every step takes the last point."""
        smallest = min(float(self.log_deltas[-1]), 0.0)
        return smallest - self.group_size * float(self.epsilons[-1]) - 50

    def _around(
        self, below: Callable[[tuple[float, float]], bool]
    ) -> tuple[tuple[float, float], tuple[float, float] | None]:
        """Neighbouring splits (one that satisfies ``below``, the next that does not).

        Splits are ordered by start: a smaller starting probability gives a larger ε and a
        smaller δ.
        """
        low, high = 0.0, self._smallest_start()
        first, last = self.split(low), self.split(high)
        if not below(first):
            # already the split at probability 1 is past the point: δ <= 1 is all that is left
            return ((0.0, 0.0), first) if first[0] > 0 else (first, None)
        if below(last):
            return last, None
        low, high = solve.halved(lambda start: below(self.split(start)), low, high)
        return self.split(low), self.split(high)


def _log_sum(epsilon: float, terms: int) -> float:
    """log Σ_{i < n} e^{i ε} for n terms."""
    if epsilon * terms < 1e-12:
        return math.log(terms)
    ratio = -math.expm1(-terms * epsilon) / -math.expm1(-epsilon)
    return (terms - 1) * epsilon + math.log(ratio)


def black_box_log_factor(epsilon: float, group_size: int) -> float:
    """log of δ_K / δ in the textbook group privacy lemma, at ε_K = K ε: log Σ_{j<K} e^{jε}.

    (e^{Kε} - 1)/(e^ε - 1), as Ganesh 2024 (Lemma 1.1) and Chua et al. 2024 (section 2) use it; the
    latter prints e^{kε-1}/(e^ε-1), which is not 1 at k = 1.
    """
    return _log_sum(epsilon, group_size)


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
