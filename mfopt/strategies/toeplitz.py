"""Lower-triangular Toeplitz C: n free coefficients, or the first few of them (banded)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.fields import Array, parameter


class Toeplitz(ToeplitzStrategy):
    """Toeplitz C with a free coefficient for each lag; defined for n <= len(coefs).

    Attributes:
      coefs: first column of C, shape (n_max,).
    """

    coefs: Array = parameter(dimensions=1)
    kind = "toeplitz"
    scaled_by = "coefs"

    def check_size(self, n: int) -> int:
        return self._known_for(len(self.coefs), n)

    def toeplitz_coefs(self, n: int) -> Array:
        return self.coefs[: self.check_size(n)]


class BandedToeplitz(ToeplitzStrategy):
    """Toeplitz C whose coefficients are 0 from lag ``bands`` on; defined for every n.

    Noise generation needs the last ``bands - 1`` outputs.

    Attributes:
      coefs: first ``bands`` entries of the first column, shape (bands,).
    """

    coefs: Array = parameter(dimensions=1)
    kind = "banded-toeplitz"
    described = ("bands",)
    scaled_by = "coefs"

    @property
    def bands(self) -> int:
        """Number of diagonals that may be non-zero."""
        return len(self.coefs)

    def most_bands(self, n: int) -> int:
        return min(self.bands, self.check_size(n))

    def toeplitz_coefs(self, n: int) -> Array:
        kept = self.coefs[: self.check_size(n)]
        # numbers stay NumPy's: JAX would compile this for each number of bands
        numbers = jnp if isinstance(kept, jax.Array) else np
        return numbers.pad(kept, (0, n - kept.shape[0]))
