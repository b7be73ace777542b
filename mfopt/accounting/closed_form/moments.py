"""Moments (Rényi) accountant of the sampled Gaussian, for DP-FedAvg and DP-FedSGD.

McMahan, Ramage, Talwar, Zhang 2018, Theorem 1: each round samples users with probability q and
adds N(0, σ²) to an estimate of their mean update with sensitivity S; the account is that of the
sampled Gaussian mechanism with noise scale z = σ/S. The moment of integer order λ of one round's
loss is λ times its Rényi divergence of order λ + 1, the larger of both adjacency directions
(Mironov, Talwar, Zhang 2019, Theorem 5); moments add over rounds. :func:`mfopt.accounting.account`
with Poisson sampling is the tighter account of the same mechanism.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.guarantee import Guarantee, reported_delta

ORDERS = np.arange(1, 33)  # λ of the moments accountant as published


def log_moments(noise_scale: float, probability: float) -> np.ndarray:
    """α(λ) = log E e^{λ L} of one round at λ = 1, …, 32, shape (32,)."""
    z = _check.noise_multiplier(noise_scale, "noise_scale")
    q = _check.probability("probability", probability, closed=True)
    accountant = rdp_privacy_accountant.RdpAccountant(ORDERS + 1)
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)))
    # rounding may not make a moment smaller than it is; 0 is its least value
    return np.maximum(accountant.rdp * ORDERS, 0.0) * (1 + 1e-12) + 1e-14


def epsilon(
    noise_scale: float,
    probability: float,
    rounds: int,
    delta: float,
) -> float:
    """ε of ``rounds`` rounds at δ: the least (T α(λ) + log(1/δ))/λ over λ up to 32, as published.

    A unit that never takes part has ε = 0.

    Args:
      noise_scale: z, the noise over the sensitivity of the average.
      probability: q, chance that a unit takes part in a round.
      rounds, delta: T, and δ in (0, 1).
    """
    delta = _check.probability("delta", delta)
    rounds = _check.integer("rounds", rounds)
    if probability == 0:
        return 0.0
    total = rounds * log_moments(noise_scale, probability)
    return max(float(np.min((total - math.log(delta)) / ORDERS)), 0.0)


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
    sensitivity of the average.

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
        log_delta = rounds * log_moments(noise_scale, probability) - ORDERS * target
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
