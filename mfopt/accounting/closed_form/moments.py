"""Moments (Rényi) accountant of the sampled Gaussian, for DP-FedAvg and DP-FedSGD.

McMahan, Ramage, Talwar, Zhang 2018, Theorem 1: each round samples users with probability q and
adds N(0, σ²) to an estimate of their mean update with sensitivity S; the account is that of the
sampled Gaussian mechanism with noise scale z = σ/S. The moment of integer order λ of one round's
loss is log Σ_k C(λ+1, k) (1-q)^{λ+1-k} q^k e^{(k²-k)/(2z²)} (Abadi et al. 2016; Mironov, Talwar,
Zhang 2019, section 3.3), the larger of both adjacency directions (their Theorem 5); moments add
over rounds. :func:`mfopt.accounting.account` with Poisson sampling is the tighter account of the
same mechanism.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.guarantee import Guarantee, reported_delta

Conversion = Literal["moments", "improved"]
ORDERS = tuple(range(1, 33))  # λ of the moments accountant as published
# of the improved conversion: fractions of the order where the noise is small, whole ones beyond
MANY_ORDERS = (*np.geomspace(1e-3, 10.0, 80).tolist(), *range(11, 257), 512, 1024)


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Sensitivity of DP-FedAvg's and DP-FedSGD's estimators of the mean update.

    With per-user updates of w_k Δ_k of norm at most ``clip_norm``, selected with ``probability``:
    the fixed denominator q W has sensitivity S/(q W), the clipped denominator
    max(q W_min, Σ w_k) has 2S/(q W_min) (McMahan et al. 2018, Lemma 1).

    Attributes:
      clip_norm, probability: S and q.
      weight: W = Σ_k w_k for the fixed denominator, W_min for the clipped one.
      kind: "fixed" or "clipped".
    """

    clip_norm: float
    probability: float
    weight: float
    kind: Literal["fixed", "clipped"] = "fixed"

    def __post_init__(self) -> None:
        _check.positive("clip_norm", self.clip_norm)
        if _check.probability("probability", self.probability, closed=True) == 0:
            raise _check.reject("probability", self.probability, "must be greater than 0")
        _check.positive("weight", self.weight)
        if self.kind not in ("fixed", "clipped"):
            raise _check.reject("kind", self.kind, "must be 'fixed' or 'clipped'")

    @property
    def sensitivity(self) -> float:
        """Largest change of the estimate by one user, in the units of ``clip_norm``.

        >>> Estimator(clip_norm=15.0, probability=0.001, weight=1_250_000).sensitivity
        0.012
        """
        factor = 2 if self.kind == "clipped" else 1
        return factor * self.clip_norm / (self.probability * self.weight)

    def noise_scale(self, standard_deviation: float) -> float:
        """z = σ / sensitivity, for noise of ``standard_deviation`` on the estimate."""
        return _check.positive("standard_deviation", standard_deviation) / self.sensitivity


def log_moments(
    noise_scale: float, probability: float, orders: tuple[float, ...] = ORDERS
) -> np.ndarray:
    """α(λ) = log E e^{λ L} of one round at the orders λ > 0, shape (orders,).

    Whole orders by the binomial sum, others by the integral that it is.
    """
    z = _check.noise_multiplier(noise_scale, "noise_scale")
    q = _check.probability("probability", probability, closed=True)
    if q == 0:
        return np.zeros(len(orders))
    result = []
    for order in orders:
        if order != int(order):
            result.append(_integral(z, q, 1 + _check.positive("order", order)))
            continue
        power = _check.integer("order", int(order)) + 1
        k = np.arange(power + 1)
        log_gamma = scipy.special.gammaln
        log_binomial = log_gamma(power + 1) - log_gamma(k + 1) - log_gamma(power - k + 1)
        chance = scipy.special.xlogy(k, q) + scipy.special.xlog1py(power - k, -q)
        result.append(scipy.special.logsumexp(log_binomial + chance + (k * k - k) / (2 * z * z)))
    # rounding may not make a moment smaller than it is; 0 is its least value
    return np.maximum(np.array(result), 0.0) * (1 + 1e-12) + 1e-14


