"""Initial model of a run: new, loaded, or pretrained on the public part."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mfopt._runtime import _check
from mfopt._runtime._types import PyTree
from mfopt.progress import Progress, Report
from mfopt.sampling import FixedOrder, UnitSampler
from mfopt.training import mesh as meshes
from mfopt.training.clipping import NoClipping
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.loop import Execution, Trainer
from mfopt.training.models import Model
from mfopt.training.models.decoder import LoRAConfig
from mfopt.training.models.families import DecoderConfig, gpt2_config
from mfopt.training.models.huggingface import (
    export_model,
    gpt2_model,
    gpt2_shapes,
    read_config,
)
from mfopt.training.models.nnx_model import from_nnx
from mfopt.training.tokenizers import Tokenizer
from mfopt.training.units import Units

_WARMUP_SHARE = 0.05
PRETRAIN_BATCH = 16  # public records of a step
_SEED = 0  # of initial parameters, and of the order of public records: public


def initial_model(
    config: TrainConfig,
    parts: dict[str, TokenStore],
    progress: Report,
    tokenizer: Tokenizer | None = None,
    resuming: bool = False,
) -> Model:
    """Initial model of a run: given, or pretrained on the public part.

    Args:
      config, parts, progress, tokenizer: of the run; the last is kept with a pretrained model.
      resuming: the run resumes, from the pretrained model that it has; checkpoints hold its digest.
    """
    vocab_size = parts["train"].vocab_size
    source = config.model
    if made_elsewhere(source):
        return _imported(config, vocab_size)
    if config.pretrain_steps:
        source = str(Path(config.output) / "pretrained")
        if meshes.is_lead() and not (resuming and Path(source).is_dir()):
            base = _gpt2(config, vocab_size, config.model)
            params = _pretrain(base, parts["public"], config, progress)
            export_model(base, params, Path(source), tokenizer=tokenizer)
        meshes.wait_for_lead("pretraining")
    return _gpt2(config, vocab_size, source, _lora(config))


def outline(config: TrainConfig, vocab_size: int) -> Model | None:
    """:func:`initial_model` with shapes in place of values; None where a function makes it."""
    if made_elsewhere(config.model):
        return None
    return gpt2_shapes(_shape(config, vocab_size, config.model), _lora(config))


def made_elsewhere(model: str) -> bool:
    """Return True if ``model`` is an import path, MODULE:FUNCTION, and no folder."""
    module, _, function = model.partition(":")
    parts = [*module.split("."), function]
    return not Path(model).exists() and all(part.isidentifier() for part in parts)


def maker_of(config: TrainConfig) -> Callable[..., Any]:
    """The function that ``config.model``, MODULE:FUNCTION, names, if it takes what it will get."""
    if config.lora_rank or config.pretrain_steps:
        rule = "is made by a function, and adapters and pretraining are for the decoders here"
        way_out = "Let the function give adapters (its nnx.LoRAParam as the Model's params), or "
        raise _check.reject("model", config.model, rule, f"{way_out}weights.")
    name, _, function = config.model.partition(":")
    rule = "cannot be imported"
    try:
        make = getattr(importlib.import_module(name), function)
        rule = "must be a function to call with vocab_size, length and seed by name"
        inspect.signature(make).bind(vocab_size=0, length=0, seed=0)
    except (ImportError, AttributeError, TypeError, ValueError) as problem:
        raise _check.reject("model", config.model, f"{rule} ({problem})") from None
    return make


def _gpt2(
    config: TrainConfig, vocab_size: int, source: str, lora: LoRAConfig | None = None
) -> Model:
    return gpt2_model(_shape(config, vocab_size, source), lora=lora, folder=source, seed=_SEED)


def _shape(config: TrainConfig, vocab_size: int, source: str) -> DecoderConfig:
    shape = (
        read_config(source)
        if source
        else gpt2_config(vocab_size, config.length, config.width, config.layers, config.heads)
    )
    return dataclasses.replace(shape, compute_dtype=config.compute_dtype)


def _lora(config: TrainConfig) -> LoRAConfig | None:
    if not config.lora_rank:
        return None
    layers = tuple(name.strip() for name in config.lora_layers.split(","))
    return LoRAConfig(config.lora_rank, layers=layers)


def _imported(config: TrainConfig, vocab_size: int) -> Model:
    """The model that ``config.model``, MODULE:FUNCTION, makes (``docs/training/models.md``)."""
    make = maker_of(config)
    with nnx.use_eager_sharding(False):  # where annotated parameters need no mesh to be made
        model = make(vocab_size=vocab_size, length=config.length, seed=_SEED)
    if not isinstance(model, Model | nnx.Module):
        rule = f"gives a {type(model).__name__}: must be a Model or a Flax NNX module"
        raise _check.reject("model", config.model, rule)
    if not isinstance(model, Model):
        model = from_nnx(model, vocab_size=vocab_size)
    if model.logits is not None:
        rows = jnp.zeros((2, config.length), jnp.int32).at[1, -1].set(1)
        of_zeros, of_one = (
            np.asarray(model.logits(model.params, model.frozen, x))[:-1] for x in rows
        )
        # finite logits that a causal model computes from the same tokens differ by rounding at most
        if not np.allclose(of_zeros, of_one, rtol=1e-3, atol=1e-4):
            rule = "looks ahead: its logits at a token follow from later tokens"
            raise _check.reject("model", config.model, rule)
    return model


class _CorpusUnits(Units):
    """One unit: a fresh random block of ``records`` records of a public store at each step."""

    def __init__(self, store: TokenStore, records: int, length: int, seed: int) -> None:
        self.store = store
        self._seed = seed
        super().__init__(1, {"unit": "block", "records": records, "length": length})

    def _chosen(self, units: np.ndarray, step: int) -> np.ndarray:
        rng = np.random.default_rng([self._seed, step])
        count = self.store.num_records
        return rng.choice(count, (1, self.records), replace=self.records > count)


def _pretrain(model: Model, store: TokenStore, config: TrainConfig, progress: Report) -> PyTree:
    """Parameters after steps of AdamW with a cosine schedule on public records."""
    if store.metadata.get("public") is not True:
        rule = "is not marked as public, and pretraining adds no noise"
        raise _check.reject("store", str(store.path), rule)
    steps = config.pretrain_steps
    highest = config.pretrain_rate
    units = _CorpusUnits(store, PRETRAIN_BATCH, config.length, _SEED)
    sampler = UnitSampler(FixedOrder(bins=1, epochs=steps), 1, 0)
    rise = max(1, int(_WARMUP_SHARE * steps))
    # step t of the rise uses (t + 1) / rise of the rate, so that no step is wasted at 0
    rate = optax.warmup_cosine_decay_schedule(highest / rise, highest, rise - 1, steps)
    trainer = Trainer(
        model,
        Execution(units, sampler, NoClipping(), None, 1.0),
        optax.adamw(rate, b2=0.99, weight_decay=0.01),
    )
    state = trainer.init()
    stage = f"pretraining on {store.num_records} public records"
    progress(Progress(stage, 0, steps, "steps"))
    for result in trainer.run(state):
        state = result.state
        done = result.step + 1
        if done % 10 == 0 or done == steps:  # looking at the loss waits for the step
            loss = float(result.statistics.loss) / max(1.0, float(result.statistics.targets))
            progress(Progress(stage, done, steps, "steps", note=f"loss {loss:.3f}", paced=True))
    return state.params
