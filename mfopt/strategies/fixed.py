"""Factorizations with coefficients in closed form: nothing to optimize.

All three come from the square root of the prefix-sum matrix, whose generating function is
(1 - x)^(-1/2) (Fichtenberger, Henzinger, Upadhyay 2022; Henzinger, Upadhyay, Upadhyay 2022).
Coefficients are NumPy's: nothing is compiled for each number of bands.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.fields import Array, parameter, setting
from mfopt.strategies.toeplitz import Toeplitz


def square_root_coefs(n: int) -> np.ndarray:
    """Coefficients of (1 - x)^(-1/2): c_t = c_{t-1} (2t - 1)/(2t), shape (n,)."""
    t = np.arange(1, n)
    return np.concatenate([[1.0], np.cumprod((2 * t - 1) / (2 * t))])


def inverse_square_root_coefs(n: int) -> np.ndarray:
    """Coefficients of (1 - x)^(1/2): d_t = d_{t-1} (2t - 3)/(2t), shape (n,); d_t < 0 for t > 0."""
    t = np.arange(1, n)
    return np.concatenate([[1.0], np.cumprod((2 * t - 3) / (2 * t))])


class SquareRoot(ToeplitzStrategy):
    """Square root of the prefix-sum matrix, for any n."""

    kind: ClassVar[str] = "sqrt"

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return square_root_coefs(self.check_size(n))

    def inverse_coefs(self, n: int) -> np.ndarray:
        """First column of C⁻¹, shape (n,)."""
        return inverse_square_root_coefs(self.check_size(n))


class BandedSquareRoot(ToeplitzStrategy):
    """First ``bands`` coefficients of the square root (Kalinin and Lampert 2024)."""

    bands: int = setting()
    kind: ClassVar[str] = "banded-sqrt"

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return _cut(square_root_coefs(self.check_size(n)), self.bands)


class BandedInverseSquareRoot(ToeplitzStrategy):
    """C whose *inverse* has the first ``bands`` coefficients of the inverse square root.

    Kalinin, McKenna, Upadhyay, Lampert 2025. C⁻¹ is banded, so noise generation needs the last
    ``bands - 1`` white draws; C itself is full, with entries > 0 for bands > 1.
    """

    bands: int = setting()
    kind: ClassVar[str] = "banded-inverse-sqrt"

    def inverse_coefs(self, n: int) -> np.ndarray:
        """First column of C⁻¹, shape (n,)."""
        return _cut(inverse_square_root_coefs(self.check_size(n)), self.bands)

    def toeplitz_coefs(self, n: int) -> Array:
        return _positive(Toeplitz(self.inverse_coefs(n)).inverse_coefs(n))


class BandedInverseRoot(ToeplitzStrategy):
    """C whose inverse has the first ``bands`` coefficients of (1 - x)^``exponent``.

    The exponent is in (0, 1], which makes C >= 0: 1/2 is :class:`BandedInverseSquareRoot`. Kalinin,
    Rehn, Andersson, Honkela, Lampert 2026; with two bands DP-λCGD (Kalinin, McKenna, Pagh, Lampert
    2026) without the normalization of its columns.
    """

    exponent: Array = parameter(dimensions=0)
    bands: int = setting()
    kind: ClassVar[str] = "banded-inverse-root"

    def inverse_coefs(self, n: int) -> Array:
        """First column of C⁻¹, shape (n,)."""
        numbers = jnp if isinstance(self.exponent, jax.Array) else np
        t = np.arange(1, self.check_size(n))
        ratios = numbers.where(t < self.bands, (t - 1 - self.exponent) / t, 0.0)
        return numbers.concatenate([np.ones(1), numbers.cumprod(ratios)])

    def toeplitz_coefs(self, n: int) -> Array:
        return _positive(Toeplitz(self.inverse_coefs(n)).inverse_coefs(n))


def _positive(coefs: Array) -> Array:
    """Coefficients that are exactly >= 0, without the rounding dust of an FFT."""
    return (jnp if isinstance(coefs, jax.Array) else np).maximum(coefs, 0)


def _cut(coefs: np.ndarray, bands: int) -> np.ndarray:
    coefs[bands:] = 0
    return coefs
