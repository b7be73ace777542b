"""General banded C: each column has its own entries, zero from the ``bands``-th on."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime._float64 import compiled
from mfopt._runtime._types import PyTree
from mfopt.sampling import BallsInBins
from mfopt.strategies.base import Strategy, check_values
from mfopt.strategies.fields import Array, parameter


class Banded(Strategy):
    """Lower-triangular banded C, not necessarily Toeplitz; defined for n <= n_max.

    Attributes:
      columns: shape (bands, n_max); ``columns[k, j] = C[j + k, j]``. Entries that would lie
        below row n are not used.
    """

    columns: Array = parameter(dimensions=2)
    kind = "banded"
    described = ("bands",)
    scaled_by = "columns"

    @property
    def bands(self) -> int:
        """Number of diagonals that may be non-zero."""
        return self.columns.shape[0]

    @classmethod
    def from_dense(cls, matrix: np.ndarray, bands: int) -> Banded:
        """The first ``bands`` diagonals of ``matrix`` (n, n)."""
        n = matrix.shape[0]
        columns = np.zeros((bands, n))
        for k in range(min(bands, n)):
            columns[k, : n - k] = np.diagonal(matrix, -k)
        return cls(columns)

    def check_size(self, n: int) -> int:
        return self._known_for(self.columns.shape[1], n)

    def entries(self, n: int) -> Array:
        """``columns`` cut to n and with the unused corner set to 0, shape (bands, n)."""
        kept = self.columns[:, : self.check_size(n)]
        # numbers stay NumPy's: JAX would compile each step for each shape
        numbers = jnp if isinstance(kept, jax.Array) else np
        inside = numbers.arange(self.bands)[:, None] + numbers.arange(n)[None, :] < n
        return numbers.where(inside, kept, 0)

    def materialize(self, n: int) -> Array:
        entries = self.entries(n)
        if isinstance(entries, jax.Array):
            return self._materialize(n)
        matrix = np.zeros((n, n))
        for k in range(min(self.bands, n)):
            matrix.reshape(-1)[k * n :: n + 1] = entries[k, : n - k]
        return matrix

    @compiled("n")
    def _materialize(self, n: int) -> Array:
        return self._of_diagonals(self.entries(n))

    @compiled()
    def multiply(self, x: Array) -> Array:
        x = jnp.asarray(x)
        n = x.shape[0]
        weights = self.entries(n).reshape(self.bands, n, *(1,) * (x.ndim - 1))
        padded = jnp.zeros((n + self.bands - 1, *x.shape[1:]), jnp.result_type(x, weights))
        for k in range(self.bands):
            padded = padded.at[k : k + n].add(weights[k] * x)
        return padded[:n]

    @compiled()
    def solve(self, y: Array) -> Array:
        """C⁻¹ y by forward substitution along the band: O(n · bands) per right-hand side."""
        y = jnp.asarray(y)
        n = y.shape[0]
        entries = jnp.asarray(self.entries(n))

        def step(pending: jax.Array, row: tuple[jax.Array, jax.Array]) -> PyTree:
            # pending[k]: what the columns solved so far add to row t + k
            target, column = row
            solution = (target - pending[0]) / column[0]
            shape = (-1,) + (1,) * solution.ndim
            ahead = jnp.concatenate([pending[1:], jnp.zeros_like(pending[:1])])
            added = jnp.concatenate([column[1:], jnp.zeros(1)]).reshape(shape) * solution
            return ahead + added, solution

        start = jnp.zeros((self.bands, *y.shape[1:]), jnp.result_type(y, entries))
        return jax.lax.scan(step, start, (y, entries.T))[1]

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        """Column sums over the epochs, built from shifted bands: O(n · bands) non-zeros."""
        n, b = self.check_size(scheme.iterations), scheme.bins
        entries = self.entries(n)
        column = jnp.broadcast_to(jnp.arange(n), (self.bands, n))
        row = column + jnp.arange(self.bands)[:, None]
        # rows past the end carry zeros; mode="drop" keeps the scatter in range
        return jnp.zeros((n, b)).at[row, column % b].add(entries, mode="drop")

    def column_bands(self, n: int) -> int:
        return min(self.bands, self.check_size(n))

    def most_bands(self, n: int) -> int:
        return self.column_bands(n)

    @compiled("n", "bands")
    def banded_columns(self, n: int, bands: int) -> Array:
        entries = self.entries(n)[:bands]
        return jnp.pad(entries, ((0, bands - entries.shape[0]), (0, 0)))

    def check_entries(self, n: int) -> None:
        entries = np.asarray(self.entries(n))
        check_values(entries, entries[0])
