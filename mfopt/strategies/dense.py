"""Dense lower-triangular C: the reference for the loss of structured ones."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import compiled
from mfopt.strategies.base import Strategy
from mfopt.strategies.fields import Array, parameter


class Dense(Strategy):
    """Any lower-triangular C; for n < n_max the leading n×n block is used.

    Attributes:
      matrix: shape (n_max, n_max), zero above the diagonal.
    """

    matrix: Array = parameter(dimensions=2)
    kind = "dense"
    scaled_by = "matrix"

    def check_parameters(self) -> None:
        if self.matrix.shape[0] != self.matrix.shape[1]:
            raise _check.reject("matrix", self.matrix.shape, "must be square")

    def check_size(self, n: int) -> int:
        return self._known_for(len(self.matrix), n)

    @compiled("n")
    def materialize(self, n: int) -> Array:
        n = self.check_size(n)
        return jnp.asarray(self.matrix)[:n, :n]

    def column_bands(self, n: int) -> int:
        rows, columns = np.nonzero(np.asarray(self.materialize(n)))
        return int(np.max(rows - columns, initial=0)) + 1
