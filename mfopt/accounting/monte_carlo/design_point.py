"""Design-point importance sampling: δ at any size from a few thousand samples.

P is replaced by R = (1/J) Σ_j N(v_j, σ²I), where each v_j is a smallest shift of a mode that brings
the privacy loss to ε: samples fall where the integrand of the hockey-stick divergence lives.
Every mode gives two components (J = 2·bins): the shift found from itself, along few modes, and the
one found from all modes together. Strategies whose modes overlap partly have mass at both, and an
optimizer would exploit a proposal that misses one of them.
The estimator is unbiased for every choice of shifts; no bound on the weights is proven, so it
calibrates and optimizes but never certifies (that is :mod:`mfopt.accounting.monte_carlo.tilted`).

With x = 1/σ every exponent is x²·(a table row) + x·(a Gaussian), so for frozen samples one
evaluation at another σ costs two logsumexps and no matrix product.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.accounting.monte_carlo.dominating_pair import (
    DominatingPair,
    add_tilt,
    log_hinge,
    privacy_loss,
)

_OUTER, _INNER = 8, 8  # damped fixed point on p; Newton on λ inside


class Draws(NamedTuple):
    """Frozen randomness: component index (samples,) and standard normals (samples, bins).

    Components are stratified and normals come in pairs ±z, so samples i and i + samples/2 form an
    antithetic pair; the estimator stays unbiased.
    """

    component: jax.Array
    normal: jax.Array


class Terms(NamedTuple):
    """Exponents of Y and of log R/Q as polynomials in x = 1/σ (see :func:`exponents`)."""

    component: jax.Array
    loss_linear: jax.Array  # (samples, bins): coefficient of x
    loss_square: jax.Array  # (J, bins), row = component: coefficient of x²
    proposal_linear: jax.Array  # (samples, J)
    proposal_square: jax.Array  # (J, J)


@jax.jit
def shifts(gram: jax.Array, noise_multiplier: jax.Array, epsilon: jax.Array) -> jax.Array:
    """W (2·bins, bins) with v_j = Σ_k W[j, k] m_k a design point of mode j (mod bins).

    Damped fixed point p_j = softmax(u(v_j)), once from p_j on mode j alone and once from p_j
    uniform; along each direction Σ_k p_jk m_k the loss is convex and increasing, so Newton from
    the right of its root decreases to it.
    """
    bins = gram.shape[0]
    scaled = gram / noise_multiplier**2
    modes = jnp.tile(jnp.eye(bins), (2, 1))
    at_modes = jnp.tile(scaled - jnp.diagonal(scaled) / 2, (2, 1))  # row j: u at mode j

    def outer(_: int, p: jax.Array) -> jax.Array:
        move = p @ scaled  # row j: what the direction p_j adds to <m_k, X>/σ²
        step = _step_lengths(modes, at_modes, move, epsilon)
        return (p + jax.nn.softmax(at_modes + step[:, None] * move, axis=1)) / 2

    begin = jnp.concatenate([jnp.eye(bins), jnp.full((bins, bins), 1 / bins)])
    p = jax.lax.fori_loop(0, _OUTER, outer, begin)
    length = _step_lengths(modes, at_modes, p @ scaled, epsilon)
    weights: jax.Array = modes + length[:, None] * p
    return weights


def _step_lengths(
    modes: jax.Array, at_modes: jax.Array, move: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """λ_j >= 0 with Y(m_j + λ_j Σ_k p_jk m_k) = ε; 0 where the mode itself is beyond ε."""
    own, speed = jnp.sum(modes * at_modes, axis=1), jnp.sum(modes * move, axis=1)
    # Y >= u_j - log b, so the root of that line lies to the right of the root of Y
    right = (epsilon + jnp.log(modes.shape[1]) - own) / jnp.maximum(speed, 1e-300)

    def newton(_: int, length: jax.Array) -> jax.Array:
        u = at_modes + length[:, None] * move
        slope = jnp.sum(jax.nn.softmax(u, axis=1) * move, axis=1)
        return jnp.maximum(length - (privacy_loss(u) - epsilon) / slope, 0)

    result: jax.Array = jax.lax.fori_loop(0, _INNER, newton, jnp.maximum(right, 0))
    return result


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(key: jax.Array, samples: int, bins: int) -> Draws:
    """Frozen draws; ``samples`` must be even."""
    offset_key, noise_key = jax.random.split(key)
    half = samples // 2
    component = components(jax.random.randint(offset_key, (), 0, 2 * bins), half, bins)
    normal = jax.random.normal(noise_key, (half, bins))
    return Draws(jnp.concatenate([component, component]), jnp.concatenate([normal, -normal]))


def components(offset: Any, count: int, bins: int) -> Any:
    """So many components from ``offset`` on, all of them about equally often."""
    # a stride near the golden ratio and coprime to 2·bins spreads a part cycle evenly
    stride = next(k for k in range(round(1.236 * bins), 4 * bins) if math.gcd(k, 2 * bins) == 1)
    return (offset + stride * np.arange(count)) % (2 * bins)


def exponents(pair: DominatingPair, weights: jax.Array, draws: Draws) -> Terms:
    """Everything that does not depend on σ: a few b×b products and two of size samples×b×b."""
    shifted = weights @ pair.gram
    proposal = shifted @ weights.T
    linear = draws.normal @ pair.factor.T
    return Terms(
        draws.component,
        linear,
        shifted - jnp.diagonal(pair.gram) / 2,
        linear @ weights.T,
        proposal - jnp.diagonal(proposal) / 2,
    )


def log_values(terms: Terms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log f for each sample (−inf where the loss is below ε), f = (P/R)(1 − e^(ε−Y))₊."""
    x = jnp.exp(-log_sigma)
    loss = privacy_loss(x**2 * terms.loss_square[terms.component] + x * terms.loss_linear)
    ratio = privacy_loss(x**2 * terms.proposal_square[terms.component] + x * terms.proposal_linear)
    return loss - ratio + log_hinge(loss - epsilon)


def log_delta(terms: Terms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log δ̂ = log mean f: smooth and decreasing in log σ for frozen ``terms``."""
    values = log_values(terms, log_sigma, epsilon)
    return jax.scipy.special.logsumexp(values) - jnp.log(values.shape[0])


def log_delta_add(
    pair: DominatingPair, draws: Draws, log_sigma: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """log δ̂ of the other direction, H(Q, P), from samples of N(−t m̄, σ²I).

    m̄ is the mean mode; t is :func:`add_tilt`, and any t is unbiased.

    Args:
      pair: the dominating pair.
      draws: frozen normals, those of the remove direction.
      log_sigma: log σ.
      epsilon: ε of the hockey-stick divergence.
    """
    gram = pair.gram * jnp.exp(-2 * log_sigma)
    half = jnp.diagonal(gram) / 2
    mean_square = jnp.mean(gram)
    t = add_tilt(gram, epsilon)
    products = draws.normal @ pair.factor.T * jnp.exp(-log_sigma) - t * jnp.mean(gram, axis=0)
    loss = privacy_loss(products - half)
    log_weight = t * jnp.mean(products, axis=1) + t**2 * mean_square / 2
    values = log_weight + log_hinge(-epsilon - loss)
    return jax.scipy.special.logsumexp(values) - jnp.log(values.shape[0])
