"""Lower bounds of δ by one linear statistic: the law of its shift, and the best threshold.

A unit that takes part in pattern k, of probability w_k, moves the statistic <X, u>, |u| = 1, of
noise N(0, σ²) by a_k = <m_k, u>. The sets {<X, u> > t σ} show

    H(P, Q) >= Σ_k w_k Φ(a_k/σ − t) − e^ε Φ(−t),                                               (1)

and the best of them is where the likelihood ratio of the statistic, which grows with t, is e^ε. To
round shifts down, or to leave patterns out, only lowers (1). The law of a sum of shifts is kept on
a grid whose cell is chosen such that rounding down costs little.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.profile import LowerProfile

_CELLS = 2**13  # of a grid of shifts
_GROUP_CELLS = 2**10  # the same where laws of several units are added
_PARTS = range(8, 129)  # of the largest shift: cells that are tried
_SPREAD = 12.0  # deviations of the sum that a grid reaches beyond its mean
_MARGIN = 1e-11  # relative to P of the set: what floats may be off by
_LARGEST = 1e6  # ε


@dataclasses.dataclass(frozen=True)
class ShiftLaw:
    """Probabilities of the shifts ``cell`` · (0, 1, …), each rounded down.

    Attributes:
      cell: in clip norms.
      weights: of sum at most 1.
    """

    cell: float
    weights: np.ndarray

    def of_group(self, units: int) -> ShiftLaw:
        """Law of the sum of the shifts of independent units."""
        if units == 1:
            return self
        half = self.of_group(units // 2)
        half = half._coarse(-(-half.weights.size // _GROUP_CELLS))
        total = ShiftLaw(half.cell, np.convolve(half.weights, half.weights))
        if units % 2 == 0:
            return total
        single = self._coarse(round(total.cell / self.cell))
        return ShiftLaw(total.cell, np.convolve(total.weights, single.weights))

    def _coarse(self, ratio: int) -> ShiftLaw:
        rounded = np.add.reduceat(self.weights, np.arange(0, self.weights.size, ratio))
        return ShiftLaw(self.cell * ratio, rounded)

    def profile(self, sigma: float) -> _ProjectedProfile:
        """Lower bound of the privacy profile at this σ."""
        (cells,) = np.nonzero(self.weights)
        return _ProjectedProfile(cells * self.cell / sigma, np.log(self.weights[cells]))


@dataclasses.dataclass(frozen=True)
class _ProjectedProfile(LowerProfile):
    """(1) of the module's text at the best threshold.

    Attributes:
      shifts: a_k/σ >= 0.
      log_weights: log w_k.
    """

    shifts: np.ndarray
    log_weights: np.ndarray

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε)."""
        tilted = self.log_weights - self.shifts**2 / 2

        def excess(threshold: float) -> float:
            return float(scipy.special.logsumexp(tilted + self.shifts * threshold)) - epsilon

        low, high = -40.0, 1.0
        while excess(high) < 0:
            low, high = high, 2 * high
            if high > 1e12:
                return -math.inf
        threshold = solve.root(excess, low, high, relative=1e-9) if excess(low) < 0 else low
        # any threshold proves a bound
        log_p = self.log_weights + scipy.special.log_ndtr(self.shifts - threshold)
        log_top = float(scipy.special.logsumexp(log_p))
        ratio = math.exp(min(epsilon + float(scipy.special.log_ndtr(-threshold)) - log_top, 0.0))
        share = 1 - ratio - _MARGIN
        return log_top + math.log(share) if share > 0 else -math.inf

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        """Lower bound of the smallest ε with δ(ε) <= ``delta``."""
        target = math.log(delta)

        def above(epsilon: float) -> bool:
            return self.log_delta_below(epsilon) > target

        if not above(0.0):
            return 0.0
        low, high = 0.0, 1.0
        while above(high) and high < _LARGEST:
            low, high = high, 2 * high
        return solve.halved(above, low, high)[0]


def of_sum(shifts: Sequence[np.ndarray]) -> ShiftLaw:
    """Law of a sum of independent shifts, each uniform over the entries of an array."""
    means = [float(np.mean(shift)) for shift in shifts]
    variance = sum(float(np.var(shift)) for shift in shifts)
    cell, size = _grid(np.concatenate(shifts), sum(means), variance)
    law = np.eye(1, size)[0]
    for shift in shifts:
        steps, counts = np.unique((shift / cell).astype(int), return_counts=True)
        law = sum(
            _moved(law, step) * (count / shift.size)
            for step, count in zip(steps, counts, strict=True)
        )
    return ShiftLaw(cell, np.asarray(law))


def of_separated(
    shifts: np.ndarray,
    separation: int,
    probability: float,
    grid: tuple[float, int] | None = None,
) -> ShiftLaw:
    """Law of the shift of a unit that rests after each participation, from a stationary start.

    Args:
      shifts: of a participation at each step, shape (n,).
      separation: steps from one participation to the next that is possible.
      probability: of taking part in a step where that is possible.
      grid: cell and number of cells of the law, if they are given.
    """
    rate = probability / (1 + (separation - 1) * probability)
    mean, square = rate * float(np.sum(shifts)), rate * float(np.sum(shifts**2))
    cell, size = grid or _grid(shifts, mean, square)
    # rows: of a unit that is available from this step on, and those after it, in a ring
    available = np.zeros((separation + 1, size))
    available[:separation, 0] = [1.0, *[probability] * (separation - 1)]
    available /= 1 + (separation - 1) * probability
    for step, shift in enumerate((shifts / cell).astype(int)):
        mass = available[step % (separation + 1)].copy()
        available[step % (separation + 1)] = 0.0
        available[(step + 1) % (separation + 1)] += (1 - probability) * mass
        available[(step + separation) % (separation + 1)] += probability * _moved(mass, shift)
    return ShiftLaw(cell, np.sum(available, axis=0))


def of_partition(shifts: np.ndarray, groups: int, probability: float) -> ShiftLaw:
    """Law of the shift of a unit in a uniformly random one of groups of steps, in turn.

    Args:
      shifts: of a participation at each step, shape (n,).
      groups: of steps.
      probability: of taking part in a step of its group, independently of the others.
    """
    parts = [shifts[start::groups] for start in range(groups)]
    longest = max(parts, key=np.sum)
    grid = _grid(
        shifts, probability * float(np.sum(longest)), probability * float(np.sum(longest**2))
    )
    laws = [of_separated(part, 1, probability, grid).weights for part in parts]
    return ShiftLaw(grid[0], np.mean(laws, axis=0))


def _grid(shifts: np.ndarray, mean: float, variance: float) -> tuple[float, int]:
    """(cell, number of cells): the one by which rounding down loses least."""
    largest = float(np.max(shifts))
    top = mean + _SPREAD * math.sqrt(variance) + 2 * largest
    cells = [largest / parts * (1 - 1e-12) for parts in _PARTS if top * parts < _CELLS * largest]
    cells = cells or [top / _CELLS]
    cell = min(cells, key=lambda width: float(np.sum(shifts - np.floor(shifts / width) * width)))
    return cell, math.ceil(top / cell) + 1


def _moved(law: np.ndarray, step: int) -> np.ndarray:
    """The law moved up by ``step`` cells; what would leave the grid stays at its end."""
    moved = np.zeros_like(law)
    moved[step:] = law[: law.size - step]
    moved[-1] += float(np.sum(law[law.size - step :])) if step else 0.0
    return moved
