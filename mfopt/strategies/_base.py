"""What every strategy matrix C offers, and the part that Toeplitz matrices share.

Conventions: C is n×n, lower triangular, entries >= 0; the mechanism adds C⁻¹z to the per-step
sums, so the sensitivity is that of C x (column side: ``CᵀC``, never ``C Cᵀ``). n is never
inferred: it is given, or follows from the sampling scheme.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from mfopt import _check
from mfopt._float64 import compiled
from mfopt.sampling import BallsInBins
from mfopt.strategies import _series

S = TypeVar("S", bound="Strategy")
Array: TypeAlias = Any  # numpy array, or a JAX tracer under differentiation


def register(cls: type[S]) -> type[S]:
    """Make a strategy dataclass a JAX pytree: fields marked static are structure, others leaves.

    The kind is part of the structure. ``jax.tree_util.register_dataclass`` leaves the class out of
    the comparison of structures (seen in JAX 0.10), so compiled code of one parameterless
    strategy could be found for another.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static = [field.name for field in fields if field.metadata.get("static")]
    leaves = [field.name for field in fields if not field.metadata.get("static")]

    def flatten(strategy: S) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        structure = (strategy.kind, *(getattr(strategy, name) for name in static))
        return tuple(getattr(strategy, name) for name in leaves), structure

    def unflatten(structure: tuple[Any, ...], children: tuple[Any, ...]) -> S:
        strategy = object.__new__(cls)
        for name, value in zip(static + leaves, (*structure[1:], *children), strict=True):
            object.__setattr__(strategy, name, value)
        return strategy

    jax.tree_util.register_pytree_node(cls, flatten, unflatten)
    return cls


class Strategy(abc.ABC):
    """A strategy matrix: a pytree of parameters (leaves) plus static shape information.

    Subclasses are frozen dataclasses registered with JAX, so a strategy can be passed through
    ``jax.jit`` and ``jax.grad``. Results are numpy float64 outside a trace.
    """

    kind: ClassVar[str]

    @abc.abstractmethod
    def materialize(self, n: int) -> Array:
        """Dense C, shape (n, n)."""

    @abc.abstractmethod
    def arrays(self) -> dict[str, np.ndarray]:
        """The parameters by name: with :meth:`describe`, all that a file needs to store."""

    def describe(self) -> dict[str, Any]:
        """JSON-able description: the kind and its static settings, without the parameters."""
        return {"kind": self.kind}

    def check_size(self, n: int) -> int:
        """``n``, refused where this C is not defined for so many iterations."""
        return _check.integer("n", n)

    @compiled()
    def multiply(self, x: Array) -> Array:
        """C x for ``x`` of shape (n, ...)."""
        x = jnp.asarray(x)
        return jnp.tensordot(self.materialize(x.shape[0]), x, axes=1)

    @compiled()
    def solve(self, y: Array) -> Array:
        """C⁻¹ y for ``y`` of shape (n, ...): correlated noise from white noise."""
        y = jnp.asarray(y)
        flat = y.reshape(y.shape[0], -1)
        return solve_triangular(self.materialize(y.shape[0]), flat, lower=True).reshape(y.shape)

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        """Mode i = Σ_j C[:, bins·j + i], shape (n, bins): what a unit in bin i adds to C x."""
        n = self.check_size(scheme.iterations)
        columns = jnp.asarray(self.materialize(n))
        return columns.reshape(n, scheme.epochs, scheme.bins).sum(axis=1)

    @compiled("scheme")
    def gram(self, scheme: BallsInBins) -> Array:
        """Gram matrix G[i, k] = <mode i, mode k>, shape (bins, bins)."""
        modes = jnp.asarray(self.modes(scheme))
        return modes.T @ modes

    def check_entries(self, n: int) -> None:
        """Raise :class:`UsageError` unless C is finite, >= 0, lower triangular and invertible.

        Non-negative entries are the condition of Lemma 3.2 (Choquette-Choo et al. 2024): with a
        negative entry the pair (P, Q) built from the modes need not dominate the mechanism.
        """
        matrix = np.asarray(self.materialize(self.check_size(n)))
        _check_entries(matrix[np.tril_indices(n)], np.diagonal(matrix))
        if np.any(np.triu(matrix, 1)):
            raise _check.reject("C", "entry above the diagonal", "must be lower triangular")


