"""Deterministic bound of one unit under a sampled loss: a polynomial above the payoff.

Notation of :mod:`.likelihood` and :mod:`.importance`. Under Q let Λ = e^Y, beside a shared
component if there is one; E Λ = 1 and

    H(P, Q) = E φ(Λ),  φ(v) = v δ₂(ε − log v),      H(Q, P) = E ψ(Λ),  ψ(v) = δ₂(ε + log v).     (1)

A payoff is δ₂(t) = E (1 − e^(t − L))₊ for some L, so φ(v) = E (v − e^(ε−L))₊ and ψ(v) =
E (1 − e^(ε−L) v)₊ are convex. Let p >= φ (or ψ) on v > 0 with

    p(v) = Σ_{j<=K} a_j (v − 1)^j + Σ_{k>K} c_k v^k + Σ_t d_t v^(−t),      c, d >= 0.           (2)

Then H <= Σ a_j E (Λ − 1)^j + Σ c_k M_k + Σ d_t N_t for any M_k >= E Λ^k and N_t >= E Λ^(−t):

* moments up to K are sums over tuples of patterns, E Λ^k = E e^(Σ_{l<l'} <m_l, m_l'>) with k
  independent patterns; a_j may have either sign and pays for the rounding of the sum;
* E Λ^(1+s) = E_P e^(sY) is the mean of Π N_l of a chain, so the chain's ceiling is an M_{1+s};
* by Jensen Y >= <m̄, X> − ḡ/2, so E Λ^(−t) <= e^(t ḡ/2 + t² ρ/2), ρ = |m̄|².

One power alone, q with mean at most B, is the ceiling of :mod:`.importance`. A linear programme
finds p on a grid, in units of B; nothing rests on its being solved well. Between neighbours l < u
of a finer grid the payoff is below its chord and p at least its own less (u − l)²/8 times an upper
bound of p''. What p misses there, over q + B, is at most θ, and p + θ (q + B) is above the payoff.
Below the grid the same holds down to v = 0, with v^(−t) >= l^(−t). Beyond its end V, where φ(v) <=
v and ψ(v) <= ψ(V), it is enough that one of the powers k in (2) outweighs at V all negative terms,
of powers up to k, and the payoff.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _quick
from mfopt._runtime._float64 import float64
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo import importance
from mfopt.accounting.monte_carlo.evidence import Payoff, Point, Tilt, ceiling_alone
from mfopt.accounting.monte_carlo.likelihood import Ceilings
from mfopt.accounting.monte_carlo.protocol import DIRECTIONS, SampledDirection
from mfopt.errors import FailureError

_POWERS, _FALLS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24), (1, 2, 4, 8, 16, 32)  # k and t
_LOW, _HIGH = -8.0, 12.0  # log v at the ends of the grid; the upper one counts from ε
_FARTHEST = 25.0
_NODES, _CELL = 250, 1e-3  # of the linear programme; width in log v of the cells of the proof
_ROUNDS, _MISSED, _STRETCH = 4, 1e-3, 100  # of linear programmes; θ that ends them; cells
_LARGE, _ABOVE = 1e6, 1e-6  # of numbers in the linear programme; of what p is to be above 0
_ROUNDING = 1e-9  # relative, of payoffs and of the bound
_TERMS = 1e-13  # relative, of a sum of the terms of p
_RANGE = 700.0  # of log B: float64 ends beyond
_OVERLAP = 1e-12  # relative error of <m, m'> in noise units, of at least 1
_WIDTH, _HAIR = 1e-4, 1e-6  # relative, of σ and ε; of log δ


class Moments(NamedTuple):
    """Moments of Λ at one σ, and ceilings of others.

    Attributes:
      ceilings: of powers above those that are known, and of negative ones.
      point: with the payoff beside the shared component.
      known: E Λ^2, …, E Λ^K.
      remove: the remove direction's proposal of the least of the ceilings.
    """

    ceilings: Ceilings
    point: Point
    known: tuple[float, ...]
    remove: Tilt


class MomentBound:
    """Both directions by :func:`divergence`, for a :class:`~.losses.LikelihoodLoss`."""

    exact = False

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.method = f"{loss.name}, deterministic: polynomials above the payoff, by moments"

    @float64
    def log_deltas(self, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
        try:
            moments = self.loss.moments(Point(noise_multiplier, epsilon))
        except FailureError:  # σ is too small for the ceilings
            return 0.0, 0.0
        remove, add = (math.log(divergence(moments, direction)) for direction in DIRECTIONS)
        return remove, add

    def noise_multiplier(self, epsilon: float, delta: float) -> float:
        start = self.loss.start(epsilon, delta)
        return self._least(lambda x: self.log_deltas(x, epsilon), start, delta, "noise multiplier")

    def epsilon(self, noise_multiplier: float, delta: float) -> float:
        return self._least(lambda x: self.log_deltas(noise_multiplier, x), 2.0, delta, "epsilon")

    @staticmethod
    def _least(
        log_deltas: Callable[[float], tuple[float, float]], start: float, delta: float, name: str
    ) -> float:
        # another solution of a programme at the same x may be a hair above
        target = math.log(delta) - _HAIR

        def excess(x: float) -> float:
            return float(np.max(log_deltas(x))) - target

        return solve.smallest(excess, start, name=name, relative=_WIDTH, least=1e-4)


@_quick.jit
def _log_value(payoff: Payoff, t: jax.Array) -> jax.Array:
    return jnp.asarray(payoff.log_value(t))


@float64
def divergence(moments: Moments, direction: SampledDirection) -> float:
    """Upper bound of H(P, Q) ("remove") or H(Q, P) ("add"), at most 1."""
    ceilings, point = moments.ceilings, moments.point
    tilt = moments.remove if direction == "remove" else importance.mean_tilt(ceilings, point)
    ceiling = ceiling_alone(tilt).value
    with np.errstate(over="ignore"):  # what is beyond range proves nothing
        problem = _Problem.of(moments, direction, tilt)
        share = math.inf if problem is None else problem.solved()
    proved = [
        bound for bound in (ceiling, ceiling * share * (1 + _ROUNDING)) if bound >= 0
    ]  # no NaN
    return max(min([1.0, *proved]), 1e-300)


class _Terms(NamedTuple):
    """Terms of p in units of B; the first ``signed`` are (v − 1)^j/scale^j, j = 0, 1, …

    Attributes:
      scale: of the signed terms.
      powers: of the others, which are v^power e^(−log_mean).
      log_means: logs of the upper bounds of their means.
    """

    signed: int
    scale: float
    powers: np.ndarray
    log_means: np.ndarray

    def values(self, y: np.ndarray) -> np.ndarray:
        """Value of each term at v = e^y, shape (terms, points)."""
        v = np.expm1(y) / self.scale
        signed = v ** np.arange(self.signed)[:, None]
        powers = np.exp(self.powers[:, None] * y - self.log_means[:, None])
        return np.concatenate([signed, powers])

    def curvature(self, weights: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Upper bound of p'' between e^low and e^high for the weights of the terms."""
        lower_value, upper_value = np.expm1(low) / self.scale, np.expm1(high) / self.scale
        total = np.zeros_like(low)
        for j in range(2, self.signed):
            ends = lower_value ** (j - 2), upper_value ** (j - 2)
            largest, smallest = np.maximum(*ends), np.minimum(*ends)
            if j % 2 == 0 and j > 2:
                smallest = np.where((lower_value < 0) & (upper_value > 0), 0.0, smallest)
            weight = weights[j] * j * (j - 1) / self.scale**2
            total += weight * (largest if weight > 0 else smallest)
        powered = zip(weights[self.signed :], self.powers, self.log_means, strict=True)
        for weight, power, log_mean in powered:
            if weight > 0:
                end = high if power > 2 else low
                total += weight * power * (power - 1) * np.exp((power - 2) * end - log_mean)
        return total


