"""mfopt: correlated-noise strategies for DP training, optimized and certified.

:func:`factorize` finds C and the smallest certified σ for a target, :func:`load` reads a file of
them, :func:`certify` and :func:`calibrate` prove other statements about it, and :func:`account`
answers for every mechanism with an accountant. Submodules are imported on first use, so
``import mfopt`` is quick and changes no setting of the host program.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mfopt._version import __version__
from mfopt.errors import (
    FailureError,
    InterruptedFactorization,
    UncertifiedError,
    UsageError,
)

if TYPE_CHECKING:
    from mfopt import (
        accounting,
        calibration,
        errors,
        experiments,
        factorization,
        final_model,
        guarantee,
        mechanism,
        noise,
        optimize,
        progress,
        query_error,
        sampling,
        strategies,
        training,
        workloads,
    )
    from mfopt import torch as torch
    from mfopt._api import account, calibrate, certify, factorize
    from mfopt.factorization import Factorization, load
    from mfopt.guarantee import Guarantee
    from mfopt.mechanism import Mechanism
    from mfopt.sampling import BallsInBins

_NAMES = {
    "BallsInBins": "mfopt.sampling",
    "Factorization": "mfopt.factorization",
    "Guarantee": "mfopt.guarantee",
    "Mechanism": "mfopt.mechanism",
    "account": "mfopt._api",
    "calibrate": "mfopt._api",
    "certify": "mfopt._api",
    "factorize": "mfopt._api",
    "load": "mfopt.factorization",
}
_OPTIONAL = ("torch",)  # needs an extra: found by name, not listed

# the modules are listed too: they are public, and tools that read `__all__` document them
__all__ = [
    "BallsInBins",
    "Factorization",
    "FailureError",
    "Guarantee",
    "InterruptedFactorization",
    "Mechanism",
    "UncertifiedError",
    "UsageError",
    "__version__",
    "account",
    "accounting",
    "calibrate",
    "calibration",
    "certify",
    "errors",
    "experiments",
    "factorization",
    "factorize",
    "final_model",
    "guarantee",
    "load",
    "mechanism",
    "noise",
    "optimize",
    "progress",
    "query_error",
    "sampling",
    "strategies",
    "training",
    "workloads",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a checker sees the imports above, and misspelt names

    def __getattr__(name: str):
        if name not in (*__all__, *_OPTIONAL):
            raise AttributeError(f"module 'mfopt' has no attribute {name!r}")
        from numpy import random

        state = random.get_state()
        try:
            module = importlib.import_module(_NAMES.get(name, f"mfopt.{name}"))
        finally:  # importing JAX draws from the stream that the host program may have seeded
            random.set_state(state)
        return getattr(module, name) if name in _NAMES else module
