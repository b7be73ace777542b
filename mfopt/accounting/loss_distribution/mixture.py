"""Mixture-of-Gaussians rounds: a Gaussian release whose sensitivity is random.

One round is the pair P = Σ_i w_i N(s_i, σ²), Q = N(0, σ²) with sensitivities s_i >= 0
(Choquette-Choo, Ganesh, Steinke, Thakurta 2023; Ganesh 2024, Definition 2.8). Poisson sampling
of one unit has s in {0, 1}, of a group of K a Binomial(K, p), a fixed batch twice a
hypergeometric variable. The loss log P/Q is increasing in x, so cells of x are cells of loss.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
import scipy

from mfopt._runtime import _sizes
from mfopt.accounting import solve
from mfopt.accounting.loss_distribution import distribution
from mfopt.accounting.loss_distribution.distribution import MASS_ACCURACY, LossDistribution
from mfopt.errors import FailureError

Nodes = tuple[np.ndarray, np.ndarray, np.ndarray]  # loss, log Q-mass and slope, each (N,)

_MOST_CELLS = 1_000_000
_FEW = 4  # sensitivities that are added up one after the other
_BLOCK = 1 << 17  # numbers that are processed together
_NODES = 0.05  # spacing of the nodes of x for planning, in noise standard deviations


class Resolution(NamedTuple):
    """Width and extent of the cells that a round is cut into.

    Attributes:
      spacing: width of the cells of x, in noise standard deviations.
      log_tail: log of the probability that each truncation may leave out; in an upper bound it
        goes to an infinite loss.
      ends: the smallest and the largest loss that are resolved: those beyond are split over the
        losses there and the extremes.
    """

    spacing: float
    log_tail: float
    ends: tuple[float, float] = (-math.inf, math.inf)


def _counts(group_size: int) -> np.ndarray:
    """0 .. group_size, where there is memory for arrays of that length."""
    if group_size > 10**6:
        _sizes.require("group_size", group_size, lambda size: 100.0 * size)
    return np.arange(group_size + 1)


def _log_weights(log_ratios: np.ndarray) -> np.ndarray:
    """log of weights of sum 1, from the log of each over the one before, which must be decreasing.

    A difference of log factorials loses as many digits as they are large: weights of a batch of
    10⁷ from 10¹⁰ added up to 1 - 7e-6. Ratios are short products, summed away from the likeliest.
    """
    mode = int(np.count_nonzero(log_ratios > 0))
    below = np.cumsum(-log_ratios[:mode][::-1])[::-1]
    above = np.cumsum(log_ratios[mode:])
    result: np.ndarray = np.concatenate([below, [0.0], above])
    return result - math.log1p(math.fsum(np.exp(below)) + math.fsum(np.exp(above)))


class Round(abc.ABC):
    """One round of a composition: :class:`Mixture`, or another dominating pair.

    Compared by content, so that what was planned for one is found again. ``plural`` are such
    rounds, in words.
    """

    plural: ClassVar[str] = "such rounds"

    @property
    def trivial(self) -> bool:
        """True if nothing is released."""
        return False

    @property
    def log_none(self) -> float:
        """The least loss, -inf where there is none."""
        return -math.inf

    @property
    @abc.abstractmethod
    def largest(self) -> float:
        """Largest shift of a round, in clip norms, given the sampled batch."""

    @property
    @abc.abstractmethod
    def components(self) -> int:
        """Number of Gaussians in a round; 1 for a Gaussian release."""

    @property
    @abc.abstractmethod
    def mean(self) -> float:
        """Approximate shift of a round, in clip norms: start of searches."""

    @property
    @abc.abstractmethod
    def log_chance(self) -> float:
        """log of the probability that a round moves at all."""

    def log_square(self, noise_multiplier: float) -> float:
        """Upper bound of log(1 + χ²(P, Q)); infinite where none is known."""
        return math.inf

    def linear(self, noise_multiplier: float) -> tuple[float, float] | None:
        """(variance of the part of P/Q - 1 that is linear in the noise, upper bound of what χ² is
        above it), for :meth:`.NearlyLinear.of`; None where that is not known.
        """
        return None

    @abc.abstractmethod
    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        """(loss, log Q-mass, slope of the loss in z) at nodes, losses increasing; for planning."""

    @abc.abstractmethod
    def discretize(
        self, noise_multiplier: float, step: float, resolution: Resolution
    ) -> LossDistribution:
        """A pair that dominates the round on a grid of ``step``, by cells of x; σ in clip norms."""

    def discretize_below(
        self,
        noise_multiplier: float,
        step: float,
        resolution: Resolution,
        *,
        add: bool,
        rounds: int,
    ) -> LossDistribution:
        """A pair on a grid that the round dominates, for lower bounds in one direction.

        Args:
          noise_multiplier, step, resolution: as for :meth:`discretize`.
          add: whether the direction is that of adding a unit.
          rounds: compositions that are to lose little.

        Raises:
          FailureError: no lower bound is known.
        """
        raise FailureError(f"no lower bound is known for {self.plural}")


@dataclasses.dataclass(frozen=True, eq=False)
class Mixture(Round):
    """Sensitivities of one round and their probabilities.

    Attributes:
      sensitivities: shape (m,), >= 0, increasing, in units of the clip norm.
      log_weights: shape (m,), log probabilities.
      missing: probability of what is left out, which counts as an infinite loss.

    Raises:
      FailureError: the probabilities and ``missing`` do not add up to 1.
    """

    sensitivities: np.ndarray
    log_weights: np.ndarray
    missing: float = 0.0

    def __post_init__(self) -> None:
        total = math.fsum(np.exp(self.log_weights)) + self.missing
        # the composition counts so much a round, and nothing counts more
        if not abs(total - 1) <= MASS_ACCURACY:
            raise FailureError(f"the weights of a mixture add up to 1 {total - 1:+.3g}")

    @classmethod
    def binomial(cls, group_size: int, probability: float) -> Mixture:
        """Number of a group's units in a Poisson-sampled batch (Ganesh 2024, Theorem 3.1)."""
        if group_size == 1 or probability in (0, 1):
            with np.errstate(divide="ignore"):
                log_weights = np.array([np.log1p(-probability), np.log(probability)])
            return cls._kept(np.array([0, group_size]), log_weights)
        count = _counts(group_size)
        ratios = np.log((group_size - count[:-1]) / count[1:])
        log_odds = math.log(probability) - math.log1p(-probability)
        return cls._kept(count, _log_weights(ratios + log_odds))

    @classmethod
    def hypergeometric(cls, group_size: int, batch_size: int, population: int) -> Mixture:
        """Number of the group's units in a fixed batch (Ganesh 2024, Theorem 3.3).

        ``population`` counts the data set that contains the group.
        """
        spare = population - batch_size - group_size
        count = _counts(min(group_size, batch_size))[max(-spare, 0) :].astype(np.float64)
        counts, above = count[:-1], count[1:]
        ratios = (group_size - counts) / above * ((batch_size - counts) / (spare + above))
        return cls._kept(count, _log_weights(np.log(ratios)))

    @classmethod
    def _kept(cls, sensitivities: np.ndarray, log_weights: np.ndarray) -> Mixture:
        kept = log_weights > -math.inf
        return cls(sensitivities[kept].astype(np.float64), log_weights[kept])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixture) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @functools.cached_property
    def _content(self) -> tuple[bytes, bytes, float]:
        return self.sensitivities.tobytes(), self.log_weights.tobytes(), self.missing

    @property
    def trivial(self) -> bool:
        return bool(np.all(self.sensitivities == 0))

    @property
    def components(self) -> int:
        return int(self.sensitivities.size)

    @property
    def largest(self) -> float:
        return float(self.sensitivities[-1])

    @property
    def mean(self) -> float:
        return float(np.exp(self.log_weights) @ self.sensitivities)

    @property
    def log_none(self) -> float:
        """log of the probability that the sensitivity is 0: the least loss."""
        return float(self.log_weights[0]) if self.sensitivities[0] == 0 else -math.inf

    def linear(self, noise_multiplier: float) -> tuple[float, float] | None:
        """See :meth:`.Round.linear`: e^y - 1 - y <= y²/2 e^y for y = s_i s_j / σ²."""
        if self.missing > 0 or not self.largest < noise_multiplier:
            return None
        weights, shift = np.exp(self.log_weights), self.sensitivities / noise_multiplier
        steepest = math.exp((self.largest / noise_multiplier) ** 2)
        return float(weights @ shift) ** 2, float(weights @ shift**2) ** 2 / 2 * steepest

    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        cut = self.cut(log_tail)
        low, high = cut.ends(noise_multiplier, log_tail)
        z = np.linspace(low, high, max(64, min(math.ceil((high - low) / _NODES), 1 << 16)))
        loss = cut.loss(z, noise_multiplier)
        normal = -0.5 * z * z - 0.5 * math.log(2 * math.pi) + math.log((high - low) / (z.size - 1))
        return loss, normal, np.gradient(loss, z)

    @property
    def log_chance(self) -> float:
        above = self.log_weights[self.sensitivities > 0]
        return min(float(scipy.special.logsumexp(above)), 0.0) if above.size else -math.inf

    def cut(self, log_tail: float) -> Mixture:
        """Without the least likely sensitivities, of total probability at most e^log_tail."""
        order = np.argsort(self.log_weights)
        cumulative = np.logaddexp.accumulate(self.log_weights[order])
        dropped = int(np.searchsorted(cumulative, log_tail, side="right"))
        kept = np.sort(order[dropped:])
        lost = math.exp(cumulative[dropped - 1]) if dropped else 0.0
        return Mixture(self.sensitivities[kept], self.log_weights[kept], self.missing + lost)

    def loss(self, z: np.ndarray, noise_multiplier: float) -> np.ndarray:
        """log P/Q at x = σ z, shape of ``z``."""
        shift = (self.sensitivities / noise_multiplier)[:, None]
        at_zero = self.log_weights[:, None] - 0.5 * shift * shift
        if shift.size <= _FEW or z.size == 1:
            return np.logaddexp.reduce(at_zero + shift * z, axis=0)
        result = np.empty(z.shape)
        length = max(_BLOCK // shift.size, 1)
        for start in range(0, z.size, length):
            exponents = at_zero + shift * z[start : start + length]
            peak_index = exponents.argmax(axis=0)[None]
            peaks = np.take_along_axis(exponents, peak_index, 0)
            exponents -= peaks
            # the peak counts as 1 in log1p: losses are far below 1 where sampling is rare
            np.put_along_axis(exponents, peak_index, -np.inf, 0)
            np.exp(exponents, out=exponents)
            result[start : start + length] = peaks[0] + np.log1p(exponents.sum(axis=0))
        return result

    def ends(self, noise_multiplier: float, log_tail: float) -> tuple[float, float]:
        """z beyond which neither Q nor any component of P has more than e^log_tail of mass."""
        shift = self.sensitivities / noise_multiplier
        tails = scipy.special.ndtri_exp(np.minimum(log_tail - self.log_weights, -1e-9))
        return float(scipy.special.ndtri_exp(log_tail)), float(np.max(shift - tails))

    def discretize(
        self, noise_multiplier: float, step: float, resolution: Resolution
    ) -> LossDistribution:
        mixture = self.cut(resolution.log_tail)
        borders = mixture.borders(noise_multiplier, resolution)
        mass_p, mass_q = mixture.masses(noise_multiplier, borders)
        finite = mixture.loss(borders[1:-1], noise_multiplier)
        # loss at x = -∞: log P(s = 0), the mixture's other components vanish there. Far below the
        # last border it would be a rare large loss of the other direction, where that has its
        # saddle point; as an infinite loss it only has its mass.
        at_zero = mixture.log_weights[mixture.sensitivities == 0]
        lowest = float(at_zero[0]) if at_zero.size else -math.inf
        if lowest < finite[0] - step:
            lowest = -math.inf
        loss = np.concatenate([[lowest], np.maximum(finite, lowest), [math.inf]])
        mass_p[-1] += mixture.missing
        return distribution.from_cells(step, loss, mass_p, mass_q)

    def discretize_below(
        self,
        noise_multiplier: float,
        step: float,
        resolution: Resolution,
        *,
        add: bool,
        rounds: int,
    ) -> LossDistribution:
        mixture = self.cut(2 * resolution.log_tail)
        z = mixture.borders(noise_multiplier, resolution)
        loss = mixture.loss(z[1:-1], noise_multiplier)

        def cells(borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            mass_p, mass_q = mixture.masses(noise_multiplier, borders)
            mass_p[0] += mixture.missing * add  # no less under the law that loses from them
            return (mass_q[::-1], mass_p[::-1]) if add else (mass_p, mass_q)

        def recut(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            inner = np.interp(-points[::-1] if add else points, loss, z[1:-1])
            return cells(np.concatenate([[-math.inf], np.unique(inner), [math.inf]]))

        return distribution.from_below(step, *cells(z), rounds, recut)

    def borders(self, noise_multiplier: float, resolution: Resolution) -> np.ndarray:
        """Borders of cells of z, shape (J + 1,), the first and the last infinite."""
        low, high = self.ends(noise_multiplier, resolution.log_tail)

        def loss(z: float) -> float:
            return float(self.loss(np.array([z]), noise_multiplier)[0])

        start = reach(loss, low, high, resolution.ends[0])
        low, high = start, max(reach(loss, low, high, resolution.ends[1]), start + 1e-9)
        # more cells than this would cost more than the accuracy is worth; the result stays a bound
        spacing = max(resolution.spacing, (high - low) / _MOST_CELLS)
        z = high - spacing * np.arange(math.ceil((high - low) / spacing), -1, -1.0)
        return np.concatenate([[-math.inf], z, [math.inf]])

    def masses(self, noise_multiplier: float, borders: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P- and Q-mass of the cells between ``borders`` of z."""
        mass_q = distribution.normal_masses(borders)
        mass_p = np.zeros_like(mass_q)
        shift = self.sensitivities / noise_multiplier
        for s, log_weight in zip(shift, self.log_weights, strict=True):
            mass_p += math.exp(log_weight) * distribution.normal_masses(borders - s)
        return mass_p, mass_q


def reach(loss: Callable[[float], float], low: float, high: float, target: float) -> float:
    """The z from ``low`` to ``high`` at which an increasing loss comes to ``target``, or an end.

    Args:
      loss: of z.
      low, high: where to look.
      target: the loss that is sought.
    """
    if loss(low) >= target:
        return low
    if loss(high) <= target:
        return high
    return solve.halved(lambda z: loss(z) < target, low, high)[1]
