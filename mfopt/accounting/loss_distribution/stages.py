"""Composition in two stages: blocks of rounds on a fine grid, then the blocks on a coarse one.

Rounds by the million lose little each, and a grid that is fine against that has millions of points
over the window of their sum. But the sum of a block of them needs the fine grid over its own
narrow window only; cut down to a coarse grid it adds the grid's variance once a block, not once a
round (evolving discretization: Ghazi, Kamath, Kumar, Manurangsi 2022, here under one exponential
tilt and with rounding that is counted).

A round that is small but for rare large losses has a block as wide as those. It is dominated by
two that are independent: one that always gives a small loss, drawn as if it were one, and one that
says whether the round is large, and what it is then. Forgetting the small draws of large rounds
gives back the round, so nothing is lost but these draws, which are few. The first is composed in
blocks, the second needs the coarse grid only.

Errors: the law of a block, tilted and of sum 1, is known up to its own rounding and to the mass
e^-32 that its window leaves out at either end. In the l1 norm of the tilted law of all blocks it
counts once for each of them; :class:`.ComposedLosses` turns that norm into one of δ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from mfopt.accounting.loss_distribution import distribution
from mfopt.accounting.loss_distribution.convolution import ComposedLosses, Composition
from mfopt.accounting.loss_distribution.distribution import MASS_ACCURACY, LossDistribution
from mfopt.accounting.loss_distribution.tilting import LOG_WINDOW_TAIL, log_sum_exp
from mfopt.errors import FailureError

_CELLS = 1 << 13  # of a round's small losses
_UNSEEN = 1e-8  # share of all outcomes that may be dropped without showing in a lower bound


@dataclasses.dataclass(frozen=True)
class Stages:
    """Composition of rounds in two stages.

    Attributes:
      fine: spacing of the grid of losses within a block.
      ratio: spacing of the coarse grid over it.
      block: rounds of a block.
      small: size of the losses that are composed in blocks; infinite for all of them.
    """

    fine: float
    ratio: int
    block: int
    small: float = math.inf

    @property
    def coarse(self) -> float:
        """Spacing of the grid of the sum of all."""
        return self.fine * self.ratio

    def compose(
        self, part: LossDistribution, rounds: int, tilt: float, *, extended: bool = False
    ) -> ComposedLosses:
        """Upper bounds for the composition of ``rounds`` rounds.

        Args:
          part: a round, on the fine grid.
          rounds, tilt: how many, and θ.
          extended: as for :meth:`.Composition.convolve`.
        """
        rare: tuple[tuple[LossDistribution, int], ...] = ()
        if math.isfinite(self.small):
            # on the grid a small loss is at a point next to it, which may be larger
            part, large = divided(part, self.small + self.fine, self.coarse)
            rare = ((large, rounds),)
        blocks = self._blocks(part, rounds, tilt, coarser, extended)
        return Composition((*blocks, *rare)).convolve(tilt, extended=extended)

    def compose_below(
        self, cells: Cells, rounds: int, tilt: float, *, extended: bool = False
    ) -> ComposedLosses:
        """Lower bounds for many rounds.

        Where rounds are divided: but for a chance that is taken away, no more than ``spared`` of
        them have a large loss, and the small losses of all others are as many as are counted here.

        Args:
          cells: of a round.
          rounds, tilt: how many, and θ.
          extended: as for :meth:`.Composition.convolve`.
        """
        rare: tuple[tuple[RoundsBlock, int], ...] = ()
        scale, spared = 0.0, 0
        if math.isfinite(self.small):
            cells, far, log_large, scale = cells.divided(self.small, tilt)
            spared = _most(rounds * math.exp(log_large))
            if spared > rounds // 2:
                raise FailureError(f"{spared} of {rounds} rounds may have a large loss")
            scale *= rounds
            rare = ((_rare(far.on(self.coarse), rounds), rounds),)
        fine_part = cells.balanced(self.fine, rounds - spared).on(self.fine)
        blocks = self._blocks(fine_part, rounds - spared, tilt, coarser_below, extended)
        whole = Composition((*blocks, *rare))
        # what may be off is so by the measure of the law before it was cut down to a coarse grid
        scale += Composition(((fine_part, rounds - spared),)).log_moment(tilt)
        growth = math.exp(min(max(scale - whole.log_moment(tilt), 0.0), 100.0))
        parts = [
            (dataclasses.replace(part, rounding=growth * part.rounding), count)
            for part, count in whole.parts
        ]
        return Composition(tuple(parts)).convolve(tilt, extended=extended)

    @property
    def steps(self) -> Steps:
        """Spacings of the cells of a round."""
        # where a round's losses are at few points of the grid, it matters what lies between them
        parts = min(max(_CELLS * self.fine / (2 * self.small), 1), 8)
        return Steps(self.fine / math.floor(parts), self.coarse, self.small)

    def _blocks(
        self,
        part: LossDistribution,
        rounds: int,
        tilt: float,
        coarser: Callable[[ComposedLosses, int], RoundsBlock],
        extended: bool,
    ) -> tuple[tuple[RoundsBlock, int], ...]:
        blocks, remainder = divmod(rounds, self.block)
        parts: list[tuple[RoundsBlock, int]] = []
        for length, count in ((self.block, blocks), (remainder, 1)):
            if length:
                whole = Composition(((part, length),))
                parts.append((coarser(whole.convolve(tilt, extended=extended), self.ratio), count))
        return tuple(parts)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Spacings of the losses at which the cells of a round end.

    Attributes:
      fine: spacing of the losses at the ends.
      coarse: the same where the loss is larger than ``small``, either way.
      small: see there.
    """

    fine: float
    coarse: float = math.inf
    small: float = math.inf

    def points(self, lowest: float, highest: float, centre: float) -> np.ndarray:
        """The losses from ``least`` to ``most``, one of them ``centre``."""
        low, high = max(lowest, -self.small), min(highest, self.small)
        fine_points = centre + _multiples(self.fine, low - centre, high - centre)
        if math.isinf(self.small):
            return fine_points
        far = _multiples(self.coarse, lowest, highest)
        return np.sort(np.concatenate([fine_points, far[np.abs(far) > self.small]]))


