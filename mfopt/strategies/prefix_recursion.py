"""Error of prefix sums through a banded C⁻¹ in O(n·bands²): a recursion on covariances.

The noise y = A C⁻¹ z of prefix sums solves C A⁻¹ y = z, and C A⁻¹ (differences of neighbouring
entries in each row of C) has one band more than C. With blocks L on its diagonal and U below them,
a block of y is L⁻¹ (z - U y of the block before), so that the covariance of one block follows from
that of the block before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

_BLOCK = 16  # steps of a block at least: smaller products cost their calls


def prefix_row_variances(entries: jax.Array) -> jax.Array:
    """Squared row norms of A C⁻¹ for prefix sums A, shape (n,).

    Args:
      entries: shape (bands, n), ``entries[k, j] = C[j + k, j]``; what would lie below row n is
        not used.
    """
    bands, n = entries.shape
    size = max(bands, _BLOCK)
    blocks = -(-n // size)
    entries = jnp.pad(entries, ((0, size - bands), (0, 0)))
    current = jnp.pad(entries, ((0, 1), (0, 0)))
    following = jnp.pad(entries, ((1, 0), (0, 1)))[:, 1:]
    inside = jnp.arange(size + 1)[:, None] + jnp.arange(n) < n
    # [k, j]: row j + k of column j of C A⁻¹; the identity beyond the end
    columns = jnp.where(inside, current - following, 0)
    identity = jnp.zeros((size + 1, blocks * size - n), entries.dtype).at[0].set(1)
    columns = jnp.concatenate([columns, identity], axis=1).T.reshape(blocks, size, size + 1)
    # one zero more than a row of both blocks has: each column then begins one row lower
    padded = jnp.pad(columns, ((0, 0), (0, 0), (0, size))).reshape(blocks, -1)
    column_blocks = padded[:, : 2 * size**2].reshape(blocks, size, 2 * size)
    fresh = jnp.eye(size, dtype=entries.dtype)

    def step(noise: jax.Array, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        inner, ahead = block[:, :size].T, block[:, size:].T
        half = solve_triangular(inner, noise, lower=True)
        covariance = solve_triangular(inner, half.T, lower=True)
        return fresh + ahead @ covariance @ ahead.T, jnp.diagonal(covariance)

    variances: jax.Array = jax.lax.scan(step, fresh, column_blocks)[1]
    return variances.reshape(-1)[:n]
