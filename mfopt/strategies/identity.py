"""C = I: independent noise in each step (DP-SGD)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from mfopt.strategies.base import ToeplitzStrategy


class Identity(ToeplitzStrategy):
    """The identity matrix, for any n."""

    kind: ClassVar[str] = "identity"

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
