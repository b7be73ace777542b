"""Factorizations with coefficients in closed form: nothing to optimize.

All but C = I come from the square root of the prefix-sum matrix, whose generating function is
(1 - x)^(-1/2) (Fichtenberger, Henzinger, Upadhyay 2022; Henzinger, Upadhyay, Upadhyay 2022).
Coefficients are NumPy's: nothing is compiled for each number of bands.
"""

from __future__ import annotations

import abc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.fields import Array, parameter, setting
from mfopt.strategies.toeplitz import Toeplitz


class Identity(ToeplitzStrategy):
    """C = I: independent noise in each step (DP-SGD), for any n."""

    kind = "identity"

    @property
    def is_identity(self) -> bool:
        return type(self) is Identity

    # numbers that depend on n alone: nothing to compile for each n
    def toeplitz_coefs(self, n: int) -> np.ndarray:
        column = np.zeros(self.check_size(n))
        column[0] = 1.0
        return column

    inverse_coefs = toeplitz_coefs

    def column_bands(self, n: int) -> int:
        return 1 if self.is_identity else super().column_bands(n)

    def check_entries(self, n: int) -> None:
        # one entry says it all, however many iterations; a subclass may have others
        self.check_size(n)
        super().check_entries(1 if self.is_identity else n)


def power_coefs(exponent: Any, n: int, bands: int) -> Any:
    """The first ``bands`` coefficients of (1 - x)^``exponent``, then 0; shape (n,).

    c_t = c_{t-1} (t - 1 - exponent)/t: -1/2 is the square root of prefix sums, 1/2 its inverse.
    """
    numbers = jnp if isinstance(exponent, jax.Array) else np
    t = np.arange(1, n)
    products = numbers.cumprod((t - 1 - exponent) / t)
    return numbers.concatenate([np.ones(1), numbers.where(t < bands, products, 0.0)])


class SquareRoot(ToeplitzStrategy):
    """Square root of the prefix-sum matrix, for any n."""

    kind = "sqrt"

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return power_coefs(-0.5, self.check_size(n), n)

    def inverse_coefs(self, n: int) -> np.ndarray:
        """First column of C⁻¹, shape (n,)."""
        return power_coefs(0.5, self.check_size(n), n)


class BandedSquareRoot(ToeplitzStrategy):
    """First ``bands`` coefficients of the square root (Kalinin and Lampert 2024)."""

    bands: int = setting()
    kind = "banded-sqrt"

    def toeplitz_coefs(self, n: int) -> np.ndarray:
        return power_coefs(-0.5, self.check_size(n), self.bands)


class _BandedInverse(ToeplitzStrategy):
    """C of the first column of its inverse."""

    @abc.abstractmethod
    def inverse_coefs(self, n: int) -> Array:
        """First column of C⁻¹, shape (n,)."""

    def toeplitz_coefs(self, n: int) -> Array:
        coefs = Toeplitz(self.inverse_coefs(n)).inverse_coefs(n)
        # exactly >= 0, without the rounding dust of an FFT
        return (jnp if isinstance(coefs, jax.Array) else np).maximum(coefs, 0)


class BandedInverseSquareRoot(_BandedInverse):
    """C whose *inverse* has the first ``bands`` coefficients of the inverse square root.

    Kalinin, McKenna, Upadhyay, Lampert 2025. C⁻¹ is banded, so noise generation needs the last
    ``bands - 1`` white draws; C itself is full, with entries > 0 for bands > 1.
    """

    bands: int = setting()
    kind = "banded-inverse-sqrt"

    def inverse_coefs(self, n: int) -> Array:
        return power_coefs(0.5, self.check_size(n), self.bands)


class BandedInverseRoot(_BandedInverse):
    """C whose inverse has the first ``bands`` coefficients of (1 - x)^``exponent``.

    The exponent is in (0, 1], which makes C >= 0: 1/2 is :class:`BandedInverseSquareRoot`. Kalinin,
    Rehn, Andersson, Honkela, Lampert 2026; with two bands DP-λCGD (Kalinin, McKenna, Pagh, Lampert
    2026) without the normalization of its columns.
    """

    exponent: Array = parameter(dimensions=0)
    bands: int = setting()
    kind = "banded-inverse-root"

    def inverse_coefs(self, n: int) -> Array:
        return power_coefs(self.exponent, self.check_size(n), self.bands)
