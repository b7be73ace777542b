"""C = diag(r) B diag(d): any strategy between two positive diagonals that vary with time.

A Toeplitz C treats every step alike, yet a run has a beginning and an end: what is added late is
seen by few queries, and under amplification the best C is far from Toeplitz. Two diagonals make
up for nearly all of that, and C⁻¹z = diag(1/d) B⁻¹ diag(1/r) z is streamed in the memory of B.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import compiled
from mfopt.sampling import BallsInBins, BinScheme
from mfopt.strategies import blt_gram
from mfopt.strategies.base import Strategy
from mfopt.strategies.blt import BLT
from mfopt.strategies.fields import Array, inner, parameter

# Within these bounds no product of r, d and an entry of B overflows or is lost.
_SMALLEST, _LARGEST = 1e-30, 1e30
_MANY = 128  # bins or epochs, beyond which G is formed from a BLT's buffers
# Entries of the modes from which on <H, G> is: 16 × 128 in 1.5 ms instead of 9, for 0.6 s more of
# compilation; a search asks for it some 150 times.
_PAYS = 2**17


class TimeScaled(Strategy):
    """C[t, s] = rows[t]·B[t, s]·columns[s], as non-negative as B.

    Defined for as many iterations as the diagonals have entries. A diagonal of one entry is
    constant, for any n; left out, it is 1.

    Attributes:
      base: B, any strategy that is not time-scaled itself.
      rows: r > 0, shape (n_max,) or (1,).
      columns: d > 0, shape (n_max,) or (1,).
    """

    base: Strategy = inner()
    rows: Array = parameter(dimensions=1, default=(1.0,))
    columns: Array = parameter(dimensions=1, default=(1.0,))
    kind = "time-scaled"
    scaled_by = "columns"

    def check_parameters(self) -> None:
        if isinstance(self.base, TimeScaled):
            raise _check.reject(
                "base", self.base.kind, "is time-scaled already", "Multiply the diagonals instead."
            )
        rows, columns = len(self.rows), len(self.columns)
        if rows != columns and 1 not in (rows, columns):
            raise _check.reject("rows, columns", (rows, columns), "must be equally long")

    def check_size(self, n: int) -> int:
        n, known = self.base.check_size(n), max(len(self.rows), len(self.columns))
        return n if known == 1 else self._known_for(known, n)

    def diagonals(self, n: int) -> tuple[Array, Array]:
        """(r, d), each of shape (n,)."""
        self.check_size(n)
        rows, columns = (
            # numbers stay NumPy's: JAX would compile either step for each length
            (jnp if isinstance(x, jax.Array) else np).broadcast_to(x[:n], (n,))
            for x in (self.rows, self.columns)
        )
        return rows, columns

    def _along(self, x: Array) -> tuple[Array, Array]:
        """:meth:`diagonals`, for multiplication with ``x`` of shape (n, ...)."""
        rows, columns = self.diagonals(x.shape[0])
        shape = -1, *(1,) * (x.ndim - 1)
        return rows.reshape(shape), columns.reshape(shape)

    @compiled("n")
    def materialize(self, n: int) -> Array:
        rows, columns = self.diagonals(n)
        return rows[:, None] * jnp.asarray(self.base.materialize(n)) * columns[None, :]

    def scaled_column(self, n: int) -> tuple[Array, Array, Array] | None:
        # a subclass may have other entries
        column = self.base.toeplitz_column(n) if type(self) is TimeScaled else None
        return None if column is None else (column, *self.diagonals(n))

    def column_bands(self, n: int) -> int:
        return self.base.column_bands(self.check_size(n))

    def most_bands(self, n: int) -> int:
        return self.base.most_bands(self.check_size(n))

    @compiled("n", "bands")
    def banded_columns(self, n: int, bands: int) -> Array:
        rows, columns = self.diagonals(n)
        row = jnp.clip(jnp.arange(bands)[:, None] + jnp.arange(n)[None, :], 0, n - 1)
        return jnp.asarray(rows)[row] * jnp.asarray(self.base.banded_columns(n, bands)) * columns

    def inverse_arrays(self, n: int) -> dict[str, np.ndarray]:
        """Arrays of the base; draws are to be divided by r and outputs by d."""
        return {f"base_{name}": value for name, value in self.base.inverse_arrays(n).items()}

    def multiply(self, x: Array) -> Array:
        rows, columns = self._along(x)
        return rows * self.base.multiply(columns * x)

    @compiled()
    def solve(self, y: Array) -> Array:
        y = jnp.asarray(y)
        rows, columns = self._along(y)
        return jnp.asarray(self.base.solve(y / rows)) / columns

    def solve_transposed(self, y: Array) -> Array:
        rows, columns = self._along(y)
        return self.base.solve_transposed(y / columns) / rows

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        """Shape (n, bins); for a Toeplitz B in O(n²) time and memory O(n·(bins + 2 epochs)).

        Between epochs j <= e, B is a bins×bins block T_{e-j}, and in epoch e the mode of bin i is
        Σ_{j<=e} d[j, i] T_{e-j}[:, i]: for each bin a small product over earlier epochs, of which
        a banded B knows few.
        """
        n = self.check_size(scheme.iterations)
        epochs, bins = scheme.epochs, scheme.bins
        rows, columns = self.diagonals(n)
        column = self.base.toeplitz_column(n)
        if column is None:
            return rows[:, None] * jnp.asarray(self.base.weighted_modes(columns, scheme))
        distances = min(epochs, (self.base.most_bands(n) + bins - 2) // bins + 1)  # T_m != 0
        blocks = _blocks(jnp.asarray(column), distances, bins)
        earlier = jnp.arange(epochs)[:, None] - jnp.arange(distances)[None, :]
        # by epoch e, distance m and bin: d of epoch e - m
        factors = jnp.where(
            (earlier >= 0)[:, :, None],
            jnp.asarray(columns).reshape(epochs, bins)[jnp.clip(earlier, 0)],
            0,
        )
        modes = jnp.einsum("emi,mqi->eqi", factors, blocks)
        return rows[:, None] * modes.reshape(n, bins)

    def gram_product(self, slope: Array, scheme: BallsInBins) -> jax.Array:
        pays = scheme.iterations * scheme.bins >= _PAYS
        if not (self._of_buffers() and (pays or self.has_structured_gram(scheme))):
            return super().gram_product(slope, scheme)
        return blt_gram.product(jnp.asarray(slope), self, scheme)

    def grouped_gram(self, scheme: BallsInBins, size: int) -> tuple[Array, Array]:
        if not self.has_structured_gram(scheme):
            return super().grouped_gram(scheme, size)
        return blt_gram.grouped(self, scheme, size)

    def grouped_product(
        self, slope: Array, diagonal: Array, scheme: BallsInBins, size: int
    ) -> jax.Array:
        if not self.has_structured_gram(scheme):
            return super().grouped_product(slope, diagonal, scheme, size)
        slopes = jnp.asarray(slope), jnp.asarray(diagonal)
        return blt_gram.product(slopes[0], self, scheme, size, slopes[1])

    def has_structured_gram(self, scheme: BallsInBins) -> bool:
        """True for a BLT base with too many modes, or epochs, to form the modes."""
        return self._of_buffers() and has_many_modes(scheme)

    def _of_buffers(self) -> bool:
        """True if :mod:`blt_gram` supports this base."""
        return type(self) is TimeScaled and type(self.base) is BLT

    def structured_gram(self, scheme: BallsInBins) -> tuple[Array, float]:
        return blt_gram.grouped(self, scheme, 1)[0], blt_gram.relative_error(scheme)

    def check_entries(self, n: int) -> None:
        self.base.check_entries(self.check_size(n))
        for name in ("rows", "columns"):
            values = np.asarray(getattr(self, name))
            if not np.all((values >= _SMALLEST) & (values <= _LARGEST)):
                rule = f"must lie in [{_SMALLEST:g}, {_LARGEST:g}]"
                raise _check.reject(name, (float(np.min(values)), float(np.max(values))), rule)


def has_many_modes(scheme: BinScheme) -> bool:
    """Return True if there are too many bins or epochs to form the modes when G is known without
    them."""
    return max(scheme.bins, scheme.epochs) > _MANY


def _blocks(coefs: jax.Array, epochs: int, bins: int) -> jax.Array:
    """T[m, q, i] = coefs[m·bins + q - i], 0 for negative lags: blocks of a Toeplitz matrix."""
    lag = (
        bins * jnp.arange(epochs)[:, None, None]
        + jnp.arange(bins)[None, :, None]
        - jnp.arange(bins)[None, None, :]
    )
    return jnp.where(lag >= 0, coefs[jnp.clip(lag, 0)], 0)
