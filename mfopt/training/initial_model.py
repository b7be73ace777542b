"""The model that a run starts from: new, loaded, or pretrained on the public part first."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mfopt import _check, _files
from mfopt.errors import UsageError
from mfopt.progress import Progress, Report
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore, overlap
from mfopt.training.export import export_model
from mfopt.training.folder import wait_for_lead
from mfopt.training.models import Model
from mfopt.training.pretraining import pretrain
from mfopt.training.tokenizers import Tokenizer


def initial_model(
    config: TrainConfig,
    parts: dict[str, TokenStore],
    folder: Path,
    mesh: Mesh,
    progress: Report,
    tokenizer: Tokenizer | None = None,
) -> Model:
    """The model that a run starts from: given, or pretrained on the public part.

    Args:
      config: settings of the run.
      parts: token stores by name.
      folder: where files are written.
      mesh: devices.
      progress: told of pretraining steps.
      tokenizer: of the data; kept with a pretrained model.
    """
    from mfopt.training.models.gpt2 import GPT2Config, LoRAConfig
    from mfopt.training.models.huggingface import gpt2_model, load_pretrained

    if made_elsewhere(config.model):
        return _imported(config, parts["train"].vocab_size)
    lora = None
    if config.lora_rank:
        layers = tuple(name.strip() for name in config.lora_layers.split(","))
        lora = LoRAConfig(config.lora_rank, config.lora_alpha or None, layers)
    loading: dict[str, Any] = {"compute_dtype": config.compute_dtype, "remat": config.remat}
    source = config.model
    if config.pretrain_steps:
        source = str(folder / "pretrained")
        if jax.process_index() == 0:
            _pretrain(config, parts, Path(source), loading, progress, tokenizer)
        wait_for_lead("pretraining")
    if source:
        return load_pretrained(source, lora=lora, seed=config.model_seed, **loading)
    shape = _shape(config, parts["train"].vocab_size, loading)
    return gpt2_model(GPT2Config(**shape), lora=lora, seed=config.model_seed)


def made_elsewhere(model: str) -> bool:
    """Whether ``model`` is an import path, MODULE:FUNCTION, and no folder."""
    module, _, function = model.partition(":")
    parts = [*module.split("."), function]
    return not Path(model).exists() and all(part.isidentifier() for part in parts)


def maker_of(config: TrainConfig) -> Callable[..., Any]:
    """The function that ``config.model``, MODULE:FUNCTION, names.

    Raises:
      UsageError: it cannot be imported, does not take what it will be called with, or adapters or
        pretraining, which are for the GPT-2 here, are asked for.
    """
    if config.lora_rank or config.pretrain_steps:
        raise _check.reject(
            "model",
            config.model,
            "is made by a function, and adapters and pretraining are for the GPT-2 here",
            "Let the function give adapters (its nnx.LoRAParam as the Model's params), or weights.",
        )
    name, _, function = config.model.partition(":")
    try:
        make = getattr(importlib.import_module(name), function)
    except (ImportError, AttributeError) as problem:
        raise _check.reject("model", config.model, f"cannot be imported ({problem})") from None
    try:
        inspect.signature(make).bind(vocab_size=0, length=0, seed=0)
    except (TypeError, ValueError) as problem:
        raise _check.reject(
            "model",
            config.model,
            f"must be a function to call with vocab_size, length and seed by name ({problem})",
        ) from None
    return make  # type: ignore[no-any-return]  # a module's attribute


def _imported(config: TrainConfig, vocab_size: int) -> Model:
    """The model that ``config.model``, MODULE:FUNCTION, makes.

    The function is called as ``function(vocab_size=V, length=L, seed=S)`` and gives a
    :class:`Model`, or a Flax NNX module that maps tokens (L,) to logits (L, V) and is causal.
    """
    from flax import nnx

    from mfopt.training.models.nnx_model import from_nnx

    made = maker_of(config)(vocab_size=vocab_size, length=config.length, seed=config.model_seed)
    if not isinstance(made, Model | nnx.Module):
        given = f"gives a {type(made).__name__}: must be a Model or a Flax NNX module"
        raise _check.reject("model", config.model, given)
    if not isinstance(made, Model):
        made = from_nnx(made, name=config.model.partition(":")[2], vocab_size=vocab_size)
    _refuse_looking_ahead(made, config)
    return made


def _refuse_looking_ahead(model: Model, config: TrainConfig) -> None:
    """Refuse logits that follow from later tokens: their loss would say nothing."""
    if model.logits is None:
        return
    rows = np.zeros((2, config.length), np.int32)
    rows[1, -1] = 1
    first, second = (
        np.asarray(model.logits(model.params, model.frozen, jnp.asarray(row))) for row in rows
    )
    # finite logits that a causal model computes from the same tokens differ by rounding at most
    if not np.allclose(first[:-1], second[:-1], rtol=1e-3, atol=1e-4):
        raise _check.reject(
            "model", config.model, "looks ahead: its logits at a token follow from later tokens"
        )


def _pretrain(
    config: TrainConfig,
    parts: dict[str, TokenStore],
    target: Path,
    loading: dict[str, Any],
    progress: Report,
    tokenizer: Tokenizer | None,
) -> None:
    """Make the pretrained model of these settings in ``target``, unless it is there."""
    if "public" not in parts:
        raise no_public_part("pretrain_steps", config.pretrain_steps)
    public, record = parts["public"], target / "pretraining.json"
    names = (
        "length",
        "width",
        "layers",
        "heads",
        "model_seed",
        "pretrain_steps",
        "pretrain_batch",
        "pretrain_rate",
        "compute_dtype",
    )
    base = _plain_model(config, public.vocab_size, loading)
    base.check_fits(public.vocab_size, config.length)
    private = [store for name, store in parts.items() if name != "public"]
    overlap.refuse_copies(public, private, config.public_overlap)
    wanted = {name: getattr(config, name) for name in names}
    wanted |= {
        "data": public.digest,
        "model": digest_of(base.params),
        "weights": None,
    }
    if _is_there(record, wanted, target):
        note = "using the pretrained model of these settings"
        progress(Progress("pretraining", note=note, lasting=True))
        return
    params = pretrain(
        base,
        public,
        steps=config.pretrain_steps,
        batch=config.pretrain_batch,
        length=config.length,
        learning_rate=config.pretrain_rate,
        seed=config.model_seed,
        progress=progress,
    )
    export_model(base, params, target, force=True, tokenizer=tokenizer)
    wanted["weights"] = _weights_digest(target)
    _files.write(record, json.dumps(wanted, indent=2) + "\n")


def no_public_part(setting: str, value: int) -> UsageError:
    """The refusal to use private data where public data is needed."""
    return _check.reject(
        setting,
        value,
        "the data has no public part",
        "Build it with a public part, or pretrain elsewhere and give `model`.",
    )


def _is_there(record: Path, wanted: dict[str, Any], target: Path) -> bool:
    """Whether ``target`` holds, bit for bit, the model that was pretrained with these settings."""
    try:
        found = json.loads(record.read_text())
        weights = _weights_digest(target)
    except (OSError, ValueError):
        return False
    return bool(found == {**wanted, "weights": weights})


def _weights_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _plain_model(config: TrainConfig, vocab_size: int, loading: dict[str, Any]) -> Model:
    from mfopt.training.models.gpt2 import GPT2Config
    from mfopt.training.models.huggingface import gpt2_model, load_pretrained

    if config.model:
        return load_pretrained(config.model, seed=config.model_seed, **loading)
    return gpt2_model(GPT2Config(**_shape(config, vocab_size, loading)), seed=config.model_seed)


def _shape(config: TrainConfig, vocab_size: int, loading: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "n_positions": config.length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        **loading,
    }


def digest_of(params: Any) -> str:
    """SHA-256 of the values of a pytree of arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        array = np.ascontiguousarray(np.asarray(leaf))
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
