"""Discretized privacy losses, with every rounding on the private side.

A pair of distributions (P, Q) is replaced by a discrete pair on the grid of losses
``step * k`` that *dominates* it: mass whose loss lies between two grid points is split over
the two so that both its P-mass and its Q-mass stay what they are (the "connect the dots"
discretization of Doroshenko, Ghazi, Kamath, Kumar, Manurangsi 2022, here as a balayage). One
discrete pair serves both directions: seen from Q, the atom of P-mass p at loss l is an atom of
mass p e^{-l} at loss -l.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting import solve

LARGEST_WINDOW = 1 << 23
MASS_ACCURACY = 1e-13  # relative, of one round; counted once a round on the private side
# Masses below this are no longer accurate (close to the smallest normal float).
_FAINT = 1e-290
# points next to the centre of a grid that are all used in a lower bound: at least, and of a round
# that is alone
_DENSE, _DENSE_ALONE = 1 << 13, 1 << 20
_UNSEEN = 1e-5  # share of all outcomes that may be dropped without showing in a lower bound
_SHIFTS = np.arange(8) / 8  # of a grid, at which it is tried


@dataclasses.dataclass(frozen=True)
class LossDistribution:
    """A discrete pair (P, Q) by the loss of its atoms.

    Attributes:
      step: grid spacing of the loss.
      index: shape (N,), increasing integers; atom i has loss ``step * index[i]``.
      mass: shape (N,), P-mass of the atoms; the Q-mass is ``mass * exp(-loss)``.
      infinite: P-mass where Q has none (loss +∞), all truncation included.
      reverse_infinite: Q-mass where P has none: the same for the other direction.
      offset: the loss of the atom of index 0.
      infinite_q: Q-mass of what counts as an infinite loss: 0 but in a lower bound.
    """

    step: float
    index: np.ndarray
    mass: np.ndarray
    infinite: float
    reverse_infinite: float
    offset: float = 0.0
    infinite_q: float = 0.0

    @property
    def losses(self) -> np.ndarray:
        """Loss of each atom, shape (N,)."""
        return self.offset + self.step * self.index

    def reverse(self) -> LossDistribution:
        """The pair (Q, P): the other adjacency direction."""
        mass = np.exp(self.log_mass - self.losses)[::-1]
        kept = mass > _FAINT
        index = -self.index[::-1][kept]
        infinite = self.reverse_infinite + float(mass[~kept].sum())
        reverse_infinite = self.infinite + float(self.mass[::-1][~kept].sum())
        return LossDistribution(
            self.step, index, mass[kept], infinite, reverse_infinite, -self.offset
        )

    @functools.cached_property
    def log_mass(self) -> np.ndarray:
        """log of the P-mass of each atom, shape (N,)."""
        return np.log(self.mass)


def from_cells(
    step: float, loss: np.ndarray, mass_p: np.ndarray, mass_q: np.ndarray
) -> LossDistribution:
    """The discrete pair that dominates (P, Q) cut into cells of increasing loss.

    Args:
      step: grid spacing.
      loss: shape (J + 1,), increasing: the loss at the borders of the J cells, where the loss
        inside cell j is known to lie in [loss[j], loss[j+1]]. -inf and +inf are allowed at the
        ends.
      mass_p, mass_q: shape (J,), P- and Q-mass of the cells.
    """
    # Where the P-mass is below what floats can carry, the Q-mass has no atom to sit on: it becomes
    # an infinite loss of the other direction.
    faint = mass_p < _FAINT
    faint_p, faint_q = float(mass_p[faint].sum()), float(mass_q[faint].sum())
    mass_p, mass_q = np.where(faint, 0.0, mass_p), np.where(faint, 0.0, mass_q)
    lower, upper = loss[:-1], loss[1:]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        width = upper - lower
        # The one split over the two borders that keeps both masses. An open cell needs no other
        # formula: below -inf there is no P-mass to place, at +inf the Q-mass stays behind.
        to_upper = (mass_p - np.exp(np.log(mass_q) + lower)) / -np.expm1(-width)
    to_upper = np.where(width > 0, np.clip(to_upper, 0.0, mass_p), mass_p)
    at_border = np.zeros(loss.shape)
    at_border[1:] += to_upper
    at_border[:-1] += mass_p - to_upper
    infinite = faint_p + (float(at_border[-1]) if np.isposinf(loss[-1]) else 0.0)
    reverse_infinite = faint_q
    if np.isneginf(loss[0]) and mass_p[0] > 0:
        carried = math.exp(math.log(mass_p[0]) - loss[1])
        reverse_infinite += max(float(mass_q[0]) - carried, 0.0)
    finite = np.isfinite(loss) & (at_border > 0)
    return from_atoms(step, loss[finite], at_border[finite], infinite, reverse_infinite)


def from_below(
    step: float,
    mass_p: np.ndarray,
    mass_q: np.ndarray,
    rounds: int = 1,
    recut: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
) -> LossDistribution:
    """A discrete pair on the grid that (P, Q) dominates: the other end of the bracket.

    To tell only the cell of an outcome is post-processing. Cells between two grid points are then
    shared out to the two so that what lands on a point from above balances what lands there from
    below: its ratio of masses is the point's. Where that cannot be done exactly, P-mass is
    dropped, which again only takes away. The last cell is kept apart: outcomes with a round in it
    are all taken as evidence for P, as if the loss were infinite, but for the Q-mass they have.

    The grid is shifted so that next to no P-mass is dropped. Where the losses are at few points,
    one of them is where the likeliest balance; else the shift is searched for.

    Args:
      step: grid spacing.
      mass_p, mass_q: shape (J,), P- and Q-mass of the cells.
      rounds: compositions that are to lose little.
      recut: the masses of cells that end at losses, increasing; None where there are no others.
    """
    mass, loss = _resolved(mass_p[:-1], mass_q[:-1])
    centre = _balanced_loss(step, mass, loss)
    reach = (loss - centre) / step
    dense = max(_DENSE, _DENSE_ALONE // rounds)
    index = _sparse_index(math.floor(reach.min()) - 2, math.ceil(reach.max()) + 2, dense)
    by_lost: dict[float, LossDistribution] = {}

    def dropped(shift: float) -> float:
        offset = centre + shift * step
        points = offset + step * index
        masses = (mass_p, mass_q) if recut is None else recut(points)
        mass, loss = _resolved(masses[0][:-1], masses[1][:-1])
        total = _shared(points, mass, loss)
        kept = total > _FAINT
        # a Q-mass below all floats is not none: at a large ε it counts for more than P's
        top = float(masses[0][-1]), 0.0, offset, max(float(masses[1][-1]), sys.float_info.min)
        lost = float(mass.sum()) - float(total.sum())
        by_lost.setdefault(lost, LossDistribution(step, index[kept], total[kept], *top))
        return lost

    enough = max(_UNSEEN / rounds, MASS_ACCURACY) * mass.sum()
    if all(dropped(shift) > enough for shift in _SHIFTS) and recut:
        shift = (by_lost[min(by_lost)].offset - centre) / step
        solve.lowest(dropped, shift - _SHIFTS[1], shift + _SHIFTS[1], width=1e-6)
    best = by_lost[min(by_lost)]
    if not best.index.size:
        raise _beyond_range()
    return best


def _sparse_index(low: int, high: int, dense: int) -> np.ndarray:
    """Indices of points from ``low`` to ``high`` or beyond: all within ``dense`` of 0, then twice
    as far apart with every doubling of the distance.
    """
    reach, above = dense, [np.arange(dense)]
    while reach <= max(high, -low):
        above.append(np.arange(reach, 2 * reach, 2 * reach // dense))
        reach *= 2
    half = np.append(np.concatenate(above), reach)
    index = np.concatenate([-half[:0:-1], half])
    first, last = np.searchsorted(index, low, "right") - 1, np.searchsorted(index, high)
    return index[first : last + 1]


def _resolved(mass_p: np.ndarray, mass_q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P-mass, loss) of the cells whose loss floats can tell, if there are such."""
    kept = (mass_p > _FAINT) & (mass_q > _FAINT)
    if not kept.any():
        raise _beyond_range()
    return mass_p[kept], np.log(mass_p[kept]) - np.log(mass_q[kept])


