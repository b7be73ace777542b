"""Rounds that keep their number of units: contributions of K units are zeroed out or replaced.

Here both laws of a round are mixtures, and no one pair of data sets is worst at every ε. Let j of
the K units be drawn, with chance p_j, the first j of an order that is independent of the data. Let
x_i be what they give, x'_i what they give in the other data set (0, or anything), and v_i what the
batch without them has in their places (nothing under Poisson sampling, as many of the others where
the batch's size is fixed), all of norm at most 1. Given the orders, and up to a common shift,

    P = Σ_j p_j N(a_j),    a_j = Σ_{i<=j} (x_i - v_i),
    Q = Σ_j p_j N(b_j),    b_j = Σ_{i<=j} (x'_i - v_i),

and divergences are convex. For i >= j the distance |a_i - b_j| is at most c i - e j, where c, e are

    2, 1, and 1, 0 with P and Q exchanged    a fixed batch, the units zeroed
    2, 0                                     a fixed batch, the units replaced
    1, -1                                    Poisson sampling, the units replaced

For α >= 1 let a plan w >= 0 take all of the weights α p_j of Q, less what both have at a_0 = b_0,
to components i >= j of P. With σ = 1 and N(a_i)(A) = Φ(u_i), the lemma of Neyman and Pearson gives
for any data and any set A

    P(A) - α Q(A) <= Σ_i sup_u (p_i Φ(u) - Σ_j w_ij Φ(u - (c i - e j))).                         (1)

Let R_k(t) = Σ_{j<=k} p_j φ(t - c j) / Σ_{j<=k} p_j φ(t - e j). Any t has an α >= 1 and an l with
α = R_l(t) = max_k R_k(t). Beyond l component j keeps its own share α p_j; the supremum of that is
at the threshold τ_j = (c + e) j/2 + log α / ((c - e) j). Up to l the suprema are all at t, where
each is stationary, if the plan gives p_i φ(t - c i) = Σ_j w_ij φ(t - e j). There is such a plan if
for every k the j from k to l have at least as much in P as in Q at t. They do: as R_l is the
largest, τ_l <= t <= τ_{l+1}; τ is convex in j, so that those j <= l with more in P than in Q are
the last ones; and all together balance. So (1) is

    Σ_j p_j (Φ(c j - s_j) - α Φ(e j - s_j)),    s_j = t up to l, τ_j beyond,

which no other plan makes less, so that α increases with t. With l the largest j (for one unit:
always) data on a line attain it, the same at every α; else others do at one α, if differences of
the τ_j are at most the norms that units may have.

For α < 1 the same holds with P and Q exchanged, so at every α the supremum over all data is known.
It is the profile of one pair that dominates all (Zhu, Dong, Wang 2022, Proposition 8), and what
dominates each round dominates adaptive compositions (ibid., Theorem 10): its positive losses are
those of the first pair, its negative ones those of the second, and the rest, as much under P as
under Q, has loss 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import scipy

from mfopt.accounting.loss_distribution import LossDistribution, distribution
from mfopt.accounting.loss_distribution.mixture import Mixture, Nodes, Resolution, Round, reach

_MOST_CELLS = 500_000
_MOST_MASSES = 1 << 23
_NODES = 0.05  # spacing of the nodes for planning, in noise standard deviations


@dataclasses.dataclass(frozen=True)
class Pair:
    """The supremum over data of P(A) - α Q(A), for α >= 1; see the module's text.

    Attributes:
      counts: law of j, the number of units that are drawn.
      with_it, without: c and e, in clip norms.
    """

    counts: Mixture
    with_it: float
    without: float

    def _likely(self, log_tail: float) -> Pair:
        """Without the least likely counts, of total probability at most e^log_tail, unless those
        are all that move a round.
        """
        counts = self.counts.cut(log_tail)
        return self if counts.trivial else dataclasses.replace(self, counts=counts)

    @functools.cached_property
    def sides(self) -> tuple[Mixture, Mixture]:
        """(P, Q) on a line, of which only the weights and the shifts are used: no Q is N(0)."""
        top, bottom = (
            dataclasses.replace(self.counts, sensitivities=step * self.counts.sensitivities)
            for step in (self.with_it, self.without)
        )
        return top, bottom

    def thresholds(self, z: np.ndarray, sigma: float) -> tuple[np.ndarray, np.ndarray]:
        """(log α, shape (N,); s_j in σ for each count, (J, N)) of which t is z, in σ, shape (N,).

        log α is 0 up to some z, then it increases.
        """
        sides = []
        for side in self.sides:
            shift = side.sensitivities[:, None] / sigma
            exponents = side.log_weights[:, None] + shift * (z - shift / 2)
            sides.append((shift, np.logaddexp.accumulate(exponents, axis=0)))
        (top, log_p), (bottom, log_q) = sides
        ratio = log_p - log_q
        # t is the least of those at which counts up to k balance: at it log α is the largest
        last = np.argmax(ratio, axis=0)
        loss = np.maximum(np.take_along_axis(ratio, last[None], 0)[0], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):  # of no unit
            crossings = (top + bottom) / 2 + loss / (top - bottom)
        is_beyond = np.arange(len(top))[:, None] > last
        return loss, np.where(is_beyond, np.maximum(crossings, z), z)

    def cells(self, borders: np.ndarray, sigma: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """log α at the lower ends of cells between ``borders`` of t; their P- and Q-mass."""
        loss, thresholds = self.thresholds(borders[:-1], sigma)
        masses = []
        for side in self.sides:
            total = np.zeros(borders.size - 1)
            for shift, log_weight, thresholds_of_count in zip(
                side.sensitivities / sigma, side.log_weights, thresholds, strict=True
            ):
                within = distribution.normal_masses(
                    np.append(thresholds_of_count, math.inf) - shift
                )
                total += math.exp(log_weight) * within
            masses.append(total)
        return loss, masses[0], masses[1]

    def ends(self, sigma: float, log_tail: float, largest: float) -> tuple[float, float]:
        """z where losses begin to be positive, and beyond which little mass or no use is."""

        def loss(z: float) -> float:
            return float(self.thresholds(np.array([z]), sigma)[0][0])

        counts = self.counts.sensitivities
        start = 0.5 * (self.with_it + self.without) * float(counts[counts > 0][0]) / sigma
        high = max(self.sides[0].ends(sigma, log_tail)[1], start + 1e-6)
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
        most = min(_MOST_CELLS, _MOST_MASSES // self.counts.components)
        cells = math.ceil(min((stop - start) / spacing, most))
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

    @classmethod
    def zeroed_in_fixed_batch(cls, counts: Mixture) -> ReplacementRound:
        """Contributions become 0, the batch's size stays: the others fill their places."""
        return cls(Pair(counts, 2, 1), Pair(counts, 1, 0))

    @classmethod
    def replaced_in_fixed_batch(cls, counts: Mixture) -> ReplacementRound:
        """Contributions become others, the batch's size stays."""
        return cls(Pair(counts, 2, 0), Pair(counts, 2, 0))

    @classmethod
    def replaced_in_poisson_batch(cls, counts: Mixture) -> ReplacementRound:
        """Contributions become others, drawn independently of all others."""
        return cls(Pair(counts, 1, -1), Pair(counts, 1, -1))

    @property
    def trivial(self) -> bool:
        return self.remove.counts.trivial

    @property
    def largest(self) -> float:
        pair = self.remove
        return pair.counts.largest * (pair.with_it - pair.without)

    @property
    def components(self) -> int:
        # one where as many units take part always: a Gaussian release
        return self.remove.counts.components

    @property
    def log_chance(self) -> float:
        return self.remove.counts.log_chance

    @property
    def mean(self) -> float:
        pair = self.remove
        return pair.counts.mean * (pair.with_it - pair.without)

    def nodes(self, noise_multiplier: float, log_tail: float) -> Nodes:
        parts: list[Nodes] = []
        for whole in (self.remove, self.add):
            pair = whole._likely(log_tail)
            z = pair.borders(noise_multiplier, _NODES, log_tail)[:-1]
            loss, _ = pair.thresholds(z, noise_multiplier)
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
        sigma, log_tail = noise_multiplier, resolution.log_tail
        halves = []
        for whole, largest in (
            (self.remove, resolution.ends[1]),
            (self.add, -resolution.ends[0]),
        ):
            pair = whole._likely(log_tail)
            borders = pair.borders(sigma, resolution.spacing, log_tail, largest)
            halves.append(pair.cells(borders, sigma))
        (up, up_p, up_q), (down, down_q, down_p) = halves
        # rounding aside the rest is the same under P and under Q; its loss is 0
        missing = pair.counts.missing  # both have the same counts
        untouched = max(1 - missing - math.fsum(up_p) - math.fsum(down_p), 0.0)
        up[0] = down[0] = 0.0
        loss = np.concatenate([[-math.inf], -down[::-1], up, [math.inf]])
        mass_p = np.concatenate([down_p[::-1], [untouched], up_p])
        mass_q = np.concatenate([down_q[::-1], [untouched], up_q])
        mass_p[-1] += missing
        mass_q[0] += missing
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
        # of one of the two pairs alone, on a line, which some data attain; all losses are resolved
        pair = (self.add if add else self.remove)._likely(2 * resolution.log_tail)
        lowest = pair.counts.largest * min(pair.without, 0)
        low = float(scipy.special.ndtri_exp(resolution.log_tail)) + lowest / noise_multiplier
        high = pair.ends(noise_multiplier, resolution.log_tail, math.inf)[1]
        cells = math.ceil(min((high - low) / resolution.spacing, 2 * _MOST_CELLS))
        borders = np.concatenate([[-math.inf], np.linspace(low, high, cells + 1), [math.inf]])
        mass_p, mass_q = (side.masses(noise_multiplier, borders)[0] for side in pair.sides)
        mass_q[-1] += pair.counts.missing
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
        losses = np.concatenate([part.losses for part, _ in parts])
        masses = np.concatenate([weight * part.mass for part, weight in parts])
        infinite = sum(weight * part.infinite for part, weight in parts)
        reverse_infinite = sum(weight * part.reverse_infinite for part, weight in parts)
        return distribution.from_atoms(step, losses, masses, infinite, reverse_infinite)
