"""Plain Monte Carlo, and quadrature: the oracles. The former needs on the order of 1/δ samples.

:func:`delta` is Choquette-Choo et al. 2024, Algorithm 2, in the bins-dimensional form of
:mod:`mfopt.accounting.monte_carlo.dominating_pair`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.kept_bins import KeptBins


class Estimate(NamedTuple):
    """A Monte Carlo mean and its standard error: an estimate, not a bound."""

    value: float
    standard_error: float
    samples: int


@float64
def delta(
    pair,
    noise_multiplier,
    epsilon,
    *,
    direction="remove",
    samples=2**17,
    seed=None,
):
    """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") by sampling from P or from Q."""
    scaled, key = KeptBins(*pair).scaled(noise_multiplier), chunked.seed_key(seed)
    sums, used = chunked.total(_KERNELS[direction], key, samples, pair.bins, scaled, epsilon)
    return from_sums(sums[0], sums[1], used)


def from_sums(first, second, samples):
    """Mean and standard error from the sums of f and f² over iid samples."""
    mean = float(first) / samples
    variance = max(float(second) / samples - mean**2, 0.0) * samples / max(samples - 1, 1)
    return Estimate(mean, float(np.sqrt(variance / samples)), samples)


def _remove(key, size, known, epsilon):
    mode_key, noise_key = jax.random.split(key)
    mode = jax.random.randint(mode_key, (size,), 0, known.bins)
    noise = known.noise(jax.random.normal(noise_key, (size, known.bins)))
    loss = known.log_ratio(known.rows(mode) + noise)
    value = jnp.maximum(-jnp.expm1(epsilon - loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


def _add(key, size, known, epsilon):
    loss = known.log_ratio(known.noise(jax.random.normal(key, (size, known.bins))))
    value = jnp.maximum(-jnp.expm1(epsilon + loss), 0)
    return jnp.sum(value), jnp.sum(value**2)


_KERNELS = {"remove": _remove, "add": _add}


def log_sums(exponents):
    """log Σ_j e^x_j of each row; scipy's takes twice as long."""
    top = exponents.max(axis=1, keepdims=True)
    return np.log(np.exp(exponents - top).sum(axis=1)) + top[:, 0]


def mixture(
    modes,
    sigma,
    epsilon,
    *,
    chances=None,
    samples=200_000,
    seed=0,
):
    """{direction: (H, its standard error)} in n dimensions, straight from the definition.

    Args:
      modes: every C x that there is, shape (patterns, n).
      sigma, epsilon: where.
      chances: of the patterns, shape (patterns,); None: all alike.
      samples: of each direction.
      seed: of the samples.
    """
    rng, modes = np.random.default_rng(seed), np.asarray(modes) / sigma
    chances = np.full(len(modes), 1 / len(modes)) if chances is None else chances
    constants = np.log(chances) - np.sum(modes**2, axis=1) / 2
    values = {"remove": [], "add": []}
    for size in np.diff([*range(0, samples, 20_000), samples]):
        noise = rng.normal(size=(size, modes.shape[1]))
        moved = noise + modes[rng.choice(len(modes), size, p=chances)]
        for direction, x, sign in (("remove", moved, -1), ("add", noise, 1)):
            loss = log_sums(x @ modes.T + constants)
            values[direction].append(np.maximum(-np.expm1(epsilon + sign * loss), 0))
    whole = {direction: np.concatenate(parts) for direction, parts in values.items()}
    return {d: (float(v.mean()), float(v.std()) / math.sqrt(v.size)) for d, v in whole.items()}


def two_modes(gram, sigma, epsilon):
    """{direction: H} of two modes with this Gram matrix, by quadrature in the plane."""
    z = np.linspace(-9, 10, 2001)
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    factor = np.linalg.cholesky(gram) / sigma
    first = factor[0, 0] * z[:, None] + 0 * z
    second = factor[1, 0] * z[:, None] + factor[1, 1] * z
    square = np.diagonal(gram) / sigma**2 / 2
    ratio = (np.exp(first - square[0]) + np.exp(second - square[1])) / 2
    density = weight[:, None] * weight
    above = {"remove": ratio - math.exp(epsilon), "add": 1 - math.exp(epsilon) * ratio}
    return {d: float(np.sum(density * np.maximum(excess, 0))) for d, excess in above.items()}
