"""Balls-in-bins composed with other mechanisms that touch the same data.

For instance a private median that sets the clip norm, or a private choice of hyperparameters. With
Y the sampled loss of balls-in-bins and δ₂(t) = H_{e^t}(P₂, Q₂), t real, of what it is composed
with,

    H_{e^ε}(P × P₂, Q × Q₂) = E_P δ₂(ε - Y),

so the certificate's estimator (:mod:`mfopt.accounting.monte_carlo.tilted`) carries over with
δ₂(ε - Y) in place of (1 - e^{ε-Y})₊: Π N_l e^{-sY} δ₂(ε - Y) is unbiased, and at most
Π max N_l · e^{-sε} sup_t e^{st} δ₂(t). Adaptive composition is covered: the other mechanism may
depend on the output, as long as its pair dominates it for every output.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from scipy import signal, special

from mfopt import _check
from mfopt.accounting import loss_distribution, verify
from mfopt.accounting.loss_distribution import Composition, LossDistribution
from mfopt.accounting.loss_distribution.mixture import Mixture
from mfopt.accounting.monte_carlo import betting, dominating_pair, tilted
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.verified import Model, Numbers, VerifiedAnalysis
from mfopt.guarantee import Status

_CHUNK = 4096
_SEARCH_SAMPLES = 4096
_STEP = 1e-3


def pure(epsilon: float, step: float = _STEP) -> Composition:
    """Any ε-DP mechanism: randomized response dominates it."""
    epsilon = _check.epsilon("epsilon", epsilon)
    return approximate(epsilon, 0.0, step)


def approximate(epsilon: float, delta: float, step: float = _STEP) -> Composition:
    """Any (ε, δ)-DP mechanism, by the pair that attains exactly that (Kairouz, Oh, Viswanath 2015).

    With probability 1-δ randomized response at ε, else the data set is revealed.
    """
    epsilon = _check.non_negative("epsilon", epsilon)
    delta = _check.probability("delta", delta, closed=True)
    likely = 1 / (1 + math.exp(-epsilon))
    loss = np.array([-epsilon, epsilon])
    mass = np.array([(1 - likely) * (1 - delta), likely * (1 - delta)])
    return Composition(((loss_distribution.from_atoms(step, loss, mass, delta, delta), 1),))


def gaussian(noise_multiplier: float, step: float = _STEP) -> Composition:
    """One Gaussian release of sensitivity 1 with standard deviation ``noise_multiplier``."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    part = Mixture.binomial(1, 1.0).discretize(sigma, step, min(0.01, step * sigma), -60.0)
    return Composition(((part, 1),))


def from_dp_accounting(pld: Any) -> Composition:
    """A ``dp_accounting`` privacy loss distribution (pessimistic, symmetric or not).

    Its remove and add sides become the two directions; where they are not each other's reverse,
    the two are kept apart.
    """
    remove, add = (_read(side) for side in (pld._pmf_remove, pld._pmf_add))
    return _TwoSided(((remove, 1),), ((add, 1),))


