"""Gram matrix of the modes of diag(r)·BLT·diag(d), from the buffers: b² numbers, never n·b.

C has coefficients g·(1, Σ_l ω_l λ_l^(t−1)). Let s_l(t) be what buffer l holds of each mode before
step t, a vector of b numbers: s_l(0) = 0, s_l(t+1) = λ_l s_l(t) + d_t e_q in step t = (epoch e,
bin q), and the modes' entries are m(t) = g r_t (Σ_l ω_l s_l(t) + d_t e_q). For a symmetric H

    <H, G> = Σ_t m(t)ᵀ H m(t) = g² Σ_t r_t² (ωᵀ K(t) ω + 2 d_t ω·y(t) + d_t² H_qq),

with y_l(t) = s_l(t)ᵀ H e_q and K_ll'(t) = s_l(t)ᵀ H s_l'(t), for which

    K(t+1) = Λ K(t) Λ + d_t (Λ y(t) 1ᵀ + 1 y(t)ᵀ Λ) + d_t² H_qq 1 1ᵀ,    Λ = diag(λ).

Within an epoch the buffers are geometric: of mode k they are λ^q S[e, k] up to its own step k, and
λ^(q−1−k) P[e, k] after it. So y(e, q) = Σ_{k<q} λ^(q−1−k) P[e, k] H[k, q] + λ^q Σ_{k>=q} S[e, k]
H[k, q]. No power of λ is ever divided by another: at the beginning a of a panel of columns
λ^(q−1−k) = λ^(q−a) λ^(a−1−k) for all k < a, so y is a product with H by panels.

Groups of neighbouring bins may stand for one: with H constant on blocks of groups, <H, G> knows
only the Gram matrix of the groups' mean modes, and costs E·b numbers and the groups' squared. A
diagonal beside it asks for the modes' own squared norms.

G is the derivative of <H, G> in H. All terms are sums and products of numbers >= 0: nothing is
subtracted, so every entry of G has a small relative error (:func:`relative_error`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._float64 import compiled
from mfopt.sampling import BallsInBins
from mfopt.strategies.blt import BLT
from mfopt.strategies.fields import Array

if TYPE_CHECKING:
    from mfopt.strategies.time_scaled import TimeScaled

_BLOCK = 128  # columns of H that are one product
_UNROLLED = 4  # steps of a recursion
_TINY = 1e-150  # λ = 0 has a logarithm too: the buffer is empty one step later all the same


def product(
    slope: jax.Array,
    strategy: TimeScaled,
    scheme: BallsInBins,
    size: int = 1,
    diagonal: Any = 0.0,
) -> jax.Array:
    """<H, G> + <h, D>, differentiable in all but the scheme.

    Args:
      slope: H, (groups, groups); its symmetric part counts.
      strategy: diag(r) B diag(d) with a BLT for B.
      scheme: bins and epochs.
      size: bins in a group, whose mean mode G is of; the last group may have fewer.
      diagonal: h, (groups,), for D the mean squared norm of each group's modes.
    """
    epochs, bins = scheme.epochs, scheme.bins
    base = cast(BLT, strategy.base)
    rows, columns = map(jnp.asarray, strategy.diagonals(scheme.iterations))
    groups = -(-bins // size)
    counts = np.minimum(size, bins - size * np.arange(groups))
    weight, decay = jnp.asarray(base.scale), jnp.maximum(jnp.asarray(base.decay), _TINY)
    log_decay = jnp.log(decay)[:, None]
    slope = (slope + slope.T) / 2
    slope = slope / counts[:, None] / counts
    own_weight = jnp.diagonal(slope)  # H, the same for all pairs of a group
    extra = jnp.broadcast_to(diagonal / counts, own_weight.shape)  # h, for a bin with itself
    spikes = columns.reshape(epochs, bins)
    step, inside = np.arange(bins), np.arange(size)

    def epoch(state: jax.Array, spike: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        updated = jnp.exp((step + 1) * log_decay) * state + spike
        return jnp.exp((bins - 1 - step) * log_decay) * updated, (state, updated)

    _, parts = jax.lax.scan(epoch, jnp.zeros((len(weight), bins)), spikes)
    # S and P, shape (epochs, buffers, groups, size)
    states, updates = (
        jnp.pad(part, ((0, 0), (0, 0), (0, groups * size - bins))).reshape(epochs, -1, groups, size)
        for part in parts
    )
    # P of each group at its end; padding of the last group is not read
    ends = np.maximum(counts[:, None] - 1 - inside, 0)
    at_ends = jnp.sum(updates * jnp.exp(ends * log_decay[..., None]), axis=3)
    tail = jnp.cumsum(states[..., ::-1], axis=3)[..., ::-1]  # Σ_{k>=q} S inside the group
    earlier, later = _by_panels(slope, at_ends, tail[..., 0], size * log_decay)
    lag = inside[None, :] - 1 - inside[:, None]
    within = jnp.einsum("edgi,dij->edgj", updates, _fading(lag, log_decay))
    beside = (
        jnp.exp(inside * log_decay)[:, None] * earlier[..., None] + own_weight[:, None] * within
    )
    since = later[..., None] + own_weight[:, None] * tail + extra[:, None] * states
    exponents = (size * np.arange(groups)[:, None] + inside) * log_decay[..., None]
    beside += jnp.exp(exponents) * since
    beside = beside.reshape(epochs, -1, groups * size)[..., :bins]
    beside = beside.transpose(0, 2, 1).reshape(epochs * bins, -1)  # y(t)
    own_weight = jnp.tile(jnp.repeat(own_weight + extra, size)[:bins], epochs)  # H_qq

    pairs = decay[:, None] * decay
    gain = columns[:, None] * decay * beside
    added = gain[:, :, None] + gain[:, None, :] + (columns**2 * own_weight)[:, None, None]
    kept = _recursion(pairs.reshape(-1), added.reshape(epochs * bins, -1))  # K(t)
    square = kept @ jnp.outer(weight, weight).reshape(-1)
    square += 2 * columns * (beside @ weight) + columns**2 * own_weight
    return jnp.asarray(base.gain) ** 2 * jnp.sum(rows**2 * square)


def _by_panels(
    slope: jax.Array, at_ends: jax.Array, sums: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Contribution of earlier groups to y at each group's first bin, and of later groups to y/λ^q.

    Args:
      slope: H, (groups, groups).
      at_ends: P at the end of each group, (epochs, buffers, groups).
      sums: S summed over each group, (epochs, buffers, groups).
      log_decay: of a whole group, (buffers, 1).
    """
    groups = len(slope)
    width = min(_BLOCK, groups)
    count = -(-groups // width)
    if count == 1:  # nothing is far: a third less to compile
        indices = np.arange(groups)
        fading = _fading(indices[None, :] - 1 - indices[:, None], log_decay)
        lower = indices[:, None] > indices[None, :]
        earlier = jnp.einsum("edk,dkq->edq", at_ends, fading * slope)
        return earlier, sums @ (lower * slope)
    padding = (0, count * width - groups)
    panels = jnp.pad(slope, ((0, 0), padding)).reshape(groups, count, width).transpose(1, 0, 2)
    indices, inside = np.arange(groups), np.arange(width)
    fading = _fading(inside[None, :] - 1 - inside[:, None], log_decay)
    lower = inside[:, None] > inside[None, :]
    padded_left, padded_held = (jnp.pad(x, ((0, 0), (0, 0), padding)) for x in (at_ends, sums))

    @jax.checkpoint  # the backward pass makes each panel's powers again
    def panel(numbered_panel: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, part = numbered_panel
        begin = number * width
        far = jnp.where(
            indices < begin, jnp.exp(jnp.maximum(begin - 1 - indices, 0) * log_decay), 0.0
        )
        across = jnp.exp(inside * log_decay) * jnp.einsum("edk,kp->edp", at_ends * far, part)
        from_later = jnp.einsum("edk,kp->edp", jnp.where(indices >= begin + width, sums, 0.0), part)
        square = jax.lax.dynamic_slice_in_dim(
            jnp.pad(part, ((0, padding[1]), (0, 0))), begin, width
        )
        own_left, own_held = (
            jax.lax.dynamic_slice_in_dim(x, begin, width, axis=2)
            for x in (padded_left, padded_held)
        )
        across += jnp.einsum("edi,dij->edj", own_left, fading * square)
        return across, from_later + own_held @ (lower * square)

    parts = jax.lax.map(panel, (jnp.arange(count), panels))
    earlier, later = (
        part.transpose(1, 2, 0, 3).reshape(*at_ends.shape[:2], -1)[..., :groups] for part in parts
    )
    return earlier, later


def _fading(lag: np.ndarray, log_decay: jax.Array) -> jax.Array:
    """λ^lag for each buffer where ``lag`` >= 0, else 0."""
    return jnp.where(lag >= 0, jnp.exp(np.maximum(lag, 0) * log_decay[..., None]), 0.0)


def _recursion(factor: jax.Array, added: jax.Array) -> jax.Array:
    """x(t) of x(t+1) = factor·x(t) + added(t), x(0) = 0; shape (steps, p) for factors (p,)."""

    def step(x: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
        return factor * x + entering, x

    # a loop: on a CPU faster than products of blocks of steps
    return jax.lax.scan(step, jnp.zeros_like(factor), added, unroll=_UNROLLED)[1]


@compiled("scheme", "size")
def grouped(strategy: TimeScaled, scheme: BallsInBins, size: int) -> tuple[Array, Array]:
    """G of the groups' mean modes, (groups, groups), and D, (groups,).

    Args:
      strategy: diag(r) B diag(d) with a BLT for B.
      scheme: bins and epochs.
      size: bins in a group.
    """
    groups = -(-scheme.bins // size)

    def value(slope: jax.Array, diagonal: jax.Array) -> jax.Array:
        return product(slope, strategy, scheme, size, diagonal)

    slopes = jax.grad(value, argnums=(0, 1))
    return slopes(jnp.zeros((groups, groups)), jnp.zeros(groups))


def relative_error(scheme: BallsInBins) -> float:
    """Largest relative error of an entry of G in float64, of :func:`grouped` with groups of one.

    Each entry is a sum of products of numbers >= 0. Along any path from the parameters to it there
    are at most 2 powers of λ for each epoch and 4 more, each the exponential of a product that is
    exact to one rounding: what is above e^−745 has a logarithm below 745 and so a relative error
    below (745 + 2)·2u; what is below is 0, in G too but for 1e-150 of it. Beside them there are
    fewer than 16 roundings a step in the recursion of K, 16 an epoch in that of the buffers, and
    sums over at most n terms. To first order in u = 2^-53, and doubled for the rest.
    """
    n, u = scheme.iterations, 2.0**-53
    return 2 * u * (17 * n + 16 * scheme.epochs + (2 * scheme.epochs + 4) * 2 * 747)
