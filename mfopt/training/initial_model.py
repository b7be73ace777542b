"""The model that a run starts from: new, loaded, or pretrained on the public part first."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
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

    lora = LoRAConfig(config.lora_rank) if config.lora_rank else None
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
        raise no_public_part(config.pretrain_steps)
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


def no_public_part(pretrain_steps: int) -> UsageError:
    """The refusal to pretrain on private data."""
    return _check.reject(
        "pretrain_steps",
        pretrain_steps,
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
