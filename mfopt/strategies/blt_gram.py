"""Gram matrix of the modes of diag(r)·BLT·diag(d), from the buffers: b² numbers, never n·b.

C has coefficients g·(1, Σ_l ω_l λ_l^(t−1)). Let s_l(t) be what buffer l holds of each mode before
step t, a vector of b numbers: s_l(0) = 0, s_l(t+1) = λ_l s_l(t) + d_t e_q in step t = (epoch e,
bin q), and the modes' entries are m(t) = g r_t (Σ_l ω_l s_l(t) + d_t e_q). For a symmetric H

    <H, G> = Σ_t m(t)ᵀ H m(t) = g² Σ_t r_t² (ωᵀ K(t) ω + 2 d_t ω·y(t) + d_t² H_qq),

with y_l(t) = s_l(t)ᵀ H e_q and K_ll'(t) = s_l(t)ᵀ H s_l'(t), for which

    K(t+1) = Λ K(t) Λ + d_t (Λ y(t) 1ᵀ + 1 y(t)ᵀ Λ) + d_t² H_qq 1 1ᵀ,    Λ = diag(λ).

Within an epoch the buffers are geometric: of mode k they are λ^q S[e, k] up to its own step k, and
λ^(q−1−k) P[e, k] after it. So y(e, q) = Σ_{k<q} λ^(q−1−k) P[e, k] H[k, q] + λ^q Σ_{k>=q} S[e, k]
H[k, q]: for each buffer two products E×b×b. In all 2·d·E·b² multiplications where MᵀM takes n·b²,
and no power of λ is ever divided by another.

G is the derivative of <H, G> in H. All terms are sums and products of numbers >= 0: nothing is
subtracted, so every entry of G has a small relative error (:func:`relative_error`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mfopt._float64 import compiled
from mfopt.sampling import BallsInBins
from mfopt.strategies.blt import BLT
from mfopt.strategies.fields import Array

_BLOCK = 64  # steps of a recursion that are one product
_TINY = 1e-150  # λ = 0 has a logarithm too: the buffer is empty one step later all the same


def product(
    slope: jax.Array, base: BLT, rows: jax.Array, columns: jax.Array, scheme: BallsInBins
) -> jax.Array:
    """<H, G>, differentiable in all but the scheme.

    Args:
      slope: H, (bins, bins); its symmetric part counts.
      base: the BLT.
      rows, columns: r and d, each of shape (n,).
      scheme: bins and epochs.
    """
    epochs, bins = scheme.epochs, scheme.bins
    weight, decay = jnp.asarray(base.scale), jnp.maximum(jnp.asarray(base.decay), _TINY)
    slope = (slope + slope.T) / 2
    spikes = columns.reshape(epochs, bins)
    step = jnp.arange(bins)
    lag = step[None, :] - 1 - step[:, None]  # of bin k (row) in step q (column)

    def buffer(log_decay: jax.Array) -> jax.Array:
        """y_l, shape (epochs, bins)."""

        def epoch(held: jax.Array, spike: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            own = jnp.exp((step + 1) * log_decay) * held + spike
            return jnp.exp((bins - 1 - step) * log_decay) * own, (held, own)

        _, (before, after) = jax.lax.scan(epoch, jnp.zeros(bins), spikes)
        fading = jnp.where(lag >= 0, jnp.exp(jnp.maximum(lag, 0) * log_decay), 0.0)
        return after @ (fading * slope) + jnp.exp(step * log_decay) * (before @ jnp.tril(slope))

    # one buffer after another: (bins, bins) is held once
    beside = jax.lax.map(jax.checkpoint(buffer), jnp.log(decay))
    beside = beside.transpose(1, 2, 0).reshape(epochs * bins, -1)  # y(t)
    own = jnp.tile(jnp.diagonal(slope), epochs)  # H_qq

    pairs = decay[:, None] * decay
    gain = columns[:, None] * decay * beside
    added = gain[:, :, None] + gain[:, None, :] + (columns**2 * own)[:, None, None]
    kept = _recursion(pairs.reshape(-1), added.reshape(epochs * bins, -1))  # K(t)
    square = kept @ jnp.outer(weight, weight).reshape(-1)
    square += 2 * columns * (beside @ weight) + columns**2 * own
    result: jax.Array = jnp.asarray(base.gain) ** 2 * jnp.sum(rows**2 * square)
    return result


def _recursion(factor: jax.Array, added: jax.Array) -> jax.Array:
    """x(t) of x(t+1) = factor·x(t) + added(t), x(0) = 0; shape (steps, p) for factors (p,)."""
    steps, length = added.shape[0], min(_BLOCK, added.shape[0])
    blocks = -(-steps // length)
    padded = jnp.pad(added, ((0, blocks * length - steps), (0, 0))).reshape(blocks, length, -1)
    step, log_factor = jnp.arange(length), jnp.log(factor)[:, None]
    lag = step[None, :] - 1 - step[:, None]
    fading = jnp.where(lag >= 0, jnp.exp(jnp.maximum(lag, 0) * log_factor[..., None]), 0.0)
    inside = jnp.einsum("nip,pij->njp", padded, fading)
    last = jnp.einsum("nip,pi->np", padded, jnp.exp((length - 1 - step) * log_factor))
    over = factor**length

    def block(x: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        return over * x + end, x

    _, begins = jax.lax.scan(block, jnp.zeros_like(factor), last)
    result = inside + begins[:, None, :] * jnp.exp(step * log_factor).T
    return result.reshape(blocks * length, -1)[:steps]


@compiled("scheme")
def gram(base: BLT, rows: Array, columns: Array, scheme: BallsInBins) -> Array:
    """G, shape (bins, bins).

    Args:
      base, rows, columns, scheme: as for :func:`product`.
    """
    rows, columns = jnp.asarray(rows), jnp.asarray(columns)
    slope = jax.grad(lambda h: product(h, base, rows, columns, scheme))
    result: jax.Array = slope(jnp.zeros((scheme.bins, scheme.bins)))
    return result


def relative_error(scheme: BallsInBins) -> float:
    """Largest relative error of an entry of :func:`gram` in float64.

    Each entry is a sum of products of numbers >= 0. Along any path from the parameters to it there
    are at most 2 powers of λ for each epoch, each the exponential of a product that is exact to one
    rounding: what is above e^−745 has a logarithm below 745 and so a relative error below
    (745 + 2)·2u; what is below is 0, in G too but for 1e-150 of it. Beside them there are fewer
    than 16 roundings a step in the recursion of K, 16 an epoch in that of the buffers, and sums
    over at most n terms. To first order in u = 2^-53, and doubled for the rest.
    """
    n, u = scheme.iterations, 2.0**-53
    return 2 * u * (17 * n + scheme.epochs * (16 + 2 * 2 * 747))
