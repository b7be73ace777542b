"""Strategy matrices C. Each form is tested against its own dense ``materialize(n)``.

A custom kind is a subclass of :class:`Strategy` or :class:`ToeplitzStrategy`; see
:mod:`mfopt.strategies.base`.
"""

from mfopt.strategies.banded import Banded
from mfopt.strategies.base import (
    Strategy,
    ToeplitzStrategy,
    dimensions,
    from_description,
    registered,
)
from mfopt.strategies.blt import BLT
from mfopt.strategies.buffered import Buffered
from mfopt.strategies.cleared_blt import ClearedBLT
from mfopt.strategies.dense import Dense
from mfopt.strategies.fields import Array, inner, parameter, setting
from mfopt.strategies.fixed import (
    BandedInverseRoot,
    BandedInverseSquareRoot,
    BandedSquareRoot,
    Identity,
    SquareRoot,
)
from mfopt.strategies.time_scaled import TimeScaled
from mfopt.strategies.toeplitz import BandedToeplitz, Toeplitz
from mfopt.strategies.tree import Tree
from mfopt.strategies.wave_blt import WaveBLT

__all__ = [
    "BLT",
    "Array",
    "Banded",
    "BandedInverseRoot",
    "BandedInverseSquareRoot",
    "BandedSquareRoot",
    "BandedToeplitz",
    "Buffered",
    "ClearedBLT",
    "Dense",
    "Identity",
    "SquareRoot",
    "Strategy",
    "TimeScaled",
    "Toeplitz",
    "ToeplitzStrategy",
    "Tree",
    "WaveBLT",
    "dimensions",
    "from_description",
    "inner",
    "parameter",
    "registered",
    "setting",
]
