"""The certificate's estimator: importance sampling whose weights have a proven ceiling.

Remove direction. Take an integer order s >= 1. Bins k_0, …, k_s are drawn one at a time,
k_0 uniform and k_{l+1} ∝ exp(Σ_{l'<=l} S[k, k_l']); then X ~ N(Σ_l m_{k_l}, σ²I). With
N_l = mean_k exp(Σ_{l'<l} S[k, k_l']) the value

    f = (Π_{l=1..s} N_l) · e^(−sY) · (1 − e^(ε−Y))₊

has mean H_{e^ε}(P, Q): extend P by s indices drawn from the posterior softmax(u(X)); its density
over the proposal's is Π N_l · e^(−sY). And 0 <= f <= B, since e^(−sy)(1 − e^(ε−y)) peaks at
e^(−sε) s^s/(1+s)^(1+s), and N_l <= max_k mean_i e^(l·S[i,k]) by Hölder.

Add direction. With Jensen's bound Y >= <m̄, X>/σ² − ḡ/2, sampling X ~ N(−t m̄, σ²I) gives values
f = e^(t·mean_i a_i + t²ρ/2)(1 − e^(ε+Y))₊ in [0, e^(−t(ε−ḡ/2) + t²ρ/2) t^t/(1+t)^(1+t)].

Samples are iid, and the upper confidence bound is that of
:mod:`mfopt.accounting.monte_carlo.betting` on f/B in [0, 1].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import _chunks, betting
from mfopt.accounting.monte_carlo.dominating_pair import (
    DominatingPair,
    add_tilt,
    log_hinge,
    privacy_loss,
)
from mfopt.accounting.monte_carlo.plain import scale
from mfopt.strategies import Array

MAX_ORDER = 256
_PILOT = 8192
_ROUNDING = 1e-9  # relative slack for float64 rounding in sums of logarithms and exponentials


class Sums(NamedTuple):
    """Over iid samples: Σ f/B, Σ (f/B)², and Σ log(1 − λ f/B) for each bet λ."""

    total: jax.Array
    square: jax.Array
    log_wealth: jax.Array


def _sums(log_values: jax.Array) -> Sums:
    value = jnp.exp(log_values)
    return Sums(jnp.sum(value), jnp.sum(value**2), betting.log_wealth(value))


class UpperBound(NamedTuple):
    """H <= ``value`` except with probability ``beta`` over the samples drawn here.

    Attributes:
      value: the bound on the hockey-stick divergence.
      mean: the point estimate.
      ceiling: the proven range bound B; the divergence never exceeds it.
      samples: 0 where the ceiling alone was small enough.
      order: s for "remove", t for "add".
    """

    value: float
    mean: float
    ceiling: float
    samples: int
    order: float


@float64
def remove_bound(
    pair: DominatingPair,
    noise_multiplier: float,
    epsilon: float,
    *,
    order: int,
    samples: int,
    beta: float,
    key: jax.Array,
) -> UpperBound:
    """Upper confidence bound on H_{e^ε}(P, Q). ``order`` must not depend on these samples."""
    gram, factor = scale(pair, noise_multiplier)
    log_ceiling = float(log_ceilings(gram, epsilon, MAX_ORDER)[order - 1])
    return _bound(_remove, key, samples, beta, pair.bins, gram, factor, epsilon, order, log_ceiling)


@float64
def add_bound(
    pair: DominatingPair,
    noise_multiplier: float,
    epsilon: float,
    *,
    samples: int,
    beta: float,
    negligible: float,
    key: jax.Array,
) -> UpperBound:
    """Upper confidence bound on H_{e^ε}(Q, P); the ceiling alone where it is <= ``negligible``."""
    gram, factor = scale(pair, noise_multiplier)
    square, half = float(np.mean(gram)), float(np.mean(np.diagonal(gram)) / 2)
    t = float(add_tilt(gram, epsilon))
    # t = 0 is plain sampling from Q, with values in [0, 1]; t log t -> 0
    shape = t * np.log(t) - (1 + t) * np.log1p(t) if t > 0 else 0.0
    log_ceiling = float(-t * (epsilon - half) + t**2 * square / 2 + shape)
    if log_ceiling <= np.log(negligible):
        ceiling = float(np.exp(log_ceiling)) * (1 + _ROUNDING)
        return UpperBound(ceiling, 0.0, ceiling, 0, t)
    return _bound(_add, key, samples, beta, pair.bins, gram, factor, epsilon, t, log_ceiling)


def _bound(
    kernel: Callable[..., tuple],
    key: jax.Array,
    samples: int,
    beta: float,
    bins: int,
    gram: Array,
    factor: Array,
    epsilon: float,
    tilt: float,
    log_ceiling: float,
) -> UpperBound:
    """A pilot chooses the bet; fresh samples give the bound."""
    arguments = (bins, gram, factor, epsilon, tilt, log_ceiling)
    pilot, used = _chunks.total(kernel, _chunks.subkey(key, 0), min(_PILOT, samples), *arguments)
    bet, _ = betting.choose(pilot.log_wealth, used, samples, beta)
    found, used = _chunks.total(kernel, _chunks.subkey(key, 1), samples, *arguments)
    ceiling = float(np.exp(log_ceiling)) * (1 + _ROUNDING)
    scaled = min(betting.upper_bound(float(found.log_wealth[bet]), bet, used, beta), 1.0)
    mean = float(found.total) / used
    return UpperBound(scaled * ceiling * (1 + _ROUNDING), mean * ceiling, ceiling, used, tilt)


@float64
def choose_order(
    pair: DominatingPair,
    noise_multiplier: float,
    epsilon: float,
    *,
    samples: int,
    beta: float,
    key: jax.Array,
    mean: float | None = None,
) -> tuple[int, float]:
    """The order with the least expected bound, and the expected ratio of bound to mean.

    A pilot sample compares second moments from the order of least ceiling upwards (below it both
    grow). The choice is made before, and on other samples than, the certificate's. ``mean`` is
    the divergence itself where it is known better than the pilot can tell.
    """
    gram, factor = scale(pair, noise_multiplier)
    ceilings = np.asarray(log_ceilings(gram, epsilon, MAX_ORDER))
    centre = 1 + int(np.argmin(ceilings))
    best, best_ratio = centre, np.inf
    orders = sorted({min(MAX_ORDER, round(centre * r)) for r in (1, 1.15, 1.3)})
    for index, order in enumerate(orders):
        log_ceiling = float(ceilings[order - 1])
        pilot, used = _chunks.total(
            _remove, _chunks.subkey(key, index), _PILOT, pair.bins,
            gram, factor, epsilon, order, log_ceiling,
        )  # fmt: skip
        found = float(pilot.total) / used
        scaled = found if mean is None else mean * np.exp(-log_ceiling)
        if scaled <= 0:
            continue
        _, expected = betting.choose(pilot.log_wealth, used, samples, beta)
        ratio = 1 + max(expected - found, 0.0) / scaled
        if ratio < best_ratio:
            best, best_ratio = order, ratio
    return best, best_ratio


@float64
def warm_up(pair: DominatingPair) -> None:
    """Compile both directions' kernels for this number of bins; no samples are drawn."""
    gram, factor = scale(pair, 1.0)
    log_ceilings(gram, 1.0, MAX_ORDER)
    for kernel, tilt in ((_remove, 1), (_add, 1.0)):
        _chunks.compile_only(kernel, 2**30, pair.bins, gram, factor, 1.0, tilt, 0.0)


