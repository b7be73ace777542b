"""Batches, clipping and noise of a factorization in a PyTorch training loop.

:func:`make_private` is for the loop of Opacus, :class:`PrivateRun` for one that calls
``run.backward``. Both raise an error for anything that would differ from the proved mechanism.
"""

from __future__ import annotations

from mfopt._runtime import _extras

with _extras.required():
    from mfopt.torch.loader import PrivateLoader, UnitBatches
    from mfopt.torch.private import make_private
    from mfopt.torch.run import PrivateRun

__all__ = ["PrivateLoader", "PrivateRun", "UnitBatches", "make_private"]
