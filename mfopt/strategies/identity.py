"""C = I: independent noise in each step (DP-SGD)."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from mfopt._float64 import compiled
from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.fields import Array


class Identity(ToeplitzStrategy):
    """The identity matrix, for any n."""

    kind: ClassVar[str] = "identity"

    @compiled("n")
    def toeplitz_coefs(self, n: int) -> Array:
        return (jnp.arange(self.check_size(n)) == 0).astype(float)

    def toeplitz_column(self, n: int) -> np.ndarray:
        # an account of independent noise asks for no more of C: nothing to compile for each n
        column = np.zeros(self.check_size(n))
        column[0] = 1.0
        return column
