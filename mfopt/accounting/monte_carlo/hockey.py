"""Hockey-stick divergence of a Gaussian release, as the payoff of a loss sampled beside it."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import scipy

from mfopt._runtime._arrays import Scalar
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.evidence import HockeyStickPayoff, Point
from mfopt.strategies.fields import Array

_NUDGE = 1e-9  # upwards: rounding of differences
_TERMS = 10  # of the series beyond 20 standard deviations; JAX's 3 leave 4e-9


class GaussianPayoff(NamedTuple):
    """δ₂(t) = H_{e^t}(N(μ, 1), N(0, 1)) = Φ(μ/2 − t/μ) − e^t Φ(−μ/2 − t/μ), either way round."""

    mu: Scalar

    def log_value(self, t: Array) -> Array:
        """log δ₂(t), rounded up; NaN where t is."""
        t = jnp.asarray(t)
        halves = jnp.stack([self.mu / 2 - t / self.mu, -self.mu / 2 - t / self.mu])
        log_tail, shifted = jax.scipy.special.log_ndtr(halves, _TERMS)  # once: half to compile
        ratio = t + shifted - log_tail
        # NaN only where t is: XLA's minimum need not keep it
        capped = jnp.where(ratio > -1e-12, -1e-12, ratio)
        return log_tail + jnp.log(-jnp.expm1(capped)) + _NUDGE

    def log_peak(self, order: float) -> float:
        """log sup_t e^(s t) δ₂(t)."""
        return _log_peak(float(self.mu), order)


@functools.lru_cache(maxsize=4096)  # a search asks for the same orders at many ε
def _log_peak(mu: float, order: float) -> float:
    """log sup_t e^(s t) δ₂(t) of a :class:`GaussianPayoff`.

    With δ₂ = e^a − e^b, s t + log δ₂ has the slope s − 1/(e^(a−b) − 1), and is concave: δ₂ is
    the convolution of a normal density with (1 − e^u)₊, both log-concave. At the root of the
    slope δ₂ = e^a/(1 + s); near it, the value is off by a second order only.
    """
    if order <= 0:
        return 0.0
    log_ratio, log_ndtr = math.log1p(1 / order), scipy.special.log_ndtr

    def above(t: float) -> float:
        upper_tail, lower_tail = (log_ndtr(half - t / mu) for half in (mu / 2, -mu / 2))
        return float(upper_tail - lower_tail - t) - log_ratio

    # at μ -> 0 the peak is the hinge's, at large μ near μ² (s + 1/2)
    low, high = -log_ratio - 1.0, mu**2 * (order + 0.5) + 1.0
    while above(low) <= 0:
        low -= 1 - low
    while above(high) >= 0:
        high += 1 + high
    peak = solve.root(above, low, high)
    return order * peak + float(log_ndtr(mu / 2 - peak / mu)) - math.log1p(order) + _NUDGE


def beside(point: Point, shift: float) -> Point | None:
    """``point`` with the payoff of a Gaussian release of that shift, before division by σ.

    None if the point has another payoff already.
    """
    if not isinstance(point.payoff, HockeyStickPayoff):
        return None
    return point._replace(payoff=GaussianPayoff(shift / point.noise_multiplier))