class _Problem(NamedTuple):
    """A payoff and the terms that are to be above it.

    Attributes:
      terms: of p.
      costs: upper bounds of the means of the terms, and of their negatives where signed.
      payoff: log v -> payoff over B, rounded up.
      growth: power and log M of q.
      highest: log V.
      linear: whether the payoff is φ, at most v, beyond V.
    """

    terms: _Terms
    costs: tuple[np.ndarray, np.ndarray]
    payoff: Callable[[np.ndarray], np.ndarray]
    growth: tuple[float, float]
    highest: float
    log_ceiling: float
    linear: bool

    @classmethod
    def of(cls, moments: Moments, direction: SampledDirection, tilt: Tilt) -> _Problem | None:
        """The problem; None where numbers are beyond range."""
        ceilings, point, moments_known, _ = moments
        remove, epsilon = direction == "remove", point.epsilon
        highest = min(epsilon + _HIGH, _FARTHEST)
        if not (epsilon + 1 < highest and abs(tilt.log_ceiling) < _RANGE):
            return None
        log_b, order = tilt.log_ceiling, tilt.order
        log_known = log_b - point.payoff.log_peak(order) + order * epsilon
        growth = (1 + order if remove else -order), log_known
        raw = np.array([1.0, 1.0, *moments_known])
        raw = raw[: int(np.argmin(np.append(np.isfinite(raw), False)))]
        scale, costs = _central(raw, _OVERLAP * max(ceilings.largest_square, 1.0))
        if not np.all(np.isfinite(costs)):
            return None
        kind = next(iter(ceilings.chains))
        largest_power = min(_POWERS[-1], ceilings.chains[kind].most + 1)
        powers = [growth]
        powers += [
            (k, ceilings.chain(kind, k - 1)[0]) for k in _POWERS if len(raw) <= k <= largest_power
        ]
        if not remove:
            mean, square = ceilings.mean_square, ceilings.square_of_mean
            powers += [(-t, t * mean / 2 + t**2 * square / 2) for t in _FALLS]
        powers = [power for power in powers if math.isfinite(power[1])]

        def payoff(y: np.ndarray) -> np.ndarray:
            t = epsilon - y if remove else epsilon + y
            # programs for few lengths serve all grids
            padded = np.pad(t, (0, (1 << t.size.bit_length()) - t.size), mode="edge")
            log_value = np.asarray(_log_value(point.payoff, padded))[: t.size]
            log_value = log_value + (y if remove else 0.0)
            return np.exp(log_value - log_b) * (1 + _ROUNDING)

        terms = _Terms(len(raw), scale, *map(np.array, zip(*powers, strict=True)))
        ones = np.ones(len(powers))
        costs_of_all = np.concatenate([costs[0], ones]), costs[1]
        return cls(terms, costs_of_all, payoff, growth, highest, log_b, remove)

    def solved(self) -> float:
        """Bound of the divergence over B; infinite where no p was proven."""
        # most of Λ is about 1
        far = np.linspace(_LOW, self.highest, _NODES)
        nodes = np.unique(np.concatenate([far, np.linspace(-1.5, 3.0, 2 * _NODES)]))
        cells = np.linspace(_LOW, self.highest, math.ceil((self.highest - _LOW) / _CELL))
        raised, best = np.zeros_like(nodes), math.inf
        for _ in range(_ROUNDS):
            weights = self._weights(nodes, raised)
            if weights is None:
                break
            positive, negative = np.maximum(weights, 0.0), np.maximum(-weights, 0.0)
            signed = self.terms.signed
            mean = float(positive @ self.costs[0] + negative[:signed] @ self.costs[1])
            missing, elsewhere = self._missing(weights, cells)
            theta = float(np.max([np.max(missing), elsewhere, 0.0]))  # NaN stays NaN: no bound
            best = min(best, mean + 2 * theta)
            if theta <= _MISSED * mean or theta == math.inf:  # or no number to mend it by
                break
            # where p is below the payoff by most, in each stretch of the grid
            worst = np.arange(0, len(missing), _STRETCH)
            worst += [int(np.argmax(part)) for part in np.split(missing, worst[1:])]
            worst = worst[missing[worst] > 0]
            nodes = np.concatenate([nodes, cells[worst], cells[worst + 1]])
            raised = np.concatenate([raised, np.tile(missing[worst], 2)])
        return best

    def _weights(self, y: np.ndarray, raised: np.ndarray) -> np.ndarray | None:
        """Weights of the terms whose p is above the payoff at e^y, about, by ``raised`` (q + B)."""
        signed, unit = self.terms.signed, self._unit(y)
        values = self.terms.values(y)
        if not np.all(np.isfinite(values)):
            return None
        # the solver takes numbers of moderate size, and misses by some 1e-7 of them
        units = np.maximum(unit, np.max(np.abs(values[:signed]), axis=0) / _LARGE)
        values = np.minimum(values / units, _LARGE)
        required = (self.payoff(y) + raised * unit) / units + np.where(units > unit, _ABOVE, 0.0)
        solution = scipy.optimize.linprog(
            np.concatenate(self.costs),
            A_ub=-np.concatenate([values, -values[:signed]]).T,
            b_ub=-required,
            method="highs",
        )
        if solution.x is None:
            return None
        weights: np.ndarray = np.maximum(solution.x[: len(values)], 0.0)
        weights[:signed] -= np.maximum(solution.x[len(values) :], 0.0)
        return weights

    def _unit(self, y: np.ndarray) -> np.ndarray:
        """(q + B)/B."""
        power, log_mean = self.growth
        return 1 + np.exp(power * y - log_mean)

    def _missing(self, weights: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
        """How far p may be below the payoff, over q + B: in each cell, and below and beyond them.

        Infinite where that is unknown.
        """
        terms = self.terms.values(y)
        rounding = _TERMS * (np.abs(weights) @ np.abs(terms))
        gap = self.payoff(y) - weights @ terms + rounding
        low, high = y[:-1], y[1:]
        width = np.exp(high) * -np.expm1(low - high)
        bend = np.maximum(self.terms.curvature(weights, low, high), 0.0)
        missing = np.maximum(gap[:-1], gap[1:]) + width**2 / 8 * bend * (1 + _ROUNDING)
        unit = self._unit(y)
        below = self._below(weights, y[:1], float(gap[0]))
        tail = 0.0 if self._outweighs(weights, terms[:, -1], float(y[-1])) else math.inf
        return missing / np.minimum(unit[:-1], unit[1:]), float(np.max([below, tail]))

    def _below(self, weights: np.ndarray, lowest_terms: np.ndarray, gap: float) -> float:
        """θ on 0 < v < e^first."""
        powers, signed = self.terms.powers, np.arange(self.terms.signed)
        falls = np.concatenate([np.zeros(signed.size, bool), powers < 0])
        rising = np.where(falls, 0.0, weights)
        nothing = np.concatenate([(-1 / self.terms.scale) ** signed, (powers == 0) * 1.0])
        at_end = float(weights[falls] @ self.terms.values(lowest_terms)[falls, 0])
        limit = 0.0 if self.linear else math.exp(-self.log_ceiling)  # of the payoff at v = 0
        at_zero = limit - float(rising @ nothing) - at_end
        at_zero += _TERMS * (float(np.abs(rising) @ np.abs(nothing)) + at_end)
        bend = self.terms.curvature(rising, np.array([-700.0]), lowest_terms)[0]
        return float(
            np.maximum(at_zero, gap) + math.exp(2 * lowest_terms[0]) / 8 * np.maximum(bend, 0.0)
        )

    def _outweighs(self, weights: np.ndarray, highest_terms: np.ndarray, y: float) -> bool:
        """True if one power keeps p above the payoff beyond the grid."""
        signed, v = self.terms.signed, math.exp(y)
        # coefficients of v^j of the signed terms, at V
        shifted = np.polynomial.Polynomial([-1.0, 1.0]) / self.terms.scale
        raw = np.asarray(np.polynomial.Polynomial(weights[:signed])(shifted).coef, np.float64)
        raw = np.append(raw, np.zeros(signed - raw.size)) * v ** np.arange(signed)
        powers_of_v = ((v + 1) / self.terms.scale) ** np.arange(signed)
        rounding = _TERMS * float(np.abs(weights[:signed]) @ powers_of_v)
        negative = float(np.sum(np.maximum(-raw, 0.0))) + rounding
        end = np.array([y])
        payoff = math.exp(y - self.log_ceiling) if self.linear else float(self.payoff(end)[0])
        powers = {float(j): float(raw[j]) - rounding for j in range(1, signed)}
        for index, power in enumerate(self.terms.powers):
            value = float(weights[signed + index] * highest_terms[signed + index])
            powers[power] = powers.get(power, 0.0) + value
        return any(
            power >= signed - 1 and value * (1 - _ROUNDING) >= negative + payoff
            for power, value in powers.items()
        )


def _central(
    raw: np.ndarray, error_of_factor: float
) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
    """Scale √E(Λ − 1)², and upper bounds of the means of ((Λ − 1)/scale)^j and their negatives.

    Args:
      raw: E Λ^0, E Λ^1, …
      error_of_factor: relative error of e^<m, m'>.
    """
    j = np.arange(len(raw))
    binomial = scipy.special.comb(j[:, None], j[None, :])
    sign = (-1.0) ** (j[:, None] - j[None, :])
    central = (binomial * sign) @ raw
    pairs = np.where(j > 1, j * (j - 1) / 2 + 4, 0.0)  # E Λ^0 and E Λ are 1
    error = binomial @ (raw * pairs * error_of_factor) + 1e-15 * (binomial @ raw) * (j > 1)
    variance = central[2] if len(raw) > 2 else 1.0
    scale = math.sqrt(max(variance, 1e-8))
    central[1:2] = 0.0
    powers = scale**j
    return scale, ((central + error) / powers, (error - central) / powers)
