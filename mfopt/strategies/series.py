"""Power series cut at n terms: the algebra of lower-triangular Toeplitz matrices.

A lower-triangular Toeplitz matrix is a polynomial in the shift, so products and inverses are
those of power series. All functions are differentiable and run at the input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from scipy.fft import next_fast_len

from mfopt._runtime._arrays import Array

_SOLVED = 64  # leading terms of a reciprocal that are solved for directly
_GROWTH = 16.0  # largest term over the first one, up to which FFTs are trusted


def convolve(a: Array, b: Array) -> Any:
    """First n = len(a) terms of the product of two series, ``a`` (n,), ``b`` (n, ...) -> (n, ...).

    O(n log n): the product of a Toeplitz matrix with one or many vectors. Of NumPy's arrays a NumPy
    array, for which nothing is compiled.
    """
    numbers: ModuleType = jnp if isinstance(a, jax.Array) or isinstance(b, jax.Array) else np
    n = a.shape[0]
    size = next_fast_len(n + b.shape[0] - 1, real=True)
    spectrum = numbers.fft.rfft(a, size).reshape((-1,) + (1,) * (b.ndim - 1))
    return numbers.fft.irfft(spectrum * numbers.fft.rfft(b, size, axis=0), size, axis=0)[:n]


@jax.custom_jvp
def reciprocal(a: jax.Array) -> jax.Array:
    """First n terms of 1/a(x), shape (n,): first column of the inverse Toeplitz matrix.

    Newton's iteration doubles the number of correct terms: x <- x (2 - a x). O(n log n). An FFT
    errs by a share of the *largest* term, so where the terms grow beyond the first one the early
    ones would drown (1, 1.3, 0, … has terms up to 1.3ⁿ): there every term is solved for from those
    before it, in O(n²), with an error relative to the terms that it is made of.

    The derivative is d(1/a) = -(1/a)² da, two products instead of the iteration's own derivative.
    ``a[0]`` must not be 0.
    """
    inverse = _newton(a)
    if a.shape[0] <= _SOLVED:
        return inverse
    return jax.lax.cond(_tame(inverse), lambda: inverse, lambda: _substitution(a))


def apply(inverse: jax.Array, y: jax.Array) -> jax.Array:
    """:func:`convolve` with the terms of a reciprocal, row by row where FFTs would drown some."""
    n = inverse.shape[0]
    lagged = _lagged(inverse)

    @jax.checkpoint  # a derivative makes the rows again instead of keeping all n²
    def row(t: jax.Array) -> jax.Array:
        return jnp.tensordot(lagged(t), y, axes=1)

    return jax.lax.cond(
        _tame(inverse), lambda: convolve(inverse, y), lambda: jax.lax.map(row, jnp.arange(n))
    )


def _lagged(a: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """t -> the row (a[t], …, a[0], 0, …, 0) of the Toeplitz matrix, which is never held whole."""
    n = a.shape[0]
    backwards = jnp.concatenate([a[::-1], jnp.zeros(n, a.dtype)])
    return lambda t: jax.lax.dynamic_slice_in_dim(backwards, n - 1 - t, n)


def _tame(inverse: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(inverse)) <= _GROWTH * jnp.abs(inverse[0])  # False for NaN too


def _newton(a: jax.Array) -> jax.Array:
    n = a.shape[0]
    terms = min(n, _SOLVED)
    inverse = solve_triangular(toeplitz(a[:terms]), jnp.eye(terms, 1)[:, 0], lower=True)
    while terms < n:
        terms = min(2 * terms, n)
        padded = jnp.pad(inverse, (0, terms - inverse.shape[0]))
        residual = -convolve(a[:terms], padded)
        inverse = convolve(padded, residual.at[0].add(2.0))
    return inverse


def _substitution(a: jax.Array) -> jax.Array:
    n, lagged = a.shape[0], _lagged(a)

    def step(inverse: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
        # the terms not known yet are 0
        return inverse.at[t].set(-(lagged(t) @ inverse) / a[0]), None

    initial = jnp.zeros(n, a.dtype).at[0].set(1 / a[0])
    return jax.lax.scan(step, initial, jnp.arange(1, n))[0]


@reciprocal.defjvp
def _reciprocal_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = reciprocal(*primals)
    return inverse, -apply(inverse, apply(inverse, tangents[0]))


def inverse_error(a: np.ndarray, inverse: np.ndarray) -> float:
    """Largest error of a term of a(x)·inverse(x) - 1, relative to what rounding explains.

    Terms are inner products, 1,024 of them at most, so no FFT hides a small one. NaN where
    something overflowed.
    """
    n = len(a)
    worst = 0.0
    for t in np.unique(np.linspace(0, n - 1, 1024).astype(int)):
        row, column = a[t::-1], inverse[: t + 1]
        error = abs(row @ column - (t == 0))
        # where the terms fade, FFTs leave dust relative to the first one, a[0]·inverse[0] = 1
        explained = 1e-9 * (np.abs(row) @ np.abs(column)) + 1e-11
        worst = max(worst, error / explained) if np.isfinite(explained) else np.nan
        if np.isnan(worst):
            return worst
    return worst


def toeplitz(a: jax.Array, columns: int | None = None) -> jax.Array:
    """The first ``columns`` (all n) of the n×n Toeplitz matrix of first column ``a`` (n,)."""
    n = a.shape[0]
    lag = jnp.arange(n)[:, None] - jnp.arange(columns or n)[None, :]
    return jnp.where(lag >= 0, a[jnp.clip(lag, 0)], 0)


def exponentials(scale: Any, decay: Any, n: int) -> Any:
    """(1, Σ_i ω_i λ_i^(t-1)) for t < n; of numbers nothing is compiled."""
    numbers: ModuleType = jnp if isinstance(decay, jax.Array) else np
    return numbers.concatenate([np.ones(1), decay ** numbers.arange(n - 1)[:, None] @ scale])
