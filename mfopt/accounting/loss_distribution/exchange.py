"""Rounds that keep their number of units: a unit's contribution is zeroed out or replaced.

Here both laws of a round are mixtures, and no one pair of data sets is worst at every ε. With q the
chance of the unit, x what it gives, x' what it gives in the other data set (0, or anything), and v
what the batch without the unit has in its place (nothing under Poisson sampling, one more of the
others where the batch's size is fixed), all of norm at most 1 and up to a common shift:

    P = (1-q) N(v) + q N(x),    Q = (1-q) N(v) + q N(x').

Given what is drawn of the others, which is independent of the unit; divergences are convex. For
α >= 1 and any set A of N(x)-measure Φ(u), by the lemma of Neyman and Pearson (σ = 1),

    P(A) - α Q(A) = q N(x)(A) - q α N(x')(A) - (α-1) (1-q) N(v)(A)
                 <= q Φ(u) - q α Φ(u - |x-x'|) - (α-1) (1-q) Φ(u - |x-v|),

which half-spaces attain where x', v and x lie on a line with the largest distances at once. For
α < 1 the same holds with the roles of P and Q, x and x' exchanged. So at every α the larger of two
pairs is the supremum over all data, and where the largest distances are

    |x-x'| = |x'-v| = 1, |x-v| = 2    a fixed batch, the unit zeroed (x' = 0, v = -x, or v = x)
    |x-x'| = |x-v| = |x'-v| = 2       a fixed batch, the unit replaced
    |x-x'| = 2, |x-v| = |x'-v| = 1    Poisson sampling, the unit replaced

Such a supremum is the profile of one pair that dominates all (Zhu, Dong, Wang 2022, Proposition 8),
and what dominates each round dominates adaptive compositions (ibid., Theorem 10): its positive
losses are those of the first pair, its negative ones those of the second, and the rest, as much
under P as under Q, has loss 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import scipy

from mfopt.accounting import solve
from mfopt.accounting.loss_distribution import LossDistribution, distribution
from mfopt.accounting.loss_distribution.mixture import Mixture, Nodes, Resolution, Round, reach

_MOST_CELLS = 500_000
_NODES = 0.05  # spacing of the nodes for planning, in noise standard deviations


@dataclasses.dataclass(frozen=True)
class Pair:
    """P = E_j N(j·with_it), Q = E_j N(j·without), with_it > without; j = 0 and 1 for one unit.

    Its losses are positive and increasing above the midpoint of the two for one unit, above some z
    for groups.

    Attributes:
      chances: of j = 1, 2, …; what is left is of j = 0.
      with_it, without: in clip norms.
    """

    chances: tuple[float, ...]
    with_it: float
    without: float

    @property
    def probability(self) -> float:
        """Chance of j > 0."""
        return min(math.fsum(self.chances), 1.0)

    @functools.cached_property
    def sides(self) -> tuple[Mixture, Mixture]:
        """(P, Q), of which only the weights and the shifts are used: no Q is N(0)."""
        counts = np.arange(len(self.chances) + 1.0)
        with np.errstate(divide="ignore"):
            log_weights = np.log([1 - self.probability, *self.chances])
        return Mixture(self.with_it * counts, log_weights), Mixture(
            self.without * counts, log_weights
        )

    def loss(self, z: np.ndarray, sigma: float) -> np.ndarray:
        """log P/Q at x = σ z, shape of ``z``."""
        top, bottom = (side.loss(z, sigma) for side in self.sides)
        return top - bottom

    def masses(self, borders: np.ndarray, sigma: float) -> tuple[np.ndarray, np.ndarray]:
        """P- and Q-mass of the cells between ``borders`` of z."""
        top, bottom = (side.masses(sigma, borders)[0] for side in self.sides)
        return top, bottom

    def ends(self, sigma: float, log_tail: float, largest: float) -> tuple[float, float]:
        """z where losses begin to be positive, and beyond which little mass or no use is."""

        def loss(z: float) -> float:
            return float(self.loss(np.array([z]), sigma)[0])

        start = 0.5 * (self.with_it + self.without) / sigma
        if len(self.chances) > 1 and loss(start) < 0:
            start = solve.root(loss, start, len(self.chances) * start)
        high = float(-scipy.special.ndtri_exp(log_tail))
        for j, chance in enumerate(self.chances, 1):
            likely = min(log_tail - math.log(max(chance, 1e-300)), -1e-9)
            reached = j * self.with_it / sigma - float(scipy.special.ndtri_exp(likely))
            high = max(high, reached, start + 1e-6)
        high = reach(loss, start, high, largest)
        return start, max(high, start + 1e-9)

    def borders(
        self, sigma: float, spacing: float, log_tail: float, largest: float = math.inf
    ) -> np.ndarray:
        """Borders of the cells with positive losses, the last infinite.

        Args:
          sigma: σ, in clip norms.
          spacing: width of a cell of z.
          log_tail: log of the probability that may lie beyond the last finite border.
          largest: the largest loss that is resolved.
        """
        start, stop = self.ends(sigma, log_tail, largest)
        cells = math.ceil(min((stop - start) / spacing, _MOST_CELLS))
        return np.append(np.linspace(start, stop, cells + 1), math.inf)


@dataclasses.dataclass(frozen=True)
class ReplacementRound(Round):
    """The pair whose profile is the larger of two at every order; see the module's text.

    Attributes:
      remove: where its losses are positive.
      add: of Q against P, where they are negative.
    """

    remove: Pair
    add: Pair

    # with more than one chance: what some data sets of a group attain, no account

    @classmethod
    def zeroed_in_fixed_batch(cls, *chances: float) -> ReplacementRound:
        """One unit's contribution becomes 0, the batch's size stays: the others fill its place."""
        return cls(Pair(chances, 2, 1), Pair(chances, 1, 0))

    @classmethod
    def replaced_in_fixed_batch(cls, *chances: float) -> ReplacementRound:
        """One unit's contribution becomes another, the batch's size stays."""
        return cls(Pair(chances, 2, 0), Pair(chances, 2, 0))

    @classmethod
    def replaced_in_poisson_batch(cls, *chances: float) -> ReplacementRound:
        """One unit's contribution becomes another, drawn independently of the others."""
        return cls(Pair(chances, 1, -1), Pair(chances, 1, -1))

    @property
    def largest(self) -> float:
        pair = self.remove
        return float(len(pair.chances) * (pair.with_it - pair.without))

    @property
    def components(self) -> int:
        # one where the unit always takes part: a Gaussian release
        return 1 if self.remove.probability == 1 else 2

    @property
    def log_chance(self) -> float:
        return math.log(self.remove.probability)

    @property
    def mean(self) -> float:
        return self.remove.probability * self.largest

    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        parts: list[Nodes] = []
        for pair in (self.remove, self.add):
            z = pair.borders(noise_multiplier, _NODES, log_tail)[:-1]
            loss = pair.loss(z, noise_multiplier)
            bottom = pair.sides[1].loss(z, noise_multiplier)
            density = bottom - 0.5 * z * z - 0.5 * math.log(2 * math.pi)  # of Q, its logarithm
            mass = density + math.log(z[1] - z[0])
            parts.append((loss, mass, np.gradient(loss, z)))
        (up, up_q, up_slope), (down, down_p, down_slope) = parts
        # of the second pair P has what Q has of the first, and log Q = log P + loss
        down_q = (down_p + down)[::-1]
        untouched = 1 - float(np.exp(scipy.special.logsumexp(np.concatenate([up_q, down_q]))))
        atom = [math.log(max(untouched, 1e-300))]
        return (
            np.concatenate([-down[::-1], [0.0], up]),
            np.concatenate([down_q, atom, up_q]),
            np.concatenate([down_slope[::-1], [0.0], up_slope]),
        )

    def discretize(
        self, noise_multiplier: float, step: float, resolution: Resolution
    ) -> LossDistribution:
        sigma = noise_multiplier
        borders = self.remove.borders(
            sigma, resolution.spacing, resolution.log_tail, resolution.ends[1]
        )
        up_p, up_q = self.remove.masses(borders, sigma)
        up = self.remove.loss(borders[:-1], sigma)
        borders = self.add.borders(
            sigma, resolution.spacing, resolution.log_tail, -resolution.ends[0]
        )
        down_q, down_p = (mass[::-1] for mass in self.add.masses(borders, sigma))
        down = -self.add.loss(borders[:-1], sigma)[::-1]
        # rounding aside the rest is the same under P and under Q; its loss is 0
        untouched = max(1 - math.fsum(up_p) - math.fsum(down_p), 0.0)
        up[0] = down[-1] = 0.0
        loss = np.concatenate([[-math.inf], down, up, [math.inf]])
        mass_p = np.concatenate([down_p, [untouched], up_p])
        mass_q = np.concatenate([down_q, [untouched], up_q])
        return distribution.from_cells(step, np.maximum.accumulate(loss), mass_p, mass_q)

    def discretize_below(
        self,
        noise_multiplier: float,
        step: float,
        resolution: Resolution,
        *,
        add: bool,
        rounds: int,
    ) -> LossDistribution:
        # of one of the two pairs alone, which some data attain; all losses are resolved
        pair = self.add if add else self.remove
        lowest = len(pair.chances) * min(pair.without, 0)
        low = float(scipy.special.ndtri_exp(resolution.log_tail)) + lowest / noise_multiplier
        high = pair.ends(noise_multiplier, resolution.log_tail, math.inf)[1]
        cells = math.ceil(min((high - low) / resolution.spacing, 2 * _MOST_CELLS))
        borders = np.concatenate([[-math.inf], np.linspace(low, high, cells + 1), [math.inf]])
        mass_p, mass_q = pair.masses(borders, noise_multiplier)
        return distribution.from_below(step, mass_p, mass_q, rounds)


