"""CIFAR-10's python batches, read without running what they may hold.

They are pickles, which may run code when they are read: only what makes an array is allowed to.
"""

from __future__ import annotations

import importlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from mfopt._runtime import _check

FILES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


class _Arrays(pickle.Unpickler):
    """Reads pickles that are made of arrays and plain values; anything else is refused."""

    # numpy's modules were renamed in 2.0; the published files have the old names
    _ALLOWED = {  # noqa: RUF012
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
        *((f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")),
        *((f"numpy.{core}.numeric", "_frombuffer") for core in ("core", "_core")),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a batch")
        return getattr(importlib.import_module(module.replace("numpy.core", "numpy._core")), name)


def batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(images (N, 32, 32, 3) float32 in [-1, 1], classes (N,) int32) of one file.

    Raises:
      UsageError: it is missing, damaged, or holds anything else than arrays.
    """
    try:
        found = _Arrays(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        data, labels = np.asarray(found[b"data"]), np.asarray(found[b"labels"])
    except OSError as problem:
        raise _check.reject("folder", str(path), f"cannot be read ({problem.strerror})") from None
    except Exception as problem:  # a damaged pickle raises anything
        raise _check.reject(
            "folder", str(path), f"is not a batch of CIFAR-10 ({problem})"
        ) from None
    right = data.dtype == np.uint8 and data.ndim == 2 and data.shape[1] == 3072
    if not (right and labels.shape == data.shape[:1] and labels.dtype.kind in "iu"):
        rule = "must hold uint8 data (N, 3072) and N labels"
        raise _check.reject("folder", str(path), rule)
    if not (labels.size and labels.min() >= 0 and labels.max() <= 9):
        raise _check.reject("folder", str(path), "must have labels from 0 to 9")
    images = data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).astype(np.float32)
    return images / 127.5 - 1, labels.astype(np.int32)
