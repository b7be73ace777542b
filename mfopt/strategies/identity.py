"""C = I: independent noise in each step (DP-SGD)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from mfopt.strategies.base import ToeplitzStrategy


class Identity(ToeplitzStrategy):
    """The identity matrix, for any n."""

    kind: ClassVar[str] = "identity"

    # numbers that depend on n alone: nothing to compile for each n
    def toeplitz_coefs(self, n: int) -> np.ndarray:
        column = np.zeros(self.check_size(n))
        column[0] = 1.0
        return column

    def inverse_coefs(self, n: int) -> np.ndarray:
        """As any C⁻¹: first column, shape (n,)."""
        return self.toeplitz_coefs(n)
