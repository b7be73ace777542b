"""K units of one user under balls-in-bins with C = I: the exact mixture over how they fall.

With independent noise the modes of different bins are orthogonal, so the likelihood ratio of a
given way to fall, counts n_1..n_b, factorizes over bins. With g = E/σ² (E epochs) and
a_i = <m_i, X>/σ²,

    P/Q = Σ_n multinomial(n) Π_i e^{n_i a_i - n_i² g/2}
        = (K!/b^K) [z^K] Π_i Σ_j z^j/j! e^{j a_i - j² g/2},

the K-th coefficient of a product of b polynomials. (That P dominates follows as for one unit:
Choquette-Choo et al. 2024, proof of Lemma 3.2, with the ways to fall as the mixture.)

δ is sampled by importance, in numpy and by a proposal of its own: the oracle of
:mod:`mfopt.accounting.monte_carlo.count_mixture`, whose values have a proven ceiling.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import scipy
from plain_monte_carlo import Estimate

_CELL = 0.02  # of the proposal's histogram, in noise units
_MOST_COUNT = 40  # counts of one bin that the proposal takes into account
_BLOCK = 2**21  # numbers alive at once in the product of polynomials
_LOG_ROOT_TWO_PI = 0.5 * math.log(2 * math.pi)


def log_ratio(exponents: np.ndarray, gram: float, group_size: int) -> np.ndarray:
    """log P/Q from a_i = <m_i, X>/σ², shape (samples, bins) -> (samples,); ``gram`` is g.

    All terms are positive, so the product keeps full relative precision; the state is
    rescaled after each bin.
    """
    samples, bins = exponents.shape
    count = np.arange(group_size + 1)
    rate = math.log(group_size / bins)
    base = count * rate - 0.5 * count**2 * gram - scipy.special.gammaln(count + 1)
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
    return coefficient + log_scale + _log_constant(group_size)


def _log_constant(group_size: int) -> float:
    """log K!/K^K: what is left of K!/b^K once every count carries a factor K/b."""
    return math.lgamma(group_size + 1) - group_size * math.log(group_size)


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

    def estimate(
        self, epsilon: float, *, direction: str = "remove", samples: int = 2**13, seed: int = 0
    ) -> Estimate:
        """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") with its standard error.

        Unbiased; proves nothing. Remove: each bin's z = a/√g is drawn from the density
        ∝ q(z) F(z)^(1+θ), F(z) = Σ_j (ρK/b)^j/j! e^{j a - j² g/2}, at the saddle point: the
        fugacity ρ keeps the mean total of the counts at K, the tilt θ brings the mean loss to ε.
        Add: X ~ Q, shifted against the mean mode. Precise where many units share the loss; for
        few units the standard error tells how many ``samples`` are needed.

        Args:
          epsilon: ε of the hockey-stick divergence.
          direction: "remove" or "add".
          samples: importance samples.
          seed: pins them: an estimate is the same number at each call.
        """
        rng = np.random.default_rng(seed)
        draw = self._draw_remove(epsilon) if direction == "remove" else self._draw_add(epsilon)
        size = max(1, _BLOCK // (self.bins * (min(self.group_size, _MOST_COUNT) + 1)))
        values = np.concatenate(
            [draw(rng, min(size, samples - start)) for start in range(0, samples, size)]
        )
        error = float(values.std(ddof=1) / math.sqrt(samples))
        return Estimate(float(values.mean()), error, samples)

    def _draw_remove(self, epsilon: float):  # type: ignore[no-untyped-def]
        spread = math.sqrt(self.gram)
        chance = self._weights(self._saddle(epsilon))[0]
        chance = np.maximum(chance / chance.sum(), 1e-280)
        cumulative, log_density = np.cumsum(chance), np.log(chance / _CELL)

        def draw(rng: np.random.Generator, size: int) -> np.ndarray:
            cell = np.searchsorted(cumulative, rng.random((size, self.bins)) * cumulative[-1])
            cell = np.minimum(cell, cumulative.size - 1)
            z = self._centres[cell] + _CELL * (rng.random((size, self.bins)) - 0.5)
            log_weight = np.sum(-0.5 * z * z - _LOG_ROOT_TWO_PI - log_density[cell], axis=1)
            ratio = log_ratio(spread * z, self.gram, self.group_size)
            above = np.maximum(ratio - epsilon, 0.0)
            return np.where(above > 0, np.exp(log_weight + ratio) * -np.expm1(-above), 0.0)

        return draw

    def _draw_add(self, epsilon: float):  # type: ignore[no-untyped-def]
        _, tilt = self.add_ceiling(epsilon)
        mean = self.group_size / self.bins

        def draw(rng: np.random.Generator, size: int) -> np.ndarray:
            noise = math.sqrt(self.gram) * rng.standard_normal((size, self.bins))
            a = noise - tilt * mean * self.gram
            log_weight = tilt * mean * a.sum(axis=1) + 0.5 * tilt**2 * self._mean_square
            above = np.maximum(-epsilon - log_ratio(a, self.gram, self.group_size), 0.0)
            return np.where(above > 0, np.exp(log_weight) * -np.expm1(-above), 0.0)

        return draw

    @functools.cached_property
    def _centres(self) -> np.ndarray:
        """Cells of z; what lies outside has P-probability below 1e-30."""
        high = 12.0 + math.sqrt(self.gram) * min(self.group_size, _MOST_COUNT)
        return np.arange(-12.0, high, _CELL) + _CELL / 2

    def _weights(self, tilt: float) -> tuple[np.ndarray, float]:
        """Weights of the cells at θ, balanced by the fugacity, and the mean loss under them."""
        z, k = self._centres, self.group_size
        count = np.arange(min(k, _MOST_COUNT) + 1)
        powers = (
            count * (math.log(k / self.bins) + math.sqrt(self.gram) * z[:, None])
            - 0.5 * count**2 * self.gram
            - scipy.special.gammaln(count + 1)
        )

        def law(log_fugacity: float) -> tuple[np.ndarray, float, float]:
            terms = powers + count * log_fugacity
            log_f = scipy.special.logsumexp(terms, axis=1)
            weight = -0.5 * z * z + (1 + tilt) * log_f
            weight = np.exp(weight - weight.max())
            weight *= self.bins / weight.sum()
            total = float(weight @ (np.exp(terms - log_f[:, None]) @ count))
            return weight, total, float(weight @ log_f) - k * log_fugacity

        low, high = -30.0, 30.0
        for _ in range(36):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if law(middle)[1] < k else (low, middle)
        weight, _, loss = law(low)
        # the chance that Poisson-like counts add up to K, at their mean
        return weight, loss + _log_constant(k) - 0.5 * math.log(2 * math.pi * k)

    def _saddle(self, epsilon: float) -> float:
        """θ at which the mean loss is about ε."""
        low, high = 0.0, 1.0
        while self._weights(high)[1] < epsilon and high < 1e3:
            low, high = high, 2 * high
        for _ in range(8):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if self._weights(middle)[1] < epsilon else (low, middle)
        return 0.5 * (low + high)

    @property
    def _mean_square(self) -> float:
        """|mean mode|²/σ²: the mean product of two independent ways to fall."""
        return self.group_size**2 / self.bins * self.gram

    def add_ceiling(self, epsilon: float) -> tuple[float, float]:
        """(log of a bound on H_{e^ε}(Q, P), the tilt t >= 0 of the add direction's draws).

        Jensen: log P/Q >= <m̄, X>/σ² - ḡ/2, with ḡ the mean squared norm over ways to fall; t
        makes the largest value of the draws, which bounds their mean, as small as it gets.
        """
        k, b = self.group_size, self.bins
        half = 0.5 * self.gram * (k * (1 - 1 / b) + k**2 / b)
        t = max((epsilon - half) / self._mean_square, 0.0)
        peak = float(scipy.special.xlogy(t, t) - scipy.special.xlog1py(1 + t, t))
        return min(-t * (epsilon - half) + 0.5 * t**2 * self._mean_square + peak, 0.0), t
