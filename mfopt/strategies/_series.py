"""Power series cut at n terms: the algebra of lower-triangular Toeplitz matrices.

A lower-triangular Toeplitz matrix is a polynomial in the shift, so products and inverses are
those of power series. All functions are differentiable and run at the input's dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

_SOLVED = 64  # leading terms of a reciprocal that are solved for directly


def convolve(a: jax.Array, b: jax.Array) -> jax.Array:
    """First n = len(a) terms of the product of two series, ``a`` (n,), ``b`` (n, ...) -> (n, ...).

    O(n log n): the product of a Toeplitz matrix with one or many vectors.
    """
    n = a.shape[0]
    size = _fft_size(n + b.shape[0] - 1)
    spectrum = jnp.fft.rfft(a, size).reshape((-1,) + (1,) * (b.ndim - 1))
    return jnp.fft.irfft(spectrum * jnp.fft.rfft(b, size, axis=0), size, axis=0)[:n]


@jax.custom_jvp
def reciprocal(a: jax.Array) -> jax.Array:
    """First n terms of 1/a(x), shape (n,): first column of the inverse Toeplitz matrix.

    Newton's iteration doubles the number of correct terms: x <- x (2 - a x). O(n log n). The
    derivative is d(1/a) = -(1/a)² da, two products instead of the iteration's own derivative.
    ``a[0]`` must not be 0.
    """
    n = a.shape[0]
    known = min(n, _SOLVED)
    inverse = solve_triangular(toeplitz(a[:known]), jnp.eye(known, 1)[:, 0], lower=True)
    while known < n:
        known = min(2 * known, n)
        padded = jnp.pad(inverse, (0, known - inverse.shape[0]))
        residual = -convolve(a[:known], padded)
        inverse = convolve(padded, residual.at[0].add(2.0))
    return inverse


@reciprocal.defjvp
def _reciprocal_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    inverse = reciprocal(*primals)
    return inverse, -convolve(convolve(inverse, inverse), tangents[0])


def toeplitz(a: jax.Array) -> jax.Array:
    """The n×n lower-triangular Toeplitz matrix with first column ``a`` (n,)."""
    n = a.shape[0]
    lag = jnp.arange(n)[:, None] - jnp.arange(n)[None, :]
    return jnp.where(lag >= 0, a[jnp.clip(lag, 0)], 0)


def _fft_size(length: int) -> int:
    """Smallest 2^i 3^j 5^k >= length: sizes that FFT libraries handle at full speed."""
    best = 1 << (length - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            size = three
            while size < length:
                size *= 2
            best = min(best, size)
            three *= 3
        five *= 5
    return best