def _integral(z: float, q: float, power: float) -> float:
    """log E ((1-q) + q e^{t/z - 1/(2z²)})^power, t ~ N(0, 1).

    By the trapezoidal rule, whose error falls as e^{-2π d/h} with the spacing h, d = πz being
    the distance of the integrand's singularities from the line.
    """
    spacing = min(0.02, z / 20)
    t = np.arange(-40.0, power / z + 40.0, spacing)
    log_ratio = np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, math.log(q) + t / z - 0.5 / z**2)
    log_terms = power * log_ratio - 0.5 * t * t
    log_total = float(scipy.special.logsumexp(log_terms))
    return log_total + math.log(spacing) - 0.5 * math.log(2 * math.pi)


def epsilon(
    noise_scale: float,
    probability: float,
    rounds: int,
    delta: float,
    *,
    conversion: Conversion = "moments",
) -> float:
    """ε of ``rounds`` rounds at δ, the least over the orders.

    "moments" is the published bound ε = (T α(λ) + log(1/δ))/λ with λ up to 32; "improved"
    converts each Rényi order α = λ + 1 as Canonne, Kamath, Steinke 2020 (Proposition 12) do, over
    :data:`MANY_ORDERS`. A unit that never takes part has ε = 0.

    Args:
      noise_scale: z, the noise over the sensitivity of the estimator (:class:`Estimator`).
      probability: q, chance that a unit takes part in a round.
      rounds, delta: T, and δ in (0, 1).
      conversion: from moments to (ε, δ), as above.
    """
    delta = _check.probability("delta", delta)
    rounds = _check.integer("rounds", rounds)
    if probability == 0:
        return 0.0
    if conversion not in ("moments", "improved"):
        raise _check.reject("conversion", conversion, "must be 'moments' or 'improved'")
    orders = MANY_ORDERS if conversion == "improved" else ORDERS
    order = np.array(orders, dtype=np.float64)
    total = rounds * log_moments(noise_scale, probability, orders)
    values = (total - math.log(delta)) / order
    if conversion == "improved":
        alpha = order + 1
        values = total / order + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / order
    return max(float(np.min(values)), 0.0)


def fedavg(
    noise_scale: float | None,
    probability: float,
    rounds: int,
    *,
    delta: float | None = None,
    epsilon_target: float | None = None,
    conversion: Conversion = "moments",
) -> Guarantee:
    """User-level guarantee of DP-FedAvg or DP-FedSGD; the missing one of (z, ε, δ) is found.

    The noise multiplier of the guarantee is z, the noise's standard deviation over the
    estimator's sensitivity (see :class:`Estimator`).

    Args:
      noise_scale: z, or None to find the smallest.
      probability: q, chance that a user takes part in a round.
      rounds: T.
      delta, epsilon_target: δ and ε, or None to find the smallest.
      conversion: as for :func:`epsilon`.
    """
    statement = (noise_scale, epsilon_target, delta)
    if sum(value is not None for value in statement) != 2:
        raise _check.reject("noise_scale, epsilon, delta", statement, "give exactly two of three")
    rounds = _check.integer("rounds", rounds)
    if delta is None:
        assert noise_scale is not None and epsilon_target is not None
        target = _check.non_negative("epsilon", epsilon_target)
        orders = MANY_ORDERS if conversion == "improved" else ORDERS
        order = np.array(orders, dtype=np.float64)
        total = rounds * log_moments(noise_scale, probability, orders)
        log_delta = total - order * target
        if conversion == "improved":
            log_delta += order * np.log1p(-1 / (order + 1)) - np.log(order + 1)
        delta = 0.0  # nobody takes part
        if probability > 0:
            delta = reported_delta(math.exp(min(float(np.min(log_delta)), 0.0)) * (1 + 1e-12))
    elif noise_scale is None:
        assert epsilon_target is not None
        target, level = _check.epsilon("epsilon", epsilon_target), delta
        noise_scale = 0.0  # nobody takes part
        if _check.probability("probability", probability, closed=True) > 0:
            noise_scale = solve.smallest(
                lambda z: epsilon(z, probability, rounds, level, conversion=conversion) - target,
                1.0,
                name="noise scale",
                relative=1e-7,
                largest=1e6,
                gap="ε",
            )
    else:
        target = epsilon(noise_scale, probability, rounds, delta, conversion=conversion)
    return Guarantee(
        epsilon=target,
        delta=delta,
        noise_multiplier=noise_scale,
        privacy_unit="user",
        adjacency="add-remove",
        method=f"moments accountant, {conversion} conversion",
        status="bound",
        details={"probability": probability, "rounds": rounds},
    )
