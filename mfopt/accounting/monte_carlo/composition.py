"""Balls-in-bins composed with other mechanisms on the same data.

For instance a private median that sets the clip norm, or a private choice of hyperparameters. With
Y the sampled loss of balls-in-bins and δ₂(t) = H_{e^t}(P₂, Q₂), t real, of what it is composed
with,

    H_{e^ε}(P × P₂, Q × Q₂) = E_P δ₂(ε - Y),

so the certificate's estimator (:mod:`mfopt.accounting.monte_carlo.importance`) carries over with
δ₂(ε - Y) in place of (1 - e^{ε-Y})₊: Π N_l e^{-sY} δ₂(ε - Y) is unbiased, and at most
Π max N_l · e^{-sε} sup_t e^{st} δ₂(t). Adaptive composition is covered: the other mechanism may
depend on the output, as long as its pair dominates it for every output.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import pytree
from mfopt._runtime._types import JsonObject
from mfopt.accounting import loss_distribution
from mfopt.accounting.loss_distribution import Composition, LossDistribution
from mfopt.accounting.loss_distribution.mixture import Mixture, Resolution
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.protocol import DIRECTIONS, SampledLoss, law, loss_of
from mfopt.accounting.monte_carlo.sampled import ComposedMechanism, OneUnit
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.mechanism import Mechanism
from mfopt.strategies.fields import Array

_STEP = 1e-3
_LOST = 1e-12  # of a distribution's mass: what sums of as many numbers as it has may round away


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
    cells = Resolution(min(0.01, step * sigma), -60.0)
    part = Mixture.binomial(1, 1.0).discretize(sigma, step, cells)
    return Composition(((part, 1),))


def from_dp_accounting(pld: Any) -> Composition:
    """A ``dp_accounting`` privacy loss distribution (pessimistic, symmetric or not).

    Its remove and add sides become the two directions; where they are not each other's reverse,
    the two are kept apart.

    Raises:
      UsageError: a side is optimistic, or lacks some of its mass.
    """
    remove, add = (_read(side) for side in (pld._pmf_remove, pld._pmf_add))
    return _TwoSided(((remove, 1),), other=((add, 1),))


def _read(pmf: Any) -> LossDistribution:
    dense = pmf.to_dense_pmf()
    if pmf._pessimistic_estimate is not True or dense._pessimistic_estimate is not True:
        value = "an optimistic privacy loss distribution"
        rule = "it must bound the losses from above, in both directions"
        way_out = "Make it with pessimistic_estimate=True."
        raise _check.reject("pld", value, rule, way_out)
    mass, infinite = np.asarray(dense._probs, dtype=np.float64), float(dense._infinity_mass)
    mass = np.maximum(mass, 0.0)
    total = float(mass.sum()) + infinite
    if not 1 - _LOST <= total < math.inf:
        rule = f"its masses, that of infinite loss too, must add up to 1 - {_LOST:g}"
        raise _check.reject("pld", total, rule)
    kept = np.flatnonzero(mass > 0)
    index = kept + int(dense._lower_loss)
    return LossDistribution(dense._discretization, index, mass[kept], infinite, 0.0)


@dataclasses.dataclass(frozen=True)
class _TwoSided(Composition):
    """A composition whose other direction was given, not derived."""

    other: tuple[tuple[LossDistribution, int], ...] = ()

    def reverse(self) -> Composition:
        return _TwoSided(self.other, other=self.parts)


@pytree
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
    def of_composition(cls, composition: Composition) -> HockeyStick:
        """The table of a composition, in its own direction."""
        composed = composition.convolve(0.0)
        # the law of the window is normalized: its scale is the mass that is not infinite
        law = composed.law * math.exp(min(composed.log_scale + composed.allowance, 0.0))
        from_here = np.cumsum(law[::-1])[::-1]
        above = np.append(from_here[1:], 0.0)
        # Σ_{j > k} law_j e^{-(loss_j - loss_k)}, as a recursion that neither over- nor underflows
        decay = math.exp(-composed.step)
        tail = scipy.signal.lfilter([0.0, decay], [1.0, -decay], law[::-1])[::-1]
        finite = np.maximum(above - tail, 0.0)
        # rounding of the two sums, and what the window and the truncation may hide
        per_term = 4 * np.finfo(np.float64).eps * (law.size + 1 / composed.step)
        rounding = per_term * above + composed.rounding
        constant = composed.infinite + composed.rounding + math.exp(composed.log_lost)
        finite = np.where(above > 0, np.minimum(finite + rounding, 1.0), 0.0)
        # zeros at the end change nothing; tables of few lengths share their compiled code
        finite = np.pad(finite, (0, max(4096, 1 << finite.size.bit_length()) - finite.size))
        total = float(min(from_here[0] * (1 + per_term) + composed.rounding, 1.0))
        return cls(composed.step, composed.start, finite, constant, max(total, float(finite[0])))

    @float64
    def log_value(self, t: Array) -> Array:
        """log of the finite δ₂ at each t: an upper bound; NaN where t is NaN."""
        t = jnp.asarray(t)
        finite = jnp.asarray(self.finite)
        # far outside the table, and NaN, no position is needed
        position = jnp.floor(jnp.clip(jnp.nan_to_num(t / self.step), -1e15, 1e15))
        position = position.astype(int) - self.start
        inside = jnp.clip(position, 0, finite.size - 2)
        # rounding may put t an ulp outside of its own interval
        past = jnp.clip(t - self.step * (self.start + inside), 0.0, self.step)
        share = jnp.expm1(past) / jnp.expm1(self.step)
        low, high = finite[inside], finite[inside + 1]
        # below the first point, from e^t = 0 on
        lowest = jnp.exp(jnp.minimum(t - self.step * self.start, 0.0))
        below = self.total * (1 - lowest) + finite[0] * lowest
        value = jnp.where(position < 0, below, low * (1 - share) + high * share)
        value = jnp.where(position >= finite.size - 1, -jnp.inf, jnp.log(value))
        return jnp.where(jnp.isnan(t), jnp.nan, value)

    def log_peak(self, order: float) -> float:
        """log sup_t e^{order t} δ₂(t), order >= 0, of what :meth:`log_value` gives."""
        if order <= 0:
            return math.log(self.total)
        # on each piece δ₂ = f - β (u - 1) with u = e^{t - start of the piece}: one peak in u
        wide = math.expm1(self.step)
        fall = np.maximum(self.finite[:-1] - self.finite[1:], 0.0) / wide
        top = self.finite[:-1] + fall
        inside = self._peaks(order, top, fall, 1.0, math.exp(self.step))
        exponents = order * self.step * (self.start + np.arange(self.finite.size - 1))
        # before the table the piece begins at u = 0 and ends at the first point, u = 1
        infinite_mass = np.array([max(self.total - float(self.finite[0]), 0.0)])
        below = self._peaks(order, np.array([self.total]), infinite_mass, 0.0, 1.0)
        return max(
            float(np.max(exponents + inside)), order * self.step * self.start + float(below[0])
        )

    @staticmethod
    def _peaks(
        order: float, top: np.ndarray, fall: np.ndarray, low: float, high: float
    ) -> np.ndarray:
        """log max u^order (top - fall u) over least <= u <= most."""
        with np.errstate(divide="ignore", invalid="ignore"):
            best = np.where(fall > 0, order * top / ((1 + order) * fall), high)
            place_of_peak = np.clip(best, low, high)
            return order * np.log(place_of_peak) + np.log(
                np.maximum(top - fall * place_of_peak, 0.0)
            )


def analysis(
    mechanism: Mechanism,
    other: Composition,
    *,
    samples: int | None = None,
    seed: int | None = None,
    certify: bool = True,
) -> VerifiedAnalysis:
    """ε, δ or σ of a balls-in-bins mechanism (one unit, any C >= 0) together with ``other``.

    Args:
      mechanism: one unit, sampled by balls-in-bins.
      other: mechanisms on the same data, adjacency as the mechanism's.
      samples, seed, certify: as for :func:`mfopt.accounting.account`.

    Raises:
      UsageError: the mechanism is not one unit under balls-in-bins, or C has negative entries.
    """
    if mechanism.group_size != 1:
        raise _check.reject("group_size", mechanism.group_size, "compositions cover one unit")
    if mechanism.adjacency == "replace":
        rule, way_out = "not analysed for compositions", "Use 'add-remove' or 'zero-out'."
        raise _check.reject("adjacency", "replace", rule, way_out)
    model = ComposedModel(law(mechanism.sampling).loss(mechanism.strategy), other, samples)
    return VerifiedAnalysis(mechanism, model, certify=certify, seed=seed)


class ComposedModel(OneUnit):
    """One unit under a sampled loss, composed with ``other``.

    Args:
      loss: the mechanism's sampled loss, or its dominating pair.
      other: the mechanisms that it is composed with, one unit, same adjacency.
      samples: of each direction's test, where they are asked for.
    """

    def __init__(
        self, loss: SampledLoss | DominatingPair, other: Composition, samples: int | None = None
    ) -> None:
        companions = {}
        for direction, composition in zip(DIRECTIONS, (other, other.reverse()), strict=True):
            stick = HockeyStick.of_composition(composition)
            companions[direction] = ComposedMechanism(stick, stick.constant)
        super().__init__(loss_of(loss), samples, companions)
        self.method += f", composed with {_NAMED}"
        self.estimator += f", composed with {_NAMED}"
        self.details = {"composed_with": [_described(*part) for part in other.parts]}


_NAMED = "a privacy loss distribution"


def _described(part: LossDistribution, count: int) -> JsonObject:
    """Public summary of a composed mechanism: its losses in the direction that removes a unit."""
    ends = {"least_loss": np.min, "largest_loss": np.max} if part.losses.size else {}
    return {
        "count": count,
        "step": float(part.step),
        **{name: float(end(part.losses)) for name, end in ends.items()},
        "infinite": float(part.infinite),
    }
