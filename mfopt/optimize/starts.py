"""Where optimizations begin. The landscape is not convex: a bad start ends in a worse optimum."""

from __future__ import annotations

import numpy as np

from mfopt.strategies import (
    BLT,
    Banded,
    BandedToeplitz,
    Dense,
    Strategy,
    Toeplitz,
    ToeplitzStrategy,
)

# 1 - λ of the slowest buffer, in units of 1/bins. Amplified optima were found between 1/bins and
# 6/bins (the slower, the larger ε).
_SLOWEST = (3.0, 0.5)


def blt_starts(buffers: int, bins: int) -> list[BLT]:
    """A few BLTs whose decays are spread geometrically, slow to fast."""
    starts = []
    for slowest in _SLOWEST:
        last = min(max(slowest / bins, 1e-4), 0.4)
        gaps = np.geomspace(0.6, last, buffers) if buffers > 1 else np.array([last])
        starts.append(BLT(np.full(buffers, 0.4 / buffers), 1 - gaps))
    return starts


def toeplitz_prefix(strategy: ToeplitzStrategy, bands: int) -> BandedToeplitz:
    """The first ``bands`` coefficients of a Toeplitz strategy."""
    return BandedToeplitz(np.asarray(strategy.toeplitz_coefs(bands)))


def toeplitz(strategy: Strategy, n: int) -> Toeplitz:
    """A Toeplitz strategy with every coefficient free."""
    assert isinstance(strategy, ToeplitzStrategy)
    return Toeplitz(np.asarray(strategy.toeplitz_coefs(n)))


def reshape(strategy: Strategy, kind: str, n: int, *, bands: int, buffers: int) -> Strategy | None:
    """``strategy`` as a start for ``kind``, or None where it says nothing about that kind."""
    if kind == "dense":
        return Dense(np.asarray(strategy.materialize(n)))
    if kind == "banded":
        return Banded.from_dense(np.asarray(strategy.materialize(n)), min(bands, n))
    if not isinstance(strategy, ToeplitzStrategy):
        return None
    if kind == "toeplitz":
        return toeplitz(strategy, n)
    if kind == "banded-toeplitz":
        return toeplitz_prefix(strategy, min(bands, n))
    if kind == "blt" and isinstance(strategy, BLT) and strategy.buffers == buffers:
        return strategy
    return None