def _multiples(step: float, lowest: float, highest: float) -> np.ndarray:
    return step * np.arange(math.ceil(lowest / step), math.floor(highest / step) + 1)


@dataclasses.dataclass(frozen=True)
class Cells:
    """A pair of distributions by cells: to tell only the cell is post-processing.

    Attributes:
      mass_p, mass_q: shape (J,), P- and Q-mass; the last cell is kept apart.
      centre: a loss that is to be a point of the grid.
    """

    mass_p: np.ndarray
    mass_q: np.ndarray
    centre: float

    def on(self, step: float) -> LossDistribution:
        """Discrete pair on a grid of ``step`` that this one dominates; see :func:`.from_below`."""
        return distribution.from_below(step, self.mass_p, self.mass_q, self.centre)

    def balanced(self, step: float, rounds: int) -> Cells:
        """The cells with a ``centre`` such that ``rounds`` compositions lose little to the grid."""
        enough = _UNSEEN / rounds
        centre = distribution.balanced_grid(step, self.mass_p, self.mass_q, self.centre, enough)
        return dataclasses.replace(self, centre=centre)

    def divided(self, small: float, tilt: float) -> tuple[Cells, Cells, float, float]:
        """Split by loss: (small, large, log of the chance of a large one, log E e^{θ loss}).

        The chance is the larger of that of the law and that of the tilted law. The cell that is
        kept apart is so with the others.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            log_p, log_q = np.log(self.mass_p[:-1]), np.log(self.mass_q[:-1])
            loss = log_p - log_q
        is_small = np.abs(loss) <= small
        far = ~is_small & np.isfinite(loss)
        mass_p, mass_q = (
            float(self.mass_p[:-1][is_small].sum()),
            float(self.mass_q[:-1][is_small].sum()),
        )
        log_ratio = math.log(mass_p) - math.log(mass_q)
        bulk = Cells(
            np.append(self.mass_p[:-1][is_small] / mass_p, 0.0),
            np.append(self.mass_q[:-1][is_small] / mass_q, 0.0),
            self.centre - log_ratio,
        )
        large = Cells(
            np.concatenate([self.mass_p[:-1][far], [mass_p, self.mass_p[-1]]]),
            np.concatenate([self.mass_q[:-1][far], [mass_q, self.mass_q[-1]]]),
            log_ratio,
        )
        weights = np.append(log_p[far] + tilt * loss[far], math.log(mass_p) + tilt * log_ratio)
        whole = log_sum_exp(weights)
        log_large = log_sum_exp(weights[:-1]) - whole if np.any(far) else -690.0
        log_large = max(log_large, math.log(max(1 - mass_p, 1e-300)))
        return bulk, large, log_large, whole


def _rare(large: LossDistribution, rounds: int) -> RoundsBlock:
    """Large losses of all rounds, less the outcomes in which there are too many."""
    return RoundsBlock(
        large.step,
        large.index,
        large.log_mass,
        large.offset,
        large.infinite * (1 - 1e-12),
        2 * math.exp(-LOG_WINDOW_TAIL) / rounds,
        MASS_ACCURACY,
        large.infinite_q,
    )


def _most(mean: float) -> int:
    """A number that a sum of independent events, ``mean`` on average, is above at most e^-32."""
    limit = mean + 1
    while limit * math.log(limit / mean) - limit + mean < LOG_WINDOW_TAIL:
        limit = 1.1 * limit + 1
    return math.ceil(limit)


@dataclasses.dataclass(frozen=True)
class RoundsBlock:
    """The discrete pair of a block of rounds, by its loss; as :class:`.LossDistribution`.

    Attributes:
      step, offset: of the grid of losses, ``offset + step * index``.
      index, log_mass: shape (N,), increasing, and log of the P-mass.
      infinite: P-mass of infinite loss.
      rounding: what the law, tilted and of sum 1, may be away from the truth in l1 norm.
      allowance: relative accuracy of the masses.
    """

    step: float
    index: np.ndarray
    log_mass: np.ndarray
    offset: float
    infinite: float
    rounding: float
    allowance: float
    infinite_q: float = 0.0

    @property
    def losses(self) -> np.ndarray:
        """Loss of each atom, shape (N,)."""
        return self.offset + self.step * self.index


def coarser(composed: ComposedLosses, ratio: int) -> RoundsBlock:
    """A block on a grid of ``ratio`` times the spacing that dominates ``composed``.

    Mass between two points is split over them so that its P- and its Q-mass stay what they are.
    """
    step, tilt = composed.step, composed.tilt
    start = composed.start // ratio
    offset_points = composed.start - start * ratio
    size = -(-(offset_points + composed.law.size) // ratio)
    law = np.zeros((size, ratio))
    law.ravel()[offset_points : offset_points + composed.law.size] = composed.law
    above = step * np.arange(ratio)
    up = np.expm1(-above) / math.expm1(-ratio * step)
    # of the tilted law: e^{θ y} moves with the point
    down, up = (1 - up) * np.exp(-tilt * above), up * np.exp(tilt * (ratio * step - above))
    total = np.zeros(size + 1)
    total[:-1] = np.einsum("ij,j->i", law, down)
    total[1:] += np.einsum("ij,j->i", law, up)
    kept = np.flatnonzero(total > 0)
    index = start + kept
    loss = composed.offset + ratio * step * index
    return RoundsBlock(
        ratio * step,
        index,
        np.log(total[kept]) + composed.log_scale - tilt * loss,
        composed.offset,
        composed.infinite,
        float(np.max(down + up)) * (composed.rounding + 2 * math.exp(-LOG_WINDOW_TAIL)),
        composed.allowance + MASS_ACCURACY,
    )


def coarser_below(composed: ComposedLosses, ratio: int) -> RoundsBlock:
    """A block on a grid of ``ratio`` times the spacing that ``composed`` dominates."""
    coarse = ratio * composed.step
    loss = composed.low + composed.step * np.arange(composed.law.size)
    with np.errstate(under="ignore", divide="ignore"):
        mass_p = np.exp(np.log(composed.law) + composed.log_scale - composed.tilt * loss)
        mass_q = mass_p * np.exp(-loss)
    centre = distribution.balanced_loss(coarse, mass_p, mass_q)
    part = distribution.from_below(coarse, np.append(mass_p, 0.0), np.append(mass_q, 0.0), centre)
    return RoundsBlock(
        coarse,
        part.index,
        part.log_mass,
        centre,
        composed.infinite,
        composed.rounding + 2 * math.exp(-LOG_WINDOW_TAIL),
        composed.allowance + MASS_ACCURACY,
        composed.infinite_q,
    )


def divided(
    part: LossDistribution, small: float, coarse: float
) -> tuple[LossDistribution, LossDistribution]:
    """Two independent pairs that together dominate ``part``: its small losses, and all others.

    The first is ``part`` on condition that its loss is no larger than ``small`` either way. The
    second tells whether it is, and else the loss; it is on a grid of spacing ``coarse``.
    """
    losses = part.losses
    is_small = np.abs(losses) <= small
    mass_p = float(part.mass[is_small].sum())
    mass_q = float((part.mass[is_small] * np.exp(-losses[is_small])).sum())
    # of the event that the loss is small; the pair that is given it has as much less
    log_ratio = math.log(mass_p) - math.log(mass_q)
    bulk = dataclasses.replace(
        part,
        index=part.index[is_small],
        mass=part.mass[is_small] / mass_p,
        infinite=0.0,
        reverse_infinite=0.0,
        offset=part.offset - log_ratio,
    )
    large = distribution.from_atoms(
        coarse,
        np.append(losses[~is_small] - log_ratio, 0.0),
        np.append(part.mass[~is_small], mass_p),
        part.infinite,
        part.reverse_infinite,
    )
    return bulk, dataclasses.replace(large, offset=log_ratio)
