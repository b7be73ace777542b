"""Plain Monte Carlo: the oracle. Needs on the order of 1/δ samples.

Choquette-Choo et al. 2024, Algorithm 2, here in the bins-dimensional form of
:mod:`mfopt.accounting.monte_carlo.dominating_pair`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.kept_bins import KeptBins


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error: an estimate, not a bound."""

    value: float
    standard_error: float
    samples: int


@float64
def delta(
    pair: DominatingPair,
    noise_multiplier: float,
    epsilon: float,
    *,
    direction: str = "remove",
    samples: int = 2**17,
    seed: int | None = None,
) -> Estimate:
    """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") by sampling from P or from Q."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    scaled = KeptBins(*pair).scaled(sigma)
    if direction not in _KERNELS:
        raise _check.reject("direction", direction, "must be 'remove' or 'add'")
    kernel = _KERNELS[direction]
    key = chunked.seed_key(seed)
    sums, used = chunked.total(kernel, key, samples, pair.bins, scaled, epsilon)
    return from_sums(sums[0], sums[1], used)


def from_sums(first: float, second: float, samples: int) -> Estimate:
    """Mean and standard error from the sums of f and f² over iid samples."""
    mean = float(first) / samples
    variance = max(float(second) / samples - mean**2, 0.0) * samples / max(samples - 1, 1)
    return Estimate(mean, float(np.sqrt(variance / samples)), samples)


def _remove(key: jax.Array, size: int, known: KeptBins, epsilon: float) -> tuple[jax.Array, ...]:
    mode_key, noise_key = jax.random.split(key)
    mode = jax.random.randint(mode_key, (size,), 0, known.bins)
    noise = known.noise(jax.random.normal(noise_key, (size, known.bins)))
    loss = known.log_ratio(known.rows(mode) + noise)
    value = jnp.maximum(-jnp.expm1(epsilon - loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


def _add(key: jax.Array, size: int, known: KeptBins, epsilon: float) -> tuple[jax.Array, ...]:
    loss = known.log_ratio(known.noise(jax.random.normal(key, (size, known.bins))))
    value = jnp.maximum(-jnp.expm1(epsilon + loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


_KERNELS = {"remove": _remove, "add": _add}
