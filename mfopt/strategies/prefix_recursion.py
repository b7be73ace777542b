"""Error of prefix sums through a banded C⁻¹ in O(n·bands²): a recursion on covariances.

The noise y = A C⁻¹ z of prefix sums solves C A⁻¹ y = z, and C A⁻¹ (differences of neighbouring
entries in each row of C) has one band more than C. So y_t is a combination of the ``bands``
noises before it plus a fresh draw, and the covariance of the latest ``bands`` noises, moved from
step to step, holds every variance. For few bands this is far cheaper than the n×n solve.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SEGMENT = 64  # steps whose covariances the backward pass holds at once


def prefix_row_variances(entries: jax.Array) -> jax.Array:
    """Squared row norms of A C⁻¹ for prefix sums A, shape (n,).

    Args:
      entries: shape (bands, n), ``entries[k, j] = C[j + k, j]``; what would lie below row n is
        not used.
    """
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
