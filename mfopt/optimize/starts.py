"""Where optimizations begin. The landscape is not convex: a bad start ends in a worse optimum."""

from __future__ import annotations

import numpy as np

from mfopt.strategies import BLT, Banded, BandedToeplitz, Dense, Strategy, Toeplitz

# 1 - λ of the slowest buffer, in units of 1/bins. Amplified optima were found between 1/bins and
# 6/bins (the slower, the larger ε).
_SLOWEST = (3.0, 0.5)


def spread_blts(buffers: int, bins: int) -> list[BLT]:
    """A few BLTs whose decays are spread geometrically, slow to fast."""
    starts = []
    for slowest in _SLOWEST:
        last = min(max(slowest / bins, 1e-4), 0.4)
        gaps = np.geomspace(0.6, last, buffers) if buffers > 1 else np.array([last])
        starts.append(BLT(np.full(buffers, 0.4 / buffers), 1 - gaps))
    return starts


def same_blt(strategy: Strategy, buffers: int) -> BLT | None:
    """``strategy`` where it is a BLT of that size: other strategies say nothing about λ."""
    return strategy if isinstance(strategy, BLT) and strategy.buffers == buffers else None


def as_toeplitz(strategy: Strategy, n: int) -> Toeplitz | None:
    """A Toeplitz strategy with every coefficient free."""
    column = strategy.toeplitz_column(n)
    return None if column is None else Toeplitz(np.asarray(column))


def as_banded_toeplitz(strategy: Strategy, n: int, bands: int) -> BandedToeplitz | None:
    """The first ``bands`` coefficients of a Toeplitz strategy."""
    column = strategy.toeplitz_column(min(bands, n))
    return None if column is None else BandedToeplitz(np.asarray(column))


def as_banded(strategy: Strategy, n: int, bands: int) -> Banded:
    """The first ``bands`` diagonals."""
    return Banded.from_dense(np.asarray(strategy.materialize(n)), min(bands, n))


def as_dense(strategy: Strategy, n: int) -> Dense:
    """Every entry."""
    return Dense(np.asarray(strategy.materialize(n)))
