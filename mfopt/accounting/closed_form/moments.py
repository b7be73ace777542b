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

ORDERS = tuple(range(1, 33))  # λ of the moments accountant as published


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
    noise_scale: float, probability: float, orders: tuple[int, ...] = ORDERS
) -> np.ndarray:
    """α(λ) = log E e^{λ L} of one round at the whole orders λ > 0, shape (orders,)."""
    z = _check.noise_multiplier(noise_scale, "noise_scale")
    q = _check.probability("probability", probability, closed=True)
    if q == 0:
        return np.zeros(len(orders))
    result = []
    for order in orders:
        power = _check.integer("order", order) + 1
        k = np.arange(power + 1)
        log_gamma = scipy.special.gammaln
        log_binomial = log_gamma(power + 1) - log_gamma(k + 1) - log_gamma(power - k + 1)
        chance = scipy.special.xlogy(k, q) + scipy.special.xlog1py(power - k, -q)
        result.append(scipy.special.logsumexp(log_binomial + chance + (k * k - k) / (2 * z * z)))
    # rounding may not make a moment smaller than it is; 0 is its least value
    return np.maximum(np.array(result), 0.0) * (1 + 1e-12) + 1e-14


def epsilon(
    noise_scale: float,
    probability: float,
    rounds: int,
    delta: float,
) -> float:
    """ε of ``rounds`` rounds at δ: the least (T α(λ) + log(1/δ))/λ over λ up to 32, as published.

    A unit that never takes part has ε = 0.

    Args:
      noise_scale: z, the noise over the sensitivity of the estimator (:class:`Estimator`).
      probability: q, chance that a unit takes part in a round.
      rounds, delta: T, and δ in (0, 1).
    """
    delta = _check.probability("delta", delta)
    rounds = _check.integer("rounds", rounds)
    if probability == 0:
        return 0.0
    total = rounds * log_moments(noise_scale, probability)
    return max(float(np.min((total - math.log(delta)) / np.array(ORDERS))), 0.0)


def fedavg(
    noise_scale: float | None,
    probability: float,
    rounds: int,
    *,
    delta: float | None = None,
    epsilon_target: float | None = None,
) -> Guarantee:
    """User-level guarantee of DP-FedAvg or DP-FedSGD; the missing one of (z, ε, δ) is found.

    The noise multiplier of the guarantee is z, the noise's standard deviation over the
    estimator's sensitivity (see :class:`Estimator`).

    Args:
      noise_scale: z, or None to find the smallest.
      probability: q, chance that a user takes part in a round.
      rounds: T.
      delta, epsilon_target: δ and ε, or None to find the smallest.
    """
    statement = (noise_scale, epsilon_target, delta)
    if sum(value is not None for value in statement) != 2:
        raise _check.reject("noise_scale, epsilon, delta", statement, "give exactly two of three")
    rounds = _check.integer("rounds", rounds)
    if delta is None:
        assert noise_scale is not None and epsilon_target is not None
        target = _check.non_negative("epsilon", epsilon_target)
        log_delta = rounds * log_moments(noise_scale, probability) - np.array(ORDERS) * target
        delta = 0.0  # nobody takes part
        if probability > 0:
            delta = reported_delta(math.exp(min(float(np.min(log_delta)), 0.0)) * (1 + 1e-12))
    elif noise_scale is None:
        assert epsilon_target is not None
        target, level = _check.epsilon("epsilon", epsilon_target), delta
        noise_scale = 0.0  # nobody takes part
        if _check.probability("probability", probability, closed=True) > 0:
            noise_scale = solve.smallest(
                lambda z: epsilon(z, probability, rounds, level) - target,
                1.0,
                name="noise scale",
                relative=1e-7,
                largest=1e6,
                gap="ε",
            )
    else:
        target = epsilon(noise_scale, probability, rounds, delta)
    return Guarantee(
        epsilon=target,
        delta=delta,
        noise_multiplier=noise_scale,
        privacy_unit="user",
        adjacency="add-remove",
        method="moments accountant",
        status="bound",
        details={"probability": probability, "rounds": rounds},
    )
