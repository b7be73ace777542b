"""Batches, clipping and noise of a factorization in a PyTorch training loop.

:func:`make_private` is the counterpart of Opacus's own; :class:`PrivateRun` works without Opacus.
Both raise an error for anything that would differ from the proved mechanism.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mfopt._runtime import _extras

with _extras.required():
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
