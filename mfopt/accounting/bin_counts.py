"""K units of one user under balls-in-bins with C = I: the exact mixture over how they fall.

With independent noise the modes of different bins are orthogonal, so the likelihood ratio of a
given way to fall, counts n_1..n_b, factorizes over bins. With g = E/σ² (E epochs) and
a_i = <m_i, X>/σ²,

    P/Q = Σ_n multinomial(n) Π_i e^{n_i a_i - n_i² g/2} = (K!/b^K) [z^K] Π_i Σ_j z^j/j! e^{j a_i - j² g/2},

the K-th coefficient of a product of b polynomials. (That P dominates follows as for one unit:
Choquette-Choo et al. 2024, proof of Lemma 3.2, with the ways to fall as the mixture.)

If the number of units were Poisson(K) instead of K, the bins would be independent. That mixture
serves twice: tilted, as the proposal of an importance sampler for the exact mixture; and, with
a larger number of units than K as the less private case, as a bound without sampling.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from scipy import special, stats

from mfopt.accounting import gaussian, tilted
from mfopt.accounting.balls_in_bins import SAMPLES, Chain, Model, OneUnit
from mfopt.accounting.dominating_pair import DominatingPair
from mfopt.accounting.mixture import Mixture
from mfopt.accounting.plain import Estimate
from mfopt.accounting.rounds import COARSE, FINE, RoundsProfile
from mfopt.guarantee import Status

_CELL = 0.02  # of the proposal's histogram, in noise units
_LOG_TAIL = -60.0
_BLOCK = 2**21  # numbers alive at once in the product of polynomials
_EXTRA = (1.1, 1.25, 1.5, 2.0)


def log_ratio(exponents: np.ndarray, gram: float, group_size: int) -> np.ndarray:
    """log P/Q from a_i = <m_i, X>/σ², shape (samples, bins) -> (samples,); ``gram`` is g.

    All terms are positive, so the product keeps full relative precision; the state is
    rescaled after each bin.
    """
    samples, bins = exponents.shape
    count = np.arange(group_size + 1)
    rate = math.log(group_size / bins)
    base = count * rate - 0.5 * count**2 * gram - special.gammaln(count + 1)
    state = np.zeros((samples, group_size + 1))
    state[:, 0] = 1.0
    log_scale = np.zeros(samples)
    for i in range(bins):
        powers = base + exponents[:, i, None] * count
        top = powers.max(axis=1, keepdims=True)
        factors = np.exp(powers - top)
        # counts that no sample gives a share of 1e-20 of the largest are left out
        degree = int(np.max(np.flatnonzero(factors.max(axis=0) > 1e-20)))
        following = state * factors[:, :1]
        for j in range(1, degree + 1):
            following[:, j:] += state[:, :-j] * factors[:, j, None]
        largest = following.max(axis=1)
        state = following / largest[:, None]
        log_scale += top[:, 0] + np.log(largest)
    with np.errstate(divide="ignore"):
        coefficient = np.log(state[:, -1])
    return coefficient + log_scale + math.lgamma(group_size + 1) - group_size * math.log(group_size)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The exact mixture at one σ.

    Attributes:
      bins, group_size: b and K.
      gram: g = |m_i|²/σ², the same for all bins.
    """

    bins: int
    group_size: int
    gram: float

    @functools.cached_property
    def independent(self) -> Mixture:
        """One bin's count if the total were Poisson(K)."""
        return Mixture.poisson(self.group_size / self.bins)

    def estimate(
        self, epsilon: float, *, direction: str = "remove", samples: int = 2**13, seed: int = 0
    ) -> Estimate:
        """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") with its standard error.

        Unbiased; an estimate, which proves nothing. Remove: bins are drawn independently from
        the density ∝ q(z) e^{(1+θ) φ(z)}, φ the loss of one bin with a Poisson count and θ such
        that the sum of φ is ε in the mean, then weighted. Add: X ~ Q shifted against the mean.
        """
        rng = np.random.default_rng(seed)
        size = max(1, _BLOCK // (self.bins * (min(self.group_size, 40) + 1)))
        draw = self._draw_remove(epsilon) if direction == "remove" else self._draw_add(epsilon)
        values = [
            draw(rng, min(size, samples - start)) for start in range(0, samples, size)
        ]  # fmt: skip
        joined = np.concatenate(values)
        error = float(joined.std(ddof=1) / math.sqrt(samples))
        return Estimate(float(joined.mean()), error, samples)

    def _draw_remove(self, epsilon: float):  # type: ignore[no-untyped-def]
        spread = math.sqrt(self.gram)
        centre, chance = self._proposal(epsilon)
        cumulative, log_chance = np.cumsum(chance), np.log(chance / _CELL)

        def draw(rng: np.random.Generator, size: int) -> np.ndarray:
            cell = np.searchsorted(cumulative, rng.random((size, self.bins)) * cumulative[-1])
            cell = np.minimum(cell, chance.size - 1)
            z = centre[cell] + _CELL * (rng.random((size, self.bins)) - 0.5)
            log_q = -0.5 * z * z - 0.5 * math.log(2 * math.pi)
            log_weight = np.sum(log_q - log_chance[cell], axis=1)
            ratio = log_ratio(spread * z, self.gram, self.group_size)
            above = np.maximum(ratio - epsilon, 0.0)
            return np.where(above > 0, np.exp(log_weight + ratio) * -np.expm1(-above), 0.0)

        return draw

    def _proposal(self, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
        """Histogram of one bin's z: cell centres and chances, shapes (cells,).

        The chance is ∝ q(z) F(z)^(1+θ), F(z) = Σ_j (ρλ)^j/j! e^{j a - j² g/2}. The fugacity ρ
        keeps the mean total of the counts at K, the tilt θ brings the mean loss to ε: a saddle
        point in both.
        """
        k, bins, spread = self.group_size, self.bins, math.sqrt(self.gram)
        most = min(k, 40)
        count = np.arange(most + 1)
        centre = np.arange(-12.0, 12.0 + spread * most, _CELL) + _CELL / 2
        powers = (
            count * (math.log(k / bins) + spread * centre[:, None])
            - 0.5 * count**2 * self.gram - special.gammaln(count + 1)
        )  # fmt: skip
        log_density = -0.5 * centre**2

        def law(tilt: float, log_fugacity: float) -> tuple[np.ndarray, float, float]:
            terms = powers + count * log_fugacity
            log_f = special.logsumexp(terms, axis=1)
            chance = log_density + (1 + tilt) * log_f
            chance = np.exp(chance - chance.max())
            chance /= chance.sum()
            posterior = np.exp(terms - log_f[:, None]) @ count
            total = bins * float(chance @ posterior)
            loss = bins * float(chance @ log_f) - k * log_fugacity
            return chance, total, loss + math.lgamma(k + 1) - k * math.log(k)

        def balanced(tilt: float) -> tuple[np.ndarray, float]:
            low, high = -30.0, 30.0
            for _ in range(40):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if law(tilt, middle)[1] < k else (low, middle)
            chance, _, loss = law(tilt, 0.5 * (low + high))
            return chance, loss - 0.5 * math.log(2 * math.pi * k)

        low, high = 0.0, 1.0
        while balanced(high)[1] < epsilon and high < 1e3:
            low, high = high, 2 * high
        for _ in range(12):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if balanced(middle)[1] < epsilon else (low, middle)
        return centre, np.maximum(balanced(0.5 * (low + high))[0], 1e-290)

    def _draw_add(self, epsilon: float):  # type: ignore[no-untyped-def]
        log_ceiling, tilt = self._add_ceiling(epsilon)
        mean, square = self.group_size / self.bins, self._mean_square

        def draw(rng: np.random.Generator, size: int) -> np.ndarray:
            noise = math.sqrt(self.gram) * rng.standard_normal((size, self.bins))
            a = noise - tilt * mean * self.gram
            log_weight = tilt * mean * a.sum(axis=1) + 0.5 * tilt**2 * square
            above = np.maximum(-epsilon - log_ratio(a, self.gram, self.group_size), 0.0)
            return np.where(above > 0, np.exp(log_weight) * -np.expm1(-above), 0.0)

        return draw

    @property
    def _mean_square(self) -> float:
        """|mean mode|²/σ²: the mean product of two independent ways to fall."""
        return self.group_size**2 / self.bins * self.gram

    def _add_ceiling(self, epsilon: float) -> tuple[float, float]:
        """(log of the largest value of the add direction's draws, its tilt t >= 0).

        Jensen: log P/Q >= <m̄, X>/σ² - ḡ/2, with ḡ the mean squared norm over ways to fall.
        """
        k, b = self.group_size, self.bins
        half = 0.5 * self.gram * (k * (1 - 1 / b) + k**2 / b)
        t = max((epsilon - half) / self._mean_square, 0.0)
        peak = t * math.log(t) - (1 + t) * math.log1p(t) if t > 0 else 0.0
        return -t * (epsilon - half) + 0.5 * t**2 * self._mean_square + peak, t

    def remove_bound(self, epsilon: float, accuracy: float = FINE) -> float:
        """Upper bound on H_{e^ε}(P, Q) without sampling.

        A user with more units is less private: P with K units is dominated by the mixture of
        the cases with at least K (the inner products of the modes only grow, and a hockey-stick
        divergence grows with them by Kahane's inequality). With a Poisson(r) total that mixture
        is at most 1/p times the law of independent bins, p = P(Poisson(r) >= K), hence
        H_{e^ε} <= H_{p e^ε}(independent bins) / p. The best of a few r is taken.
        """
        best = 0.0
        for extra in _EXTRA:
            total = self.group_size * extra + (extra - 1) * 3
            log_p = float(stats.poisson.logsf(self.group_size - 1, total))
            if epsilon + log_p <= 0:
                continue
            profile = RoundsProfile(
                Mixture.poisson(total / self.bins), self.bins, 1 / math.sqrt(self.gram), accuracy
            )
            best = min(best, profile.log_delta(epsilon + log_p, "remove") - log_p)
        return math.exp(best)

    def add_bound(
        self, epsilon: float, beta: float, samples: int, rng: np.random.Generator
    ) -> float:
        """Upper bound on H_{e^ε}(Q, P) except with probability ``beta``."""
        log_ceiling, _ = self._add_ceiling(epsilon)
        ceiling = math.exp(log_ceiling) * (1 + 1e-9)
        if ceiling <= beta:
            return ceiling
        size = max(1, _BLOCK // (self.bins * (min(self.group_size, 40) + 1)))
        draw = self._draw_add(epsilon)
        values = np.concatenate(
            [draw(rng, min(size, samples - start)) for start in range(0, samples, size)]
        )
        scaled = np.minimum(values / ceiling, 1.0)
        bound = tilted.empirical_bernstein(
            float(scaled.mean()), float(scaled.var(ddof=1)), samples, beta
        )
        return min(bound, 1.0) * ceiling


@dataclasses.dataclass(frozen=True)
class CountModel(Model):
    """K units with C = I: the better of two bounds, beside the exact mixture's estimate."""

    chain: Chain
    squared_norm: float
    samples: int = SAMPLES
    method = "balls-in-bins counts, independent-bins bound"
    status: Status = "bound"

    def counts(self, noise_multiplier: float) -> Counts:
        """The exact mixture at this σ."""
        return Counts(
            self.chain.unit.pair.bins, self.chain.group_size,
            self.squared_norm / noise_multiplier**2,
        )  # fmt: skip

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        counts = self.counts(noise_multiplier)
        remove = counts.remove_bound(epsilon, COARSE)
        log_add = counts._add_ceiling(epsilon)[0]
        if log_add > math.log(max(remove, 1e-300)):
            add = counts.estimate(epsilon, direction="add", samples=2**12).value
            log_add = math.log(max(add, 1e-300))
        return max(math.log(max(remove, 1e-300)), log_add)

    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, dict[str, Any]]:
        counts = self.counts(noise_multiplier)
        remove = counts.remove_bound(epsilon)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
        add = counts.add_bound(epsilon, beta, self.samples, rng)
        exact = counts.estimate(epsilon, samples=2**12, seed=int(rng.integers(2**32)))
        numbers = {
            "remove": remove, "add": add, "exact_mixture_estimate": exact.value,
            "exact_mixture_standard_error": exact.standard_error,
        }  # fmt: skip
        return max(remove, add), numbers

    def guess(self, epsilon: float, delta: float) -> float:
        return math.sqrt(self.squared_norm) / gaussian.largest_mu(
            epsilon + math.log(self.chain.unit.pair.bins), delta
        )


def model(chain: Chain) -> Model | None:
    """The count model if the modes are orthogonal and equally long, else None."""
    gram = np.asarray(chain.unit.pair.gram)
    norms = np.diagonal(gram)
    largest = float(norms.max())
    off = gram - np.diag(norms)
    if np.max(np.abs(off)) > 1e-12 * largest or np.min(norms) < largest * (1 - 1e-9):
        return None
    return CountModel(chain, largest)