@functools.partial(jax.jit, static_argnums=2)
def log_ceilings(gram: jax.Array, epsilon: float, orders: int) -> jax.Array:
    """log B for s = 1..``orders``, shape (orders,); ``gram`` in noise units."""
    order = jnp.arange(1, orders + 1)

    def log_normalizer(l: jax.Array) -> jax.Array:
        return jnp.max(jax.scipy.special.logsumexp(l * gram, axis=0)) - jnp.log(gram.shape[0])

    normalizers = jax.lax.map(log_normalizer, order.astype(gram.dtype))
    peak = order * jnp.log(order) - (1 + order) * jnp.log1p(order)
    return -order * epsilon + peak + jnp.cumsum(normalizers)


def _remove(
    key: jax.Array,
    size: int,
    gram: jax.Array,
    factor: jax.Array,
    epsilon: jax.Array,
    order: jax.Array,
    log_ceiling: jax.Array,
) -> Sums:
    """:class:`Sums` over ``size`` iid samples; one compilation for every order."""
    return _sums(_remove_log_values(key, size, gram, factor, epsilon, order) - log_ceiling)


def _remove_log_values(
    key: jax.Array,
    size: int,
    gram: jax.Array,
    factor: jax.Array,
    epsilon: jax.Array,
    order: jax.Array,
) -> jax.Array:
    bins = gram.shape[0]
    first_key, chain_key, noise_key = jax.random.split(key, 3)
    first = jax.random.randint(first_key, (size,), 0, bins)

    def extend(l: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        products, log_normalizers = state  # products[k] = Σ_{l'<l} S[k, k_l']
        top = jnp.max(products, axis=1, keepdims=True)
        uniform = jax.random.uniform(jax.random.fold_in(chain_key, l), (size,))
        chosen, mass = _pick(jnp.exp(products - top), uniform)
        return products + gram[chosen], log_normalizers + top[:, 0] + jnp.log(mass / bins)

    products, log_normalizers = jax.lax.fori_loop(
        1, order + 1, extend, (gram[first], jnp.zeros(size))
    )
    noise = jax.random.normal(noise_key, (size, bins)) @ factor.T
    loss = privacy_loss(products + noise - jnp.diagonal(gram) / 2)
    return log_normalizers - order * loss + log_hinge(loss - epsilon)


def _pick(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A column for each row, drawn ∝ ``weights`` (size, bins), and the rows' sums (size,).

    First a block of about √bins columns, then a column in it: running sums over all columns are
    what would cost most.
    """
    size, bins = weights.shape
    width = math.isqrt(bins)
    blocks = -(-bins // width)
    parts = jnp.pad(weights, ((0, 0), (0, blocks * width - bins))).reshape(size, blocks, width)
    ends = jnp.cumsum(jnp.sum(parts, axis=2), axis=1)
    mass = ends[:, -1]
    left = (uniform * mass)[:, None]
    block = jnp.minimum(jnp.sum(ends <= left, axis=1), blocks - 1)
    before = jnp.where(block > 0, ends[jnp.arange(size), block - 1], 0.0)
    inside = jnp.cumsum(parts[jnp.arange(size), block], axis=1)
    column = jnp.sum(before[:, None] + inside <= left, axis=1)
    return jnp.minimum(block * width + jnp.minimum(column, width - 1), bins - 1), mass


def _add(
    key: jax.Array,
    size: int,
    gram: jax.Array,
    factor: jax.Array,
    epsilon: jax.Array,
    t: jax.Array,
    log_ceiling: jax.Array,
) -> Sums:
    """:class:`Sums` of the add direction over ``size`` iid samples."""
    noise = jax.random.normal(key, (size, gram.shape[0])) @ factor.T
    products = noise - t * jnp.mean(gram, axis=0)
    loss = privacy_loss(products - jnp.diagonal(gram) / 2)
    log_weight = t * jnp.mean(products, axis=1) + t**2 * jnp.mean(gram) / 2
    return _sums(log_weight + log_hinge(-epsilon - loss) - log_ceiling)