def _check_entries(entries: np.ndarray, diagonal: np.ndarray) -> None:
    if not np.all(np.isfinite(entries)):
        raise _check.reject("C", "non-finite entry", "all entries must be finite numbers")
    lowest = float(np.min(entries))
    if lowest < 0:
        raise _check.reject(
            "C", lowest, "all entries must be >= 0",
            "With negative entries no dominating pair is known for balls-in-bins batching "
            "(Lemma 3.2, Choquette-Choo et al. 2024); use a non-negative strategy.",
        )  # fmt: skip
    if not np.all(diagonal > 0):
        raise _check.reject("C", float(np.min(diagonal)), "diagonal must be greater than 0")


class ToeplitzStrategy(Strategy):
    """A strategy matrix that is constant along diagonals: everything follows from n numbers."""

    @abc.abstractmethod
    def toeplitz_coefs(self, n: int) -> Array:
        """First column of C, shape (n,)."""

    @compiled("n")
    def inverse_coefs(self, n: int) -> Array:
        """First column of C⁻¹, shape (n,)."""
        return _series.reciprocal(jnp.asarray(self.toeplitz_coefs(n)))

    @compiled("n")
    def materialize(self, n: int) -> Array:
        return _series.toeplitz(jnp.asarray(self.toeplitz_coefs(n)))

    @compiled()
    def multiply(self, x: Array) -> Array:
        x = jnp.asarray(x)
        return _series.convolve(jnp.asarray(self.toeplitz_coefs(x.shape[0])), x)

    @compiled()
    def solve(self, y: Array) -> Array:
        y = jnp.asarray(y)
        return _series.convolve(jnp.asarray(self.inverse_coefs(y.shape[0])), y)

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        first = self._first_mode(scheme)
        lag = jnp.arange(scheme.iterations)[:, None] - jnp.arange(scheme.bins)[None, :]
        return jnp.where(lag >= 0, first[jnp.clip(lag, 0)], 0)

    @compiled("scheme")
    def gram(self, scheme: BallsInBins) -> Array:
        """Gram matrix in O(n log n + bins²).

        Mode i is mode 0 shifted down by i and cut at n, so with u = first mode
        G[i, k] = Σ_{t=0}^{n-1-k} u_t u_{t+k-i}. The last column is an autocorrelation; one step
        up a diagonal adds one product from the end of u.
        """
        n, b = scheme.iterations, scheme.bins
        first = self._first_mode(scheme)
        head = n - b + 1
        size = _series._fft_size(n + head)
        spectrum = jnp.conj(jnp.fft.rfft(first[:head], size)) * jnp.fft.rfft(first, size)
        last_column = jnp.fft.irfft(spectrum, size)[:b]  # by lag d: G[b-1-d, b-1]
        tail = first[n - b :][::-1]  # tail[i] = u_{n-1-i}
        i, d = jnp.arange(b)[None, :], jnp.arange(b)[:, None]
        # by lag d and row i: u_{n-1-k} u_{n-1-i} with k = i + d, for every k < b - 1
        steps = jnp.where(i + d < b - 1, tail[i] * tail[jnp.minimum(i + d, b - 1)], 0)
        by_lag = last_column[:, None] + jnp.cumsum(steps[:, ::-1], axis=1)[:, ::-1]
        row, column = jnp.minimum(d, i), jnp.maximum(d, i)
        return by_lag[column - row, row]

    def _first_mode(self, scheme: BallsInBins) -> jax.Array:
        """Σ_j (column 0 shifted by bins·j): a running sum over the epochs."""
        coefs = jnp.asarray(self.toeplitz_coefs(scheme.iterations))
        return jnp.cumsum(coefs.reshape(scheme.epochs, scheme.bins), axis=0).reshape(-1)

    def check_entries(self, n: int) -> None:
        coefs = np.asarray(self.toeplitz_coefs(self.check_size(n)))
        _check_entries(coefs, coefs[:1])
