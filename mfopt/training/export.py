"""The model alone, as safetensors: no optimizer, no noise state, no secret."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mfopt._runtime import _check, _extras, _files
from mfopt.training.models import Model
from mfopt.training.tokenizers import FILE_NAME, Tokenizer

with _extras.required():
    from safetensors.numpy import save_file

PyTree = Any


def export_model(
    model: Model,
    params: PyTree,
    folder: str | Path,
    force: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Path:
    """Write ``params`` of ``model`` into ``folder``; returns it.

    A model with its own ``export`` writes what it likes (a Hugging Face folder); any other is
    written as ``model.safetensors``, one tensor per leaf, named by its path.

    Args:
      model, params: the model, and its trainable parameters.
      folder, force: where files are written, and whether what is there is replaced.
      tokenizer: written beside the model as ``tokenizer.json``.
    """
    folder = Path(folder)
    if folder.exists() and not force:
        way_out = "Choose another folder, or give `force=True`."
        raise _check.reject("output", str(folder), "exists already", way_out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _files.new_folder(folder) as part:
        if model.export is not None:
            model.export(params, model.frozen, part)
        else:
            save_file(named_arrays(params), part / "model.safetensors")
        if tokenizer is not None:
            tokenizer.save(part / FILE_NAME)
        os.chmod(part, 0o755)
    return folder


def named_arrays(params: PyTree) -> dict[str, np.ndarray]:
    """The leaves by dotted path, as contiguous host arrays."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        arrays[name] = np.ascontiguousarray(np.asarray(leaf))
    return arrays
