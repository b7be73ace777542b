"""Products with banded matrices for many samples at once.

A lower-banded matrix M (n×n) is stored by columns: ``band[d, j]`` = M[j + d, j], 0 from the last
row on. A symmetric banded matrix is stored by its lower half. For products the band is cut into
*tiles*, blocks of two tile widths by one, so that a product is one batched matrix product,
whatever the number of bands; shapes (samples, n).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

_LEAST_WIDTH = 16  # of a tile: narrower ones are slower


def tiles(band: jax.Array) -> jax.Array:
    """Blocks B[t, r, c] = M[t·w + r, t·w + c], r < 2w, c < w; shape (n/w rounded up, 2w, w)."""
    bands, n = band.shape
    width = max(bands, _LEAST_WIDTH)
    count = -(-n // width)
    padded = jnp.pad(band, ((0, 0), (0, count * width - n))).reshape(bands, count, width)
    column = jnp.arange(width)
    lag = jnp.arange(2 * width)[:, None] - column[None, :]
    inside = (lag >= 0) & (lag < bands)
    gathered = padded[jnp.clip(lag, 0, bands - 1), :, column[None, :]]  # (2w, w, count)
    return jnp.where(inside[None], jnp.moveaxis(gathered, 2, 0), 0)


def transposed(band: jax.Array, x: jax.Array) -> jax.Array:
    """Mᵀ x for each row x of ``x`` (samples, n); of few bands differentiable in reverse alone."""
    return _few_bands(band, x) if band.shape[0] <= _LEAST_WIDTH else _by_tiles(band, x)


@jax.custom_vjp
def _few_bands(band: jax.Array, x: jax.Array) -> jax.Array:
    """Lag by lag: a tile would be mostly zeros."""
    bands, n = band.shape

    def of_row(row: jax.Array) -> jax.Array:
        ahead = jnp.pad(row, (0, bands - 1))
        return sum(band[d] * ahead[d : d + n] for d in range(1, bands)) + band[0] * row

    # rows one by one: all at once, XLA would fuse what x is made by into the padding, which takes
    # normal numbers twice the time
    return jax.lax.map(of_row, x)


# the gradient by tiles: sums over samples, lag by lag, would cost ten times the product
_few_bands.defvjp(
    lambda band, x: (_few_bands(band, x), (band, x)),
    lambda saved, cotangent: jax.vjp(_by_tiles, *saved)[1](cotangent),
)


def _by_tiles(band: jax.Array, x: jax.Array) -> jax.Array:
    n = band.shape[1]
    blocks = tiles(band)
    count, width = blocks.shape[0], blocks.shape[2]
    padded = jnp.pad(x, ((0, 0), (0, (count + 1) * width - n))).reshape(-1, count + 1, width)
    tile_sums = jnp.einsum("str,trc->stc", padded[:, :-1], blocks[:, :width])
    below = jnp.einsum("str,trc->stc", padded[:, 1:], blocks[:, width:])
    return (tile_sums + below).reshape(-1, count * width)[:, :n]


def product(blocks: jax.Array, x: jax.Array) -> jax.Array:
    """M x for each row x of ``x`` (samples, n)."""
    count, width = blocks.shape[0], blocks.shape[2]
    n = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (0, count * width - n))).reshape(-1, count, width)
    tile_sums = jnp.einsum("stc,trc->str", padded, blocks[:, :width])
    below = jnp.einsum("stc,trc->str", padded, blocks[:, width:])
    moved = jnp.pad(below[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return (tile_sums + moved).reshape(-1, count * width)[:, :n]


def gram(band: jax.Array) -> jax.Array:
    """The lower half of MᵀM by columns, shape (bands, n): [d, j] = <M[:, j], M[:, j + d]>."""
    bands, n = band.shape
    padded = jnp.pad(band, ((0, bands), (0, bands)))

    def of_one(d: jax.Array) -> jax.Array:
        below = jax.lax.dynamic_slice(padded, (d, 0), (bands, n))  # M[j + d + r, j]
        later = jax.lax.dynamic_slice(padded, (0, d), (bands, n))  # M[j + d + r, j + d]
        return jnp.sum(below * later, axis=0)

    return jax.lax.map(of_one, jnp.arange(bands))


def gram_product(slope: jax.Array, band: jax.Array) -> jax.Array:
    """<``slope``, MᵀM by :func:`gram`>, differentiable in M: shapes (bands, n) both.

    With H the symmetric matrix whose lower band is ``slope``, off the diagonal halved, it is
    <M, M H> and has the gradient 2 M H: products of tiles, in place of a sum for each lag.
    """
    band_tiles = tiles(band)
    fixed = jax.lax.stop_gradient(band_tiles)
    (top, low), (within, next_) = (jnp.split(x, 2, axis=1) for x in (fixed, tiles(slope)))
    within, next_ = (within + jnp.swapaxes(within, 1, 2)) / 2, next_ / 2
    ahead = jnp.pad(top[1:], ((0, 1), (0, 0), (0, 0)))
    from_previous = jnp.pad((low @ jnp.swapaxes(next_, 1, 2))[:-1], ((1, 0), (0, 0), (0, 0)))
    moved = jnp.concatenate([top @ within + from_previous, low @ within + ahead @ next_], axis=1)
    value = jnp.sum(band_tiles * moved)
    return 2 * value - jax.lax.stop_gradient(value)


def factor(gram: jax.Array) -> jax.Array:
    """The lower-banded M with positive diagonal and MᵀM as given: the inverse of :func:`gram`.

    Columns follow from the last to the first: with W the block of the next columns, which is
    triangular, column j below its diagonal is W⁻ᵀ of the overlaps with them.
    """
    reach = gram.shape[0] - 1
    if reach == 0:
        return jnp.sqrt(gram)

    def step(block: jax.Array, overlaps: jax.Array) -> tuple[jax.Array, jax.Array]:
        below = solve_triangular(block, overlaps[1:], trans=1, lower=True)
        top = jnp.sqrt(overlaps[0] - below @ below)
        column = jnp.concatenate([top[None], below])
        moved = jnp.zeros_like(block).at[1:, 1:].set(block[:-1, :-1]).at[:, 0].set(column[:-1])
        return moved, column

    columns = jax.lax.scan(step, jnp.eye(reach), gram.T, reverse=True)[1]
    return columns.T