def _read(pmf: Any) -> LossDistribution:
    dense = pmf.to_dense_pmf()
    mass = np.maximum(np.asarray(dense._probs, dtype=np.float64), 0.0)
    kept = np.flatnonzero(mass > 0)
    return LossDistribution(
        dense._discretization, kept + int(dense._lower_loss), mass[kept],
        float(dense._infinity_mass), 0.0, np.zeros(kept.size),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _TwoSided(Composition):
    """A composition whose other direction was given, not derived."""

    other: tuple[tuple[LossDistribution, int], ...] = ()

    def reverse(self) -> Composition:
        return _TwoSided(self.other, self.parts)


@dataclasses.dataclass(frozen=True)
class HockeyStick:
    """δ₂ as a table of its finite part, and what must be added whatever t is.

    The atoms lie on the grid, so that between two grid points δ₂ is linear in e^t: the table's
    chords are its values. Below the table no atom is left and δ₂ is again linear in e^t, from
    ``total`` at t = -∞: for a companion that reveals nothing it is 1 - e^t.
    """

    step: float
    start: int
    finite: np.ndarray  # δ₂ at step * (start + k), decreasing; 0 from the last point on
    constant: float
    total: float  # limit of the finite part at t = -∞

    @classmethod
    def of(cls, composition: Composition) -> HockeyStick:
        """The table of a composition, in its own direction."""
        composed = composition.convolve(0.0)
        # the law of the window is normalized: its scale is the mass that is not infinite
        law = composed.law * math.exp(min(composed.log_scale + composed.allowance, 0.0))
        from_here = np.cumsum(law[::-1])[::-1]
        above = np.append(from_here[1:], 0.0)
        # Σ_{j > k} law_j e^{-(loss_j - loss_k)}, as a recursion that neither over- nor underflows
        decay = math.exp(-composed.step)
        tail = signal.lfilter([0.0, decay], [1.0, -decay], law[::-1])[::-1]
        finite = np.maximum(above - tail, 0.0)
        # rounding of the two sums, and what the window and the truncation may hide
        per_term = 4 * np.finfo(np.float64).eps * (law.size + 1 / composed.step)
        rounding = per_term * above + composed.rounding
        constant = composed.infinite + composed.rounding + math.exp(composed.log_lost)
        finite = np.where(above > 0, np.minimum(finite + rounding, 1.0), 0.0)
        total = float(min(from_here[0] * (1 + per_term) + composed.rounding, 1.0))
        return cls(composed.step, composed.start, finite, constant, max(total, float(finite[0])))

    def log_value(self, t: np.ndarray) -> np.ndarray:
        """log of the finite δ₂ at each t: an upper bound."""
        t = np.asarray(t, dtype=np.float64)
        position = np.floor(t / self.step).astype(np.int64) - self.start
        inside = np.clip(position, 0, self.finite.size - 2)
        # rounding may put t an ulp outside of its own interval
        past = np.clip(t - self.step * (self.start + inside), 0.0, self.step)
        share = np.expm1(past) / math.expm1(self.step)
        low, high = self.finite[inside], self.finite[inside + 1]
        # below the first point, from e^t = 0 on
        first = np.exp(np.minimum(t - self.step * self.start, 0.0))
        below = self.total * (1 - first) + self.finite[0] * first
        value = np.where(position < 0, below, low * (1 - share) + high * share)
        with np.errstate(divide="ignore"):
            return np.where(position >= self.finite.size - 1, -np.inf, np.log(value))

    def log_peak(self, order: float) -> float:
        """log sup_t e^{order t} δ₂(t), order > 0, of what :meth:`log_value` gives."""
        # on each piece δ₂ = f - β (u - 1) with u = e^{t - start of the piece}: one peak in u
        wide = math.expm1(self.step)
        fall = np.maximum(self.finite[:-1] - self.finite[1:], 0.0) / wide
        top = self.finite[:-1] + fall
        inside = self._peaks(order, top, fall, 1.0, math.exp(self.step))
        at = order * self.step * (self.start + np.arange(self.finite.size - 1))
        # before the table the piece begins at u = 0 and ends at the first point, u = 1
        first = np.array([max(self.total - float(self.finite[0]), 0.0)])
        below = self._peaks(order, np.array([self.total]), first, 0.0, 1.0)
        return max(float(np.max(at + inside)), order * self.step * self.start + float(below[0]))

    @staticmethod
    def _peaks(
        order: float, top: np.ndarray, fall: np.ndarray, least: float, most: float
    ) -> np.ndarray:
        """log max u^order (top - fall u) over least <= u <= most."""
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.where(fall > 0, order * top / ((1 + order) * fall), most)
            at = np.clip(best, least, most)
            return order * np.log(at) + np.log(np.maximum(top - fall * at, 0.0))


def analysis(
    mechanism: Any,
    other: Composition,
    *,
    samples: int = 2**16,
    seed: int | None = None,
    certify: bool = True,
) -> VerifiedAnalysis:
    """ε, δ or σ of a balls-in-bins mechanism (one unit, any C >= 0) together with ``other``.

    Raises:
      UsageError: the mechanism is not one unit under balls-in-bins, or C has negative entries.
    """
    _check.integer("samples", samples)
    if mechanism.group_size != 1:
        raise _check.reject("group_size", mechanism.group_size, "compositions cover one unit")
    if mechanism.adjacency == "replace":
        raise _check.reject("adjacency", "replace", "not analysed for compositions",
                            "Use 'add-remove' or 'zero-out'.")  # fmt: skip
    pair = dominating_pair.exact(mechanism.strategy, mechanism.sampling)
    model = ComposedModel(pair, other, samples)
    return VerifiedAnalysis(mechanism, model, certify=certify, seed=seed)


class ComposedModel(Model):
    """One unit under balls-in-bins with any C >= 0, composed with ``other``.

    Args:
      pair: balls-in-bins' dominating pair.
      other: the mechanisms that it is composed with, one unit, same adjacency.
      samples: of each direction's certificate.
    """

    method = "balls-in-bins Monte Carlo composed with a privacy loss distribution"
    estimator = method + ", point estimate"
    status: Status = "certified"

    def __init__(self, pair: DominatingPair, other: Composition, samples: int = 2**16) -> None:
        self.pair, self.samples = pair, samples
        self._other = {"remove": HockeyStick.of(other), "add": HockeyStick.of(other.reverse())}

    def log_estimate(self, noise_multiplier: float, epsilon: float) -> float:
        rng = np.random.default_rng(0)
        found = 1e-300
        for direction, stick in self._other.items():
            sampler = self._sampler(direction, noise_multiplier, epsilon)
            values = np.exp(sampler.values(_SEARCH_SAMPLES, rng))
            found = max(found, float(values.mean()) + stick.constant)
        return math.log(min(found, 1.0))

    def bound(
        self, noise_multiplier: float, epsilon: float, beta: float, key: jax.Array
    ) -> tuple[float, Numbers]:
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
        numbers: Numbers = {}
        for direction, stick in self._other.items():
            sampler = self._sampler(direction, noise_multiplier, epsilon)
            scaled = np.exp(np.minimum(sampler.values(self.samples, rng) - sampler.log_ceiling, 0))
            share = betting.from_values(scaled, beta / 2)
            finite = math.exp(min(math.log(min(share, 1.0)) + sampler.log_ceiling, 0.0))
            numbers[direction] = min(finite * (1 + 1e-9) + stick.constant, 1.0)
        return verify.largest(numbers.values()), {**numbers, "samples": self.samples}

    def guess(self, epsilon: float, delta: float) -> float:
        norm = math.sqrt(float(np.max(np.diagonal(np.asarray(self.pair.gram)))))
        return norm / max(epsilon, 0.1)

    def _sampler(self, direction: str, sigma: float, epsilon: float) -> _Remove | _Add:
        kind = _Remove if direction == "remove" else _Add
        gram, factor = np.asarray(self.pair.gram) / sigma**2, np.asarray(self.pair.factor) / sigma
        return kind(gram, factor, epsilon, self._other[direction])


@dataclasses.dataclass(frozen=True)
class _Remove:
    """Values Π N_l e^{-sY} δ₂(ε - Y) of the tuple-tilted proposal."""

    gram: np.ndarray
    factor: np.ndarray
    epsilon: float
    stick: HockeyStick

    @functools.cached_property
    def _chosen(self) -> tuple[int, float]:
        """(order s of least ceiling, log of the ceiling)."""
        orders = np.arange(1, 65)
        # at ε = 0 the published ceiling is the peak of the hinge times the normalizers
        with jax.enable_x64(True):
            log_ceilings = np.asarray(tilted.log_ceilings(jax.numpy.asarray(self.gram), 0.0, 64))
        hinge = orders * np.log(orders) - (1 + orders) * np.log1p(orders)
        peaks = np.array([self.stick.log_peak(float(s)) for s in orders])
        total = log_ceilings - hinge + peaks - orders * self.epsilon
        best = int(np.argmin(total))
        return int(orders[best]), float(total[best])

    @property
    def log_ceiling(self) -> float:
        return self._chosen[1]

    def values(self, samples: int, rng: np.random.Generator) -> np.ndarray:
        parts = [self._draw(min(_CHUNK, samples - i), rng) for i in range(0, samples, _CHUNK)]
        return np.concatenate(parts)

    def _draw(self, size: int, rng: np.random.Generator) -> np.ndarray:
        order, bins = self._chosen[0], self.gram.shape[0]
        products = self.gram[rng.integers(0, bins, size)]
        log_normalizers = np.zeros(size)
        for _ in range(order):
            top = products.max(axis=1, keepdims=True)
            running = np.cumsum(np.exp(products - top), axis=1)
            log_normalizers += top[:, 0] + np.log(running[:, -1] / bins)
            pick = rng.random((size, 1)) * running[:, -1:]
            chosen = np.minimum((running < pick).sum(axis=1), bins - 1)
            products = products + self.gram[chosen]
        noise = rng.standard_normal((size, bins)) @ self.factor.T
        loss = special.logsumexp(products + noise - np.diagonal(self.gram) / 2, axis=1)
        loss -= math.log(bins)
        return log_normalizers - order * loss + self.stick.log_value(self.epsilon - loss)


@dataclasses.dataclass(frozen=True)
class _Add:
    """Values e^{t mean a + t²ρ/2} δ₂(ε + Y) with X ~ N(-t m̄, σ²I)."""

    gram: np.ndarray
    factor: np.ndarray
    epsilon: float
    stick: HockeyStick

    @functools.cached_property
    def _chosen(self) -> tuple[float, float]:
        """(t, log of the ceiling): by Jensen, Y >= mean a - ḡ/2."""
        square, half = float(np.mean(self.gram)), float(np.mean(np.diagonal(self.gram)) / 2)
        candidates = np.concatenate([[0.0], np.geomspace(1e-2, 1e3, 60)])
        totals = [
            t * (half - self.epsilon) + 0.5 * t * t * square
            + (self.stick.log_peak(float(t)) if t > 0 else 0.0)
            for t in candidates
        ]  # fmt: skip
        best = int(np.argmin(totals))
        return float(candidates[best]), float(totals[best])

    @property
    def log_ceiling(self) -> float:
        return self._chosen[1]

    def values(self, samples: int, rng: np.random.Generator) -> np.ndarray:
        parts = [self._draw(min(_CHUNK, samples - i), rng) for i in range(0, samples, _CHUNK)]
        return np.concatenate(parts)

    def _draw(self, size: int, rng: np.random.Generator) -> np.ndarray:
        t, bins = self._chosen[0], self.gram.shape[0]
        noise = rng.standard_normal((size, bins)) @ self.factor.T
        a = noise - t * self.gram.mean(axis=0)
        loss = special.logsumexp(a - np.diagonal(self.gram) / 2, axis=1) - math.log(bins)
        log_weight = t * a.mean(axis=1) + 0.5 * t * t * float(np.mean(self.gram))
        return log_weight + self.stick.log_value(self.epsilon + loss)
