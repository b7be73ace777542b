"""Upper confidence bound on the mean of [0, 1]-valued samples, by a fixed bet against it.

For iid X_i with mean μ and a bet λ in (0, 1] that does not depend on them, the wealth
Π (1 − λX_i)/(1 − λμ) has mean 1, so by Markov's inequality it exceeds 1/β with probability at most
β. Otherwise

    μ < (1 − exp((Σ log(1 − λX_i) − log(1/β))/n))/λ.

For small X this is mean + λ·(mean square)/2 + log(1/β)/(nλ): with the right λ, Bernstein's bound
without its last term. λ is chosen on a pilot sample. (Betting for bounded means: Waudby-Smith and
Ramdas 2023; the fixed bet is the case that needs nothing but one sum.)

From below, for X_i >= 0 and any λ > 0, Π (1 + λX_i)/(1 + λμ) has mean 1 as well, and log(1 + x) >=
x − x²/2, so that except with probability β

    μ > (exp((λ ΣX_i − λ² ΣX_i²/2 − log(1/β))/n) − 1)/λ.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

ROUNDING = 1e-9  # relative slack for float64 rounding in sums of logarithms and exponentials
COARSE = 2.0**-46  # absolute, on [0, 1]: uniforms have 52 bits, so tails end 8 σ out
BETS = tuple(2.0 ** (-j / 2) for j in range(33))  # 1 .. 1.5e-5; the best of them is near the best


def log_wealth(values: jax.Array) -> jax.Array:
    """Σ log(1 − λX) for each of :data:`BETS`, shapes (samples,) -> (bets,).

    Values above 1 by rounding count as 1. NaN stays NaN, which XLA's minimum does not promise.
    """
    capped = jnp.where(values > 1, 1.0, values)
    return jnp.sum(jnp.log1p(-jnp.asarray(BETS)[:, None] * capped), axis=1)


def upper_bound(log_wealth: float, bet: int, samples: int, beta: float) -> float:
    """μ is at most this, except with probability ``beta``; ``bet`` is an index of BETS.

    Args:
      log_wealth: Σ log(1 − λX) over the samples.
      bet: index of λ in :data:`BETS`, chosen without these samples.
      samples, beta: how many they are, and β.
    """
    return -math.expm1((log_wealth + math.log(beta)) / samples) / BETS[bet]


def lower_bound(total: float, square: float, bet: float, samples: int, beta: float) -> float:
    """μ is at least this, except with probability ``beta``.

    Args:
      total, square: ΣX and ΣX² over the samples, all X >= 0.
      bet: λ > 0, chosen without these samples.
      samples, beta: how many they are, and β.
    """
    log_wealth = bet * total - bet**2 * square / 2 - math.log(1 / beta)
    return math.expm1(log_wealth / samples) / bet


def choose(
    pilot_log_wealth: np.ndarray, pilot: int, samples: int, beta: float
) -> tuple[int, float]:
    """The bet that a pilot expects to bound best with ``samples``, and the bound it expects.

    Args:
      pilot_log_wealth: Σ log(1 − λX) over a pilot for each of :data:`BETS`.
      pilot: samples of the pilot.
      samples, beta: of the bound that will be drawn.
    """
    scaled = np.asarray(pilot_log_wealth) * (samples / pilot)
    expected = [upper_bound(total, j, samples, beta) for j, total in enumerate(scaled)]
    best = int(np.argmin(expected))
    return best, expected[best]
