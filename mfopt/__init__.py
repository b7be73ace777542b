"""mfopt: correlated-noise strategies for DP training, optimized and certified.

``mfopt.load(path)`` reads a factorization; ``mfopt.optimize``, ``mfopt.calibration`` and
``mfopt.accounting`` make and prove one. Submodules are imported on first use, so
``import mfopt`` is quick and changes no setting of the host program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mfopt._version import __version__
from mfopt.errors import FailureError, UsageError

if TYPE_CHECKING:
    from mfopt.factorization import Factorization, load
    from mfopt.guarantee import Guarantee
    from mfopt.sampling import BallsInBins

_NAMES = {
    "Factorization": "mfopt.factorization",
    "load": "mfopt.factorization",
    "Guarantee": "mfopt.guarantee",
    "BallsInBins": "mfopt.sampling",
}
_MODULES = (
    "accounting",
    "calibration",
    "errors",
    "experiments",
    "factorization",
    "guarantee",
    "mechanism",
    "noise",
    "optimize",
    "progress",
    "query_error",
    "sampling",
    "strategies",
    "training",
    "workloads",
)

_OPTIONAL = ("torch",)  # needs an extra: found by name, not listed

# the modules are listed too: they are public, and tools that read `__all__` document them
__all__ = [
    "BallsInBins",
    "Factorization",
    "FailureError",
    "Guarantee",
    "UsageError",
    "__version__",
    "load",
]
__all__ += _MODULES


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    if name in _MODULES or name in _OPTIONAL:
        return importlib.import_module(f"mfopt.{name}")
    raise AttributeError(f"module 'mfopt' has no attribute {name!r}")
