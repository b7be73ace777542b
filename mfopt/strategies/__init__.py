"""Strategy matrices C. Each form is tested against its own dense ``materialize(n)``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mfopt import _check
from mfopt.strategies._base import Strategy, ToeplitzStrategy
from mfopt.strategies.banded import Banded
from mfopt.strategies.blt import BLT
from mfopt.strategies.dense import Dense
from mfopt.strategies.fixed import BandedInverseSquareRoot, BandedSquareRoot, SquareRoot
from mfopt.strategies.identity import Identity
from mfopt.strategies.toeplitz import BandedToeplitz, Toeplitz
from mfopt.strategies.tree import Tree

__all__ = [
    "BLT",
    "Banded",
    "BandedInverseSquareRoot",
    "BandedSquareRoot",
    "BandedToeplitz",
    "Dense",
    "Identity",
    "SquareRoot",
    "Strategy",
    "Toeplitz",
    "ToeplitzStrategy",
    "Tree",
    "from_description",
]

_STORED: dict[str, tuple[type, tuple[str, ...]]] = {
    "identity": (Identity, ()),
    "toeplitz": (Toeplitz, ("coefs",)),
    "banded-toeplitz": (BandedToeplitz, ("coefs",)),
    "blt": (BLT, ("scale", "decay")),
    "banded": (Banded, ("columns",)),
    "dense": (Dense, ("matrix",)),
    "sqrt": (SquareRoot, ()),
    "banded-sqrt": (BandedSquareRoot, ()),
    "banded-inverse-sqrt": (BandedInverseSquareRoot, ()),
    "tree": (Tree, ()),
}
_DIMENSIONS = {"coefs": 1, "scale": 1, "decay": 1, "columns": 2, "matrix": 2}


def from_description(description: dict[str, Any], arrays: dict[str, np.ndarray]) -> Strategy:
    """The strategy that gave ``describe()`` and ``arrays()``; anything else is refused."""
    kind = description.get("kind")
    if kind not in _STORED:
        raise _check.reject("strategy kind", kind, f"must be one of {sorted(_STORED)}")
    cls, names = _STORED[kind]
    if set(arrays) != set(names):
        raise _check.reject("arrays", sorted(arrays), f"a {kind} strategy has {sorted(names)}")
    for name, value in arrays.items():
        if value.ndim != _DIMENSIONS[name] or value.dtype != np.float64 or value.size == 0:
            raise _check.reject(
                name, f"{value.dtype}{value.shape}",
                f"must be a non-empty float64 array of {_DIMENSIONS[name]} dimension(s)",
            )  # fmt: skip
    if kind == "dense" and arrays["matrix"].shape[0] != arrays["matrix"].shape[1]:
        raise _check.reject("matrix", arrays["matrix"].shape, "must be square")
    settings = {} if names or "bands" not in description else {"bands": description["bands"]}
    strategy = cls(**arrays, **settings)
    if strategy.describe() != description:
        raise _check.reject(
            "strategy", description, f"its arrays describe {strategy.describe()} instead"
        )
    return strategy
