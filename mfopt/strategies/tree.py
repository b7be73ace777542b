"""Binary-tree aggregation with the optimal linear decoder (full Honaker)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mfopt._runtime._float64 import compiled
from mfopt.strategies.base import Strategy
from mfopt.strategies.fields import Array


class Tree(Strategy):
    """The square C equivalent to releasing every node of a binary tree, for any n.

    With H the 0/1 matrix of all dyadic intervals inside [0, n), the minimum-variance estimate
    of any workload A from H x + noise has covariance A (HᵀH)⁻¹ Aᵀ (Honaker 2015; Denisov,
    McMahan, Rush, Smith, Thakurta 2022). The lower-triangular C with CᵀC = HᵀH gives the same
    covariance and the same sensitivity, and streams. HᵀH is an ultrametric matrix, so its
    inverse and that inverse's Cholesky factor C⁻¹ are M-matrices, hence C >= 0.
    """

    kind = "tree"

    @compiled("n")
    def materialize(self, n: int) -> Array:
        gram = np.zeros((n := self.check_size(n), n))  # HᵀH: number of nodes holding both i and j
        width = 1
        while width <= n:
            block = np.arange(n) // width
            inside = (block + 1) * width <= n
            gram += (block[:, None] == block[None, :]) & inside[:, None] & inside[None, :]
            width *= 2
        # CᵀC = gram with C lower triangular: a Cholesky factorization from the last row up
        flipped = np.linalg.cholesky(gram[::-1, ::-1])
        return jnp.asarray(np.maximum(flipped.T[::-1, ::-1], 0))

    def column_bands(self, n: int) -> int:
        # the first column of a block reaches its end, and the largest block begins at 0
        return self.check_size(n)
