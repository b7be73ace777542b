"""Error of prefix sums through a banded C⁻¹ in O(n·bands²): a recursion on covariances.

The noise y = A C⁻¹ z of prefix sums solves C A⁻¹ y = z, and C A⁻¹ (differences of neighbouring
entries in each row of C) has one band more than C. So y_t is a combination of the ``bands``
noises before it plus a fresh draw, and the covariance of the latest ``bands`` noises, moved from
step to step, holds every variance. For few bands this is far cheaper than the n×n solve. Where
there are many, as many steps as there are bands are moved at once: the same operations, as products
and solves of matrices, which a processor does several times faster.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

_MANY = 32  # bands from which on blocks are faster
_SEGMENT = 64  # steps whose covariances the backward pass holds at once


def prefix_row_variances(entries: jax.Array) -> jax.Array:
    """Squared row norms of A C⁻¹ for prefix sums A, shape (n,).

    Args:
      entries: shape (bands, n), ``entries[k, j] = C[j + k, j]``; what would lie below row n is
        not used.
    """
    return (_by_blocks if entries.shape[0] >= _MANY else _by_steps)(entries)


def _by_blocks(entries: jax.Array) -> jax.Array:
    """Variances of y, shape (n,), by blocks: with C A⁻¹ = L + U, U below blocks on the diagonal, a
    block of y is L⁻¹ (z - U y of the block before)."""
    bands, n = entries.shape
    blocks = -(-n // bands)
    current = jnp.pad(entries, ((0, 1), (0, 0)))
    following = jnp.pad(entries, ((1, 0), (0, 1)))[:, 1:]
    inside = jnp.arange(bands + 1)[:, None] + jnp.arange(n) < n
    # [k, j]: row j + k of column j of C A⁻¹; the identity beyond the end
    columns = jnp.where(inside, current - following, 0)
    identity = jnp.zeros((bands + 1, blocks * bands - n), entries.dtype).at[0].set(1)
    columns = jnp.concatenate([columns, identity], axis=1).T.reshape(blocks, bands, bands + 1)
    # one zero more than a row of both blocks has: each column then begins one row lower
    padded = jnp.pad(columns, ((0, 0), (0, 0), (0, bands))).reshape(blocks, -1)
    column_blocks = padded[:, : 2 * bands**2].reshape(blocks, bands, 2 * bands)
    fresh = jnp.eye(bands, dtype=entries.dtype)

    def step(noise: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        inner, ahead = block[:, :bands].T, block[:, bands:].T
        half = solve_triangular(inner, noise, lower=True)
        covariance = solve_triangular(inner, half.T, lower=True)
        return fresh + ahead @ covariance @ ahead.T, jnp.diagonal(covariance)

    variances: jax.Array = jax.lax.scan(step, fresh, column_blocks)[1]
    return variances.reshape(-1)[:n]


def _by_steps(entries: jax.Array) -> jax.Array:
    bands, n = entries.shape
    lag = jnp.arange(bands)[:, None]
    time = jnp.arange(n)[None, :]
    # rows[k, t] = C[t, t - k], 0 left of the first column
    rows = jnp.where(time >= lag, entries[lag, jnp.maximum(time - lag, 0)], 0)
    diagonal = rows[0]
    # C A⁻¹ at lag k >= 1 is C[t, t-k] - C[t, t-k+1]
    ahead = jnp.concatenate([rows[1:], jnp.zeros((1, n), entries.dtype)]) - rows
    weights = (-ahead / diagonal).T

    padding = -n % _SEGMENT
    steps = (
        jnp.pad(weights, ((0, padding), (0, 0))).reshape(-1, _SEGMENT, bands),
        jnp.pad(1 / diagonal**2, (0, padding)).reshape(-1, _SEGMENT),
    )

    def step(
        covariance: jax.Array, row: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        weight, fresh = row  # covariance of (y_{t-1}, ..., y_{t-bands})
        cross = covariance @ weight
        variance = weight @ cross + fresh
        border = jnp.concatenate([variance[None], cross[:-1]])
        moved = jnp.concatenate([cross[:-1, None], covariance[:-1, :-1]], axis=1)
        return jnp.concatenate([border[None], moved]), variance

    @jax.checkpoint  # the backward pass rebuilds the covariances of a segment
    def segment(
        covariance: jax.Array, rows: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(step, covariance, rows)

    start = jnp.zeros((bands, bands), entries.dtype)
    variances: jax.Array = jax.lax.scan(segment, start, steps)[1]
    return variances.reshape(-1)[:n]
