"""C = I: independent noise in each step (DP-SGD)."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp

from mfopt._float64 import compiled
from mfopt.strategies.base import ToeplitzStrategy
from mfopt.strategies.fields import Array


class Identity(ToeplitzStrategy):
    """The identity matrix, for any n."""

    kind: ClassVar[str] = "identity"

    @compiled("n")
    def toeplitz_coefs(self, n: int) -> Array:
        return (jnp.arange(self.check_size(n)) == 0).astype(float)