def _shared(points: np.ndarray, mass_p: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """P-mass at each point; cells whose loss is beyond the outer ones are left out."""
    size, inside = points.size, (loss >= points[0]) & (loss < points[-1])
    mass_p, loss = mass_p[inside], loss[inside]
    place = np.searchsorted(points, loss, side="right") - 1
    mass = np.bincount(place, mass_p, size)
    excess = np.bincount(place, mass_p * -np.expm1(points[place] - loss), size)
    with np.errstate(over="ignore"):
        deficit = np.bincount(place, mass_p * np.expm1(points[place + 1] - loss), size)
    share = upward(np.maximum(excess, 0.0), np.maximum(deficit, 0.0), int(np.argmax(mass)))
    total = (1 - share) * (mass - excess)
    with np.errstate(invalid="ignore"):
        total[1:] += share[:-1] * (mass + deficit)[:-1]
    # where a spacing is beyond floats its mass is dropped, which only takes away
    return np.nan_to_num(total, nan=0.0, posinf=0.0)


def _beyond_range() -> _check.FailureError:
    return _check.FailureError("all losses of a round are beyond numerical range; use more noise")


def _balanced_loss(step: float, mass: np.ndarray, loss: np.ndarray) -> float:
    """The grid point at which the likeliest losses, up to a spacing away, balance.

    A grid through it keeps them at one point: what is above covers what is below.
    """
    rounded = np.round(loss / step).astype(np.int64)
    lowest = rounded.min()
    centre = float(lowest + np.argmax(np.bincount(rounded - lowest, mass))) * step
    for _ in range(20):
        close = np.abs(loss - centre) < step
        centre = -math.log(np.average(np.exp(-loss[close]), weights=mass[close]))
    return centre


def upward(excess: np.ndarray, deficit: np.ndarray, mode: int) -> np.ndarray:
    """Share of each interval's mass that goes to its upper grid point, shape (N,).

    At point k the excess (1 - α_k) e_k from above must cover the deficit α_{k-1} d_{k-1} from
    below. Equality is a recursion that is stable towards the mode, from either side.
    """
    above, below = excess[1:], deficit[:-1]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        # the share of an interval's deficit that the next one's excess covers, and its inverse
        room = np.where(below > 0, np.minimum(above / below, 1e300), 0.0)
        demand = np.where(above > 0, np.minimum(below / above, 1e300), 0.0)
    limits = np.append(np.where(below > 0, np.minimum(room, 1.0), 1.0), 1.0)
    end = mode + 1
    forward = _clipped((excess[:end] > 0) * 1.0, np.insert(demand[:mode], 0, 0.0), limits[:end])
    back = room[mode:][::-1]
    backward = np.append(_clipped(back, back, np.ones(back.size))[::-1], 0.0)
    share = np.concatenate([forward[:-1], [min(forward[-1], backward[0])], backward[1:]])
    # a smaller share only leaves more room before it, so that what a start was off by is mended at
    # once; 1 - share is known to its rounding, far below the masses' own
    covered = np.where(below > 0, (1 - share[1:] + 1e-15) * room, 1.0)
    share[:-1] = np.minimum(share[:-1], covered)
    return share


def _clipped(constant: np.ndarray, factor: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """x_k = c_k - f_k x_{k-1}, cut to [0, m_k], from x_{-1} = 0; all of shape (N,), f_k >= 0."""
    x, result = 0.0, []
    for c, f, m in zip(constant.tolist(), factor.tolist(), limits.tolist(), strict=True):
        x = c - f * x
        x = 0.0 if x < 0 else min(x, m)
        result.append(x)
    return np.array(result)


def from_atoms(
    step: float,
    loss: np.ndarray,
    mass: np.ndarray,
    infinite: float = 0.0,
    reverse_infinite: float = 0.0,
) -> LossDistribution:
    """The grid version of a discrete pair with P-mass ``mass`` at ``loss``, shapes (N,).

    Args:
      step: spacing of the grid of losses.
      loss: finite losses log P/Q, shape (N,), in any order.
      mass: their P-mass, shape (N,).
      infinite: P-mass of the loss +∞.
      reverse_infinite: Q-mass of the loss −∞, which the other direction needs.
    """
    position = loss / step
    below = np.floor(position)
    above_lower = (position - below) * step
    share = np.expm1(-above_lower) / math.expm1(-step)  # of the P-mass, to the upper grid point
    lower = below.astype(np.int64)
    # only the points that have mass, however many there are between
    index, place = np.unique(np.concatenate([lower, lower + 1]), return_inverse=True)
    total = np.bincount(place, np.concatenate([mass * (1 - share), mass * share]))
    kept = total > _FAINT
    infinite += float(total[~kept].sum())
    # what floats cannot carry of P may carry much of Q: an infinite loss of the other direction
    faint = ~kept & (total > 0)
    reverse_infinite += float(np.exp(np.log(total[faint]) - step * index[faint]).sum())
    return LossDistribution(step, index[kept], total[kept], infinite, reverse_infinite)


def normal_masses(borders: np.ndarray) -> np.ndarray:
    """Standard normal probability of consecutive intervals, accurate in both tails."""
    from_below = scipy.special.ndtr(-np.abs(borders))
    result: np.ndarray = np.abs(np.diff(from_below))
    inside = np.flatnonzero((borders[:-1] < 0) & (borders[1:] > 0))
    result[inside] = 1 - from_below[inside] - from_below[inside + 1]
    return result
