"""Plain Monte Carlo: the oracle. Needs on the order of 1/δ samples.

Choquette-Choo et al. 2024, Algorithm 2, here in the bins-dimensional form of
:mod:`mfopt.accounting.monte_carlo.dominating_pair`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _check
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, overlaps
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair, privacy_loss
from mfopt.accounting.monte_carlo.nested import Factor, Less, Nested, coloured
from mfopt.accounting.monte_carlo.overlaps import Gram


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
    """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") by sampling from P or from Q.

    Args:
      pair: the dominating pair.
      noise_multiplier: σ, for C as stored.
      epsilon: ε of the hockey-stick divergence.
      direction: "remove" or "add".
      samples: iid samples, rounded up to whole chunks.
      seed: a pinned seed, or None for the operating system's entropy.
    """
    scaled = scale(pair, noise_multiplier)
    if direction not in _KERNELS:
        raise _check.reject("direction", direction, "must be 'remove' or 'add'")
    kernel = _KERNELS[direction]
    key = chunked.seed_key(seed)
    sums, used = chunked.total(kernel, key, samples, pair.bins, *scaled, epsilon)
    return from_sums(sums[0], sums[1], used)


def scale(pair: DominatingPair, noise_multiplier: float) -> tuple[Gram, Factor]:
    """(S, L/σ): Gram matrix and factor in noise units."""
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    many = isinstance(pair.factor, Nested | Less)
    factor = pair.factor if many else np.asarray(pair.factor)
    return overlaps.scaled(pair.gram, sigma**2, many), factor / sigma


def from_sums(first: float, second: float, samples: int) -> Estimate:
    """Mean and standard error from the sums of f and f² over iid samples."""
    mean = float(first) / samples
    variance = max(float(second) / samples - mean**2, 0.0) * samples / max(samples - 1, 1)
    return Estimate(mean, float(np.sqrt(variance / samples)), samples)


def _remove(
    key: jax.Array, size: int, gram: Gram, factor: Any, epsilon: float
) -> tuple[jax.Array, ...]:
    mode_key, noise_key = jax.random.split(key)
    mode = jax.random.randint(mode_key, (size,), 0, gram.shape[0])
    noise = coloured(jax.random.normal(noise_key, (size, gram.shape[0])), factor)
    loss = privacy_loss(overlaps.rows(gram, mode) + noise - overlaps.diagonal(gram) / 2)
    value = jnp.maximum(-jnp.expm1(epsilon - loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


def _add(
    key: jax.Array, size: int, gram: Gram, factor: Any, epsilon: float
) -> tuple[jax.Array, ...]:
    noise = coloured(jax.random.normal(key, (size, gram.shape[0])), factor)
    loss = privacy_loss(noise - overlaps.diagonal(gram) / 2)
    value = jnp.maximum(-jnp.expm1(epsilon + loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


_KERNELS = {"remove": _remove, "add": _add}
