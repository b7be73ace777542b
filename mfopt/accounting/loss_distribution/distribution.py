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

import numpy as np
import scipy

from mfopt._runtime import _check

LARGEST_WINDOW = 1 << 23
MASS_ACCURACY = 1e-13  # relative, of one round; counted once a round on the private side
# Masses below this are no longer accurate (close to the smallest normal float).
_FAINT = 1e-290
_UNSEEN = 1e-8  # share of all outcomes that may be dropped without showing in a lower bound
_SHIFTS = (1e-3, 1 / 64, 1 / 8, 7 / 16)  # of a grid, at which it is tried
_MENDED = 0.1  # share of what was dropped at first that is worth no more search
_LARGE = 1e4  # the largest factor in a recursion's composed steps
# the steepest map that is composed with as many steps as this: no product is above 1e232
_STEEP, _UNSCALED = 1e100, 32


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
    step: float, mass_p: np.ndarray, mass_q: np.ndarray, offset: float = 0.0, rounds: int = 1
) -> LossDistribution:
    """A discrete pair on the grid that (P, Q) dominates: the other end of the bracket.

    To tell only the cell of an outcome is post-processing. Cells between two grid points are then
    shared out to the two so that what lands on a point from above balances what lands there from
    below: its ratio of masses is the point's. Where that cannot be done exactly, P-mass is
    dropped, which again only takes away. The last cell is kept apart: outcomes with a round in it
    are all taken as evidence for P, as if the loss were infinite, but for the Q-mass they have.

    Args:
      step: grid spacing.
      mass_p, mass_q: shape (J,), P- and Q-mass of the cells.
      offset: a point of the grid, or of one that loses more to it.
      rounds: compositions that are to lose little.
    """
    # a Q-mass below all floats is not none: at a large ε it counts for more than P's
    top_p, top_q = float(mass_p[-1]), max(float(mass_q[-1]), sys.float_info.min)
    offset = _balanced_grid(step, mass_p, mass_q, offset, _UNSEEN / rounds)
    mass, _, loss = _known(mass_p[:-1], mass_q[:-1])
    start, total, _ = _shared(step, mass, loss, offset)
    kept = np.flatnonzero(total > _FAINT)
    if not kept.size:
        raise _beyond_range()
    return LossDistribution(step, kept + start, total[kept], top_p, 0.0, offset, top_q)


def _balanced_grid(
    step: float, mass_p: np.ndarray, mass_q: np.ndarray, offset: float, enough: float = 0.0
) -> float:
    """A point of the grid, for :func:`from_below`, with which next to no P-mass is dropped.

    What :func:`balanced_loss` gives is good where the losses are at few points of the grid, and
    any point where they are at very many. What is dropped changes its sign with the shift of the
    grid here, as it is in want of what is above the likeliest point or of what is below.

    Args:
      step, mass_p, mass_q: as for :func:`from_below`.
      offset: where to begin.
      enough: share of the P-mass that may be dropped without a search for a better point.
    """
    mass, _, loss = _known(mass_p[:-1], mass_q[:-1])
    whole = float(mass.sum())
    enough = max(enough, MASS_ACCURACY)

    @functools.cache
    def dropped(shift: float) -> float:
        _, total, imbalance = _shared(step, mass, loss, offset + shift * step)
        lost = whole - float(total.sum())
        return math.copysign(lost, imbalance) if lost > enough * whole else 0.0

    tried = [0.0]
    # it mostly grows with the shift, and jumps where a cell passes a point
    side = -1.0 if dropped(0.0) > 0 else 1.0
    for direction in (side, -side):
        inner = 0.0
        for outer in _SHIFTS:
            if min(abs(dropped(shift)) for shift in tried) <= _MENDED * abs(dropped(0.0)):
                break
            tried.append(direction * outer)
            if dropped(inner) * dropped(direction * outer) < 0:
                ends = sorted((inner, direction * outer))
                # about where it changes its sign, in few evaluations
                root, _ = scipy.optimize.brentq(
                    dropped, *ends, xtol=1e-7, maxiter=12, full_output=True, disp=False
                )
                tried.append(float(root))
            inner = direction * outer
    return offset + step * min(tried, key=lambda shift: abs(dropped(shift)))