@dataclasses.dataclass(frozen=True)
class PublicMixture(Round):
    """Two rounds mixed by a coin independent of the data, accounted as if it were released.

    To tell more can only raise a divergence, so the truth is at most this.

    Attributes:
      often, seldom: the two.
      chance: of ``seldom``, above 0 and below 1.
    """

    plural = "truncated batches"
    often: Round
    seldom: Round
    chance: float

    @property
    def _both(self) -> tuple[tuple[Round, float], tuple[Round, float]]:
        """(round, log of its chance)."""
        return (self.often, math.log1p(-self.chance)), (self.seldom, math.log(self.chance))

    @property
    def trivial(self) -> bool:
        return self.often.trivial and self.seldom.trivial

    @property
    def components(self) -> int:
        return self.often.components + self.seldom.components

    @property
    def largest(self) -> float:
        return max(self.often.largest, self.seldom.largest)

    @property
    def mean(self) -> float:
        return (1 - self.chance) * self.often.mean + self.chance * self.seldom.mean

    @property
    def log_chance(self) -> float:
        parts = [log_weight + case.log_chance for case, log_weight in self._both]
        return min(float(scipy.special.logsumexp(parts)), 0.0)

    @property
    def log_none(self) -> float:
        return min(self.often.log_none, self.seldom.log_none)

    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        parts = []
        for case, log_weight in self._both:
            loss, mass, slope = case.nodes(noise_multiplier, min(log_tail - log_weight, -1.0))
            parts.append((loss, mass + log_weight, slope))
        loss, mass, slope = (np.concatenate(two) for two in zip(*parts, strict=True))
        order = np.argsort(loss, kind="stable")
        return loss[order], mass[order], slope[order]

    def discretize(
        self, noise_multiplier: float, step: float, resolution: Resolution
    ) -> LossDistribution:
        parts = []
        for case, log_weight in self._both:
            scaled = resolution._replace(log_tail=min(resolution.log_tail - log_weight, -1.0))
            parts.append((case.discretize(noise_multiplier, step, scaled), math.exp(log_weight)))
        indices = np.concatenate([part.index for part, _ in parts])
        index, places = np.unique(indices, return_inverse=True)
        mass = np.bincount(places, np.concatenate([weight * part.mass for part, weight in parts]))
        infinite = sum(weight * part.infinite for part, weight in parts)
        reverse_infinite = sum(weight * part.reverse_infinite for part, weight in parts)
        return LossDistribution(step, index, mass, infinite, reverse_infinite)
