"""Mixture-of-Gaussians rounds: a Gaussian release whose sensitivity is random.

One round is the pair P = Σ_i w_i N(s_i, σ²), Q = N(0, σ²) with sensitivities s_i >= 0
(Choquette-Choo, Ganesh, Steinke, Thakurta 2023; Ganesh 2024, Definition 2.8). Poisson sampling
of one unit has s in {0, 1}, of a group of K a Binomial(K, p), a fixed batch twice a
hypergeometric variable. The loss log P/Q is increasing in x, so cells of x are cells of loss.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import special, stats

from mfopt.accounting import loss_distribution
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import LossDistribution

_MOST_CELLS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sensitivities of one round and their probabilities.

    Attributes:
      sensitivities: shape (m,), >= 0, increasing, in units of the clip norm.
      log_weights: shape (m,), log probabilities.
    """

    sensitivities: np.ndarray
    log_weights: np.ndarray

    @classmethod
    def binomial(cls, group_size: int, probability: float) -> Mixture:
        """Number of a group's units in a Poisson-sampled batch (Ganesh 2024, Theorem 3.1)."""
        count = np.arange(group_size + 1)
        return cls._kept(count, stats.binom.logpmf(count, group_size, probability))

    @classmethod
    def poisson(cls, mean: float) -> Mixture:
        """A Poisson number of units; counts of probability below 1e-300 are left out."""
        count = np.arange(int(mean + 40 * math.sqrt(mean)) + 200)
        log_weights = stats.poisson.logpmf(count, mean)
        return cls._kept(count, np.where(log_weights > -690, log_weights, -math.inf))

    @classmethod
    def hypergeometric(cls, group_size: int, batch_size: int, population: int) -> Mixture:
        """Twice the number of the group's units in a fixed batch (Ganesh 2024, Theorem 3.3).

        ``population`` counts the data set that contains the group.
        """
        count = np.arange(group_size + 1)
        log_weights = stats.hypergeom.logpmf(count, population, group_size, batch_size)
        return cls._kept(2 * count, log_weights)

    @classmethod
    def _kept(cls, sensitivities: np.ndarray, log_weights: np.ndarray) -> Mixture:
        kept = log_weights > -math.inf
        return cls(sensitivities[kept].astype(np.float64), log_weights[kept])

    @property
    def trivial(self) -> bool:
        """Whether the sensitivity is always 0: nothing is released about the group."""
        return bool(np.all(self.sensitivities == 0))

    def guess(self, rounds: int, epsilon: float, delta: float) -> float:
        """A rough σ for (ε, δ): one round's mean and jumps, as Gaussian mechanisms."""
        weights = np.exp(self.log_weights)
        mean = float(weights @ self.sensitivities)
        # the largest sensitivity that occurs more often than the δ that one round may spend
        above = np.cumsum(weights[::-1])[::-1]
        likely = self.sensitivities[above > min(10 * delta / rounds, 0.5)]
        largest = float(likely.max()) if likely.size else float(self.sensitivities.max())
        moved = math.sqrt(rounds) * mean / gaussian.largest_mu(epsilon, delta)
        return max(moved, largest / math.sqrt(2 * max(math.log(rounds), 1.0)) / 2)

    def cut(self, log_tail: float) -> tuple[Mixture, float]:
        """Without the least likely sensitivities, of total probability at most e^log_tail.

        Returns what is left and the probability removed, which counts as an infinite loss.
        """
        order = np.argsort(self.log_weights)
        cumulative = np.logaddexp.accumulate(self.log_weights[order])
        dropped = int(np.searchsorted(cumulative, log_tail, side="right"))
        kept = np.sort(order[dropped:])
        lost = math.exp(cumulative[dropped - 1]) if dropped else 0.0
        return Mixture(self.sensitivities[kept], self.log_weights[kept]), lost

    def loss(self, z: np.ndarray, noise_multiplier: float) -> np.ndarray:
        """log P/Q at x = σ z, shape of ``z``."""
        shift = self.sensitivities / noise_multiplier
        result = np.full(z.shape, -math.inf)
        for s, log_weight in zip(shift, self.log_weights, strict=True):
            result = np.logaddexp(result, log_weight + s * z - 0.5 * s * s)
        return result

    def discretize(
        self, noise_multiplier: float, step: float, spacing: float, log_tail: float
    ) -> LossDistribution:
        """The loss of one round on a grid of ``step``, from cells of x of width σ ``spacing``.

        ``log_tail`` is the log of the probability that each truncation may send to an infinite
        loss.
        """
        mixture, lost = self.cut(log_tail)
        shift = mixture.sensitivities / noise_multiplier
        radius = -special.ndtri_exp(log_tail)
        # upper end: no component keeps more than the tail beyond it
        high = float(np.max(shift - special.ndtri_exp(
            np.minimum(log_tail - mixture.log_weights, -1e-9))))  # fmt: skip
        # more cells than this would cost more than the accuracy is worth; the result stays a bound
        spacing = max(spacing, (high + radius) / _MOST_CELLS)
        cells = math.ceil((high + radius) / spacing)
        z = high - spacing * np.arange(cells, -1, -1.0)
        borders = np.concatenate([[-math.inf], z, [math.inf]])
        mass_q = loss_distribution.normal_masses(borders)
        mass_p = np.zeros_like(mass_q)
        for s, log_weight in zip(shift, mixture.log_weights, strict=True):
            mass_p += math.exp(log_weight) * loss_distribution.normal_masses(borders - s)
        with np.errstate(invalid="ignore"):
            finite = mixture.loss(z, noise_multiplier)
        # loss at x = -∞: log P(s = 0), the mixture's other components vanish there
        at_zero = mixture.log_weights[shift == 0]
        lowest = float(at_zero[0]) if at_zero.size else -math.inf
        loss = np.concatenate([[lowest], np.maximum(finite, lowest), [math.inf]])
        result = loss_distribution.from_cells(step, loss, mass_p, mass_q)
        return dataclasses.replace(result, infinite=result.infinite + lost)
