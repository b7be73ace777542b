"""C = I: independent noise in each step (DP-SGD)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from mfopt._float64 import compiled
from mfopt.strategies._base import Array, ToeplitzStrategy, register


@register
@dataclasses.dataclass(frozen=True)
class Identity(ToeplitzStrategy):
    """The identity matrix, for any n."""

    kind: ClassVar[str] = "identity"

    @compiled("n")
    def toeplitz_coefs(self, n: int) -> Array:
        return jnp.zeros(self.check_size(n)).at[0].set(1.0)

    def arrays(self) -> dict[str, np.ndarray]:
        return {}
