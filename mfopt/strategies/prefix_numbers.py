"""Error of prefix sums through a banded C⁻¹ of numbers, and its slope: nothing is compiled.

The recursion of :mod:`mfopt.strategies.prefix_recursion`, by blocks, in products of matrices that
NumPy hands to the BLAS, and its derivative written out: a search of a new size begins at once, and
an evaluation costs no more than what a compiler makes of the recursion.

C A⁻¹ has blocks L_k on its diagonal and U_k left of them. The noise of a block is
y_k = T_k z_k - R_k y_{k-1} with T = L⁻¹ and R = T U, so its covariance is
W_k = T_k T_kᵀ + R_k W_{k-1} R_kᵀ, and V_k = I + R_{k+1}ᵀ V_{k+1} R_{k+1} is the slope of Σ tr W
along W_k.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

_BLOCK = 32  # steps of a block at least: smaller products cost their calls


class _Blocks(NamedTuple):
    """T, R and W of each block, shape (blocks, size, size); R of the first one is 0."""

    fresh: np.ndarray
    carried: np.ndarray
    covariance: np.ndarray


def row_variances(entries: np.ndarray) -> np.ndarray:
    """Squared row norms of A C⁻¹ for prefix sums A, shape (n,).

    Args:
      entries: shape (bands, n), ``entries[k, j] = C[j + k, j]``; what would lie below row n is
        not used.
    """
    covariance = _forward(entries).covariance
    variances: np.ndarray = np.diagonal(covariance, axis1=1, axis2=2).reshape(-1)
    return variances[: entries.shape[1]]


def total(entries: np.ndarray) -> tuple[float, np.ndarray]:
    """Σ of :func:`row_variances`, and its slope along ``entries``, shape (bands, n)."""
    n = entries.shape[1]
    fresh, carried, covariance = _forward(entries)
    blocks, size, _ = fresh.shape
    value = float(np.trace(covariance, axis1=1, axis2=2).sum()) - (blocks * size - n)
    along = np.empty_like(fresh)  # V
    moved = np.zeros_like(fresh)  # V R
    along[-1] = np.eye(size)
    for k in range(blocks - 1, 0, -1):
        np.matmul(along[k], carried[k], out=moved[k])
        np.matmul(carried[k].T, moved[k], out=along[k - 1])
        along[k - 1].flat[:: size + 1] += 1
    turned = np.swapaxes(fresh, 1, 2)
    slope = np.zeros((blocks, size, 2 * size))  # of both blocks of a column, transposed
    slope[:, :, :size] = np.swapaxes(turned @ (along @ covariance), 1, 2)
    slope[:-1, :, size:] = -np.swapaxes(turned[1:] @ (moved[1:] @ covariance[:-1]), 1, 2)
    return value, -2 * _of_entries(slope, *entries.shape)


def _forward(entries: np.ndarray) -> _Blocks:
    columns = _columns(entries)
    blocks, size, _ = columns.shape
    fresh, carried = np.empty((2, blocks, size, size))
    for inverse, block in zip(fresh, columns, strict=True):
        # the transpose of L is upper triangular, and as Fortran sees it L is
        inverted, singular = scipy.linalg.lapack.dtrtri(block[:, :size].T, lower=1)
        inverse[:] = np.nan if singular else inverted
    carried[0] = 0
    np.matmul(fresh[1:], np.swapaxes(columns[:-1, :, size:], 1, 2), out=carried[1:])
    covariance = fresh @ np.swapaxes(fresh, 1, 2)
    for k in range(1, blocks):
        covariance[k] += carried[k] @ covariance[k - 1] @ carried[k].T
    return _Blocks(fresh, carried, covariance)


def _columns(entries: np.ndarray) -> np.ndarray:
    """C A⁻¹ by blocks of columns: [k, j, i] is row i, from the block's first one on, of column j.

    Shape (blocks, size, 2 size); the identity beyond the end.
    """
    bands, n = entries.shape
    size = max(bands, _BLOCK)
    blocks = -(-n // size)
    columns = np.zeros((blocks * size, 2 * size + 1))
    columns[:n, :bands] = entries.T
    columns[: n - 1, 1 : bands + 1] -= entries[:, 1:].T
    for j in range(max(n - bands, 0), n):
        columns[j, n - j :] = 0
    columns[n:, 0] = 1
    # one entry more than both blocks have rows: each column then begins one row lower
    flat = columns.reshape(blocks, -1)[:, : 2 * size**2]
    return flat.reshape(blocks, size, 2 * size)


def _of_entries(slope: np.ndarray, bands: int, n: int) -> np.ndarray:
    """Adjoint of :func:`_columns`, shape (bands, n)."""
    blocks, size, _ = slope.shape
    columns = np.zeros((blocks, size * (2 * size + 1)))
    columns[:, : 2 * size**2] = slope.reshape(blocks, -1)
    columns = columns.reshape(-1, 2 * size + 1)[:n]
    result = columns[:, :bands].T.copy()
    result[:, 1:] -= columns[:-1, 1 : bands + 1].T
    for k in range(bands):
        result[k, n - k :] = 0
    return result