def _known(mass_p: np.ndarray, mass_q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(P-mass, Q-mass, loss) of the cells whose loss floats can tell, if there are such."""
    kept = (mass_p > _FAINT) & (mass_q > _FAINT)
    if not kept.any():
        raise _beyond_range()
    mass_p, mass_q = mass_p[kept], mass_q[kept]
    return mass_p, mass_q, np.log(mass_p) - np.log(mass_q)


def _shared(
    step: float, mass_p: np.ndarray, loss: np.ndarray, offset: float
) -> tuple[int, np.ndarray, float]:
    """(index of the first point, P-mass at each point, see :func:`upward`)."""
    loss = loss - offset
    index = np.floor(loss / step).astype(np.int64)
    start = int(index.min())
    size = int(index.max()) - start + 2
    if size > LARGEST_WINDOW:
        raise _check.FailureError(f"one round spans {size * step:.3g}, too wide for {step:.3g}")
    place = index - start
    mass = np.bincount(place, mass_p, size)
    excess = np.bincount(place, mass_p * -np.expm1(index * step - loss), size)
    with np.errstate(over="ignore"):
        deficit = np.bincount(place, mass_p * np.expm1((index + 1) * step - loss), size)
    share, imbalance = upward(
        np.maximum(excess, 0.0), np.maximum(deficit, 0.0), int(np.argmax(mass))
    )
    total = (1 - share) * (mass - excess)
    with np.errstate(invalid="ignore"):
        total[1:] += share[:-1] * (mass + deficit)[:-1]
    # where a spacing is beyond floats its mass is dropped, which only takes away
    return start, np.nan_to_num(total, nan=0.0, posinf=0.0), imbalance


def _beyond_range() -> _check.FailureError:
    return _check.FailureError("all losses of a round are beyond numerical range; use more noise")


def balanced_loss(step: float, mass_p: np.ndarray, mass_q: np.ndarray) -> float:
    """The grid point at which the likeliest losses, up to a spacing away, balance.

    A grid through it keeps them at one point: what is above covers what is below.
    """
    mass_p, mass_q, loss = _known(mass_p, mass_q)
    rounded = np.round(loss / step).astype(np.int64)
    lowest = rounded.min()
    centre = float(lowest + np.argmax(np.bincount(rounded - lowest, mass_p))) * step
    for _ in range(20):
        close = np.abs(loss - centre) < step
        centre = float(np.log(mass_p[close].sum()) - np.log(mass_q[close].sum()))
    return centre


def upward(excess: np.ndarray, deficit: np.ndarray, mode: int) -> tuple[np.ndarray, float]:
    """Share of each interval's mass that goes to its upper grid point, shape (N,).

    At point k the excess (1 - α_k) e_k from above must cover the deficit α_{k-1} d_{k-1} from
    below. Equality is a recursion that is stable towards the mode, from either side.
    Also returned is by how much the two recursions differ where they meet.
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
    # without the cuts at the mode: of one sign where some is dropped there, else of the other
    covered_there = 1.0 - (forward[-2] * demand[mode - 1] if mode else 0.0)
    room_there = (1.0 - backward[1]) * room[mode] if mode < room.size else 0.0
    return share, float(covered_there - room_there)


def _clipped(constant: np.ndarray, factor: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """x_k = c_k - f_k x_{k-1}, cut to [0, m_k], from x_{-1} = 0; all of shape (N,), f_k >= 0.

    Such steps compose to others of their kind: an affine map, cut. So blocks of them are composed
    side by side, then followed from block to block, then gone through side by side again.
    """
    # a step of all blocks takes as long to begin as going on through some thirty of them
    steps = max(math.isqrt(constant.size // 32), 4)
    blocks = -(-constant.size // steps)
    short = blocks * steps - constant.size
    c, f, m = (
        np.ascontiguousarray(np.append(part, np.zeros(short)).reshape(blocks, steps).T)
        for part in (constant, factor, limits)
    )
    low, high = np.zeros(blocks), np.ones(blocks)
    offset, slope = np.zeros(blocks), np.ones(blocks)
    # large factors lead to an end of the range in any case
    composed = zip(np.minimum(c, _LARGE), np.minimum(f, _LARGE), m, strict=True)
    for row, (up, factors, top) in enumerate(composed):
        if row % _UNSCALED == 0:
            # many of them overflow; so steep a map, made less steep, is cut where it was
            grown = np.maximum(np.maximum(np.abs(offset), np.abs(slope)) / _STEEP, 1.0)
            offset, slope = offset / grown, slope / grown
        offset, slope = up - factors * offset, -factors * slope
        low, high = (
            np.minimum(np.maximum(up - factors * high, 0.0), top),
            np.minimum(np.maximum(up - factors * low, 0.0), top),
        )
    x, starts = 0.0, []
    for constant_part, factors, bottom, top in zip(
        *(a.tolist() for a in (offset, slope, low, high)), strict=True
    ):
        starts.append(x)
        x = min(max(constant_part + factors * x, bottom), top)
    result, value = np.empty_like(c), np.array(starts)
    for row, (up, factors, top) in enumerate(zip(c, f, m, strict=True)):
        value = np.minimum(np.maximum(up - factors * value, 0.0), top, out=result[row])
    return result.T.ravel()[: constant.size]


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
