"""A factorization in a PyTorch loop: its batches, its clipping, its noise.

:func:`make_private` does with Opacus what Opacus's own does; :class:`PrivateRun` gives the parts
without it. Both refuse what would not be the mechanism that was proved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mfopt._runtime import _extras

try:
    import torch  # noqa: F401
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt.torch.loader import PrivateLoader, UnitBatches
from mfopt.torch.run import PrivateRun

if TYPE_CHECKING:
    from mfopt.torch.private import make_private

__all__ = ["PrivateLoader", "PrivateRun", "UnitBatches", "make_private"]


def __getattr__(name: str) -> Any:
    if name != "make_private":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mfopt.torch.private import make_private

    return make_private
