"""GPT-2 to and from a local Hugging Face folder: ``config.json`` and ``model.safetensors``.

Nothing is downloaded. Only safetensors files are read (pickled ``pytorch_model.bin`` runs code when
loaded, and is refused).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _extras
from mfopt._runtime._float64 import pinned

try:
    from flax import nnx
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt._runtime import _check, _files
from mfopt.training.models.gpt2 import GPT2, GPT2Config, LoRAConfig, initial_value, partition_spec
from mfopt.training.models.model import Model, PyTree
from mfopt.training.models.nnx_model import from_nnx, nest, pick

WEIGHTS = "model.safetensors"
_GPT2_END = 50256
_A_FOLDER = "Name the folder of a GPT-2 or of a run."
# Settings of the reference implementation that change the function computed: another value than
# these means another model than the one in gpt2.py.
_REQUIRED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")


def gpt2_model(
    config: GPT2Config, *, lora: LoRAConfig | None = None, base: PyTree | None = None, seed: int = 0
) -> Model:
    """A GPT-2 to train: all parameters, or adapters only where ``lora`` is given.

    Args:
        config: the shape.
        lora: adapters; the base is then ``Model.frozen``.
        base: values of the plain model, as in ``gpt2_model(config).params``; None: random.
        seed: of the initial values. A function of ``seed`` alone, so public.

    >>> small = GPT2Config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    >>> gpt2_model(small).num_params == small.num_params
    True
    >>> gpt2_model(small, lora=LoRAConfig(rank=2)).num_params  # A (8, 2) and B (2, 24)
    64
    """
    streams = np.random.SeedSequence(_check.seed("seed", seed)).spawn(2)
    # adapters have a stream of their own: they do not depend on where the base comes from
    draws, adapter_draws = map(np.random.default_rng, streams)
    model, plain, adapters = gpt2_shapes(config, lora), {}, {}
    shapes = model.params if lora is None else model.frozen
    for path, _ in _tensor_names(config):
        shape = pick(shapes, path).shape
        if base is None:
            plain[path] = jnp.asarray(initial_value(path, shape, config.n_layer, draws))
        else:
            plain[path] = _expect(base, path, shape)
        if lora is not None and path[-1] == "kernel" and "/".join(path[2:4]) in lora.layers:
            low = adapter_draws.standard_normal((shape[0], lora.rank), np.float32)
            adapters[*path[:-1], "lora_a"] = jnp.asarray(low / np.float32(np.sqrt(shape[0])))
            adapters[*path[:-1], "lora_b"] = jnp.zeros((lora.rank, shape[1]))
    if lora is None:
        return dataclasses.replace(model, params=nest(plain))
    return dataclasses.replace(model, params=nest(adapters), frozen=nest(plain))


def gpt2_shapes(config: GPT2Config, lora: LoRAConfig | None = None) -> Model:
    """:func:`gpt2_model` with shapes in place of values: nothing is drawn, held or read."""
    model = from_nnx(
        GPT2(config, lora),
        trainable=nnx.Param if lora is None else nnx.LoRAParam,
        name=f"gpt2-{config.num_params / 1e6:.1f}M" + (f"-lora{lora.rank}" if lora else ""),
        vocab_size=config.vocab_size,
        max_length=config.n_positions,
        partition=partition_spec,
        export=lambda params, frozen, folder: save_pretrained(
            folder, config, merge_adapters(params, frozen, lora)
        ),
    )
    params, frozen = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (model.params, model.frozen)
    )
    return dataclasses.replace(model, params=params, frozen=frozen)


def _expect(base: PyTree, path: tuple[Any, ...], shape: tuple[int, ...]) -> jax.Array:
    name = ".".join(map(str, path))
    try:
        value = jnp.asarray(pick(base, path), jnp.float32)
    except (KeyError, TypeError):
        raise _check.reject("base", name, "is missing from the given parameters") from None
    if value.shape != shape:
        raise _check.reject("base", f"{name} {value.shape}", f"must have shape {shape}")
    return value


def merge_adapters(params: PyTree, frozen: PyTree, lora: LoRAConfig | None) -> PyTree:
    """The plain model's parameters with scale * A B added to each adapted matrix."""
    if lora is None:
        return params

    def walk(base: PyTree, low: PyTree) -> PyTree:
        out = {}
        for name, value in base.items():
            out[name] = walk(value, low.get(name, {})) if isinstance(value, dict) else value
        if "lora_a" in low:
            # On the host in float64: rounding of the product is then far below float32's.
            parts = (base["kernel"], low["lora_a"], low["lora_b"])
            kernel, a, b = (np.asarray(part, np.float64) for part in parts)
            out["kernel"] = np.asarray(kernel + lora.scale * (a @ b), np.float32)
        return out

    return walk(frozen, params)


def _tensor_names(config: GPT2Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path in the parameters, name in the file without its prefix)."""
    yield ("wte",), "wte.weight"
    yield ("wpe",), "wpe.weight"
    layers = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names = [f"h.{number}.{layer}" for number in range(config.n_layer) for layer in layers]
    for name in [*names, "ln_f"]:
        weight = "scale" if "ln_" in name else "kernel"
        yield (*name.split("."), weight), f"{name}.weight"
        yield (*name.split("."), "bias"), f"{name}.bias"


def read_config(folder: str | Path) -> GPT2Config:
    """The shape of the GPT-2 in a Hugging Face folder.

    Refused are other architectures, and settings that make it compute another function than ours.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise _check.reject("model", str(folder), "holds no config.json", _A_FOLDER)
    found = _json_object(path)
    for name, value in _REQUIRED.items():
        if found.get(name, value) != value or (name == "model_type" and name not in found):
            rule = f"only {value!r} is supported"
            raise _check.reject(f"config.json {name}", found.get(name), rule)
    known = (*_SHAPE, "layer_norm_epsilon")
    return GPT2Config(**{name: found[name] for name in known if name in found})


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _check.reject("model", str(path), f"cannot be read: {error}") from None
    return dict(_check.kind(path.name, found, dict, _A_FOLDER))


@pinned
def load_pretrained(
    folder: str | Path,
    *,
    lora: LoRAConfig | None = None,
    compute_dtype: str = "float32",
    remat: bool = False,
    seed: int = 0,
) -> Model:
    """The GPT-2 in a local Hugging Face folder, to train in full or with adapters.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` (or its shards with an index).
        lora, compute_dtype, remat, seed: as in :func:`gpt2_model` and :class:`GPT2Config`.
    """
    config = dataclasses.replace(read_config(folder), compute_dtype=compute_dtype, remat=remat)
    where = _locate(Path(folder))
    prefix = "transformer." if "transformer.wte.weight" in where else ""
    values: dict[tuple[Any, ...], Any] = {}
    for path, name in _tensor_names(config):
        full = prefix + name
        if full not in where:
            raise _check.reject("folder", str(folder), f"its weights lack the tensor {full}")
        with safe_open(where[full], framework="flax") as tensors:
            values[path] = tensors.get_tensor(full).astype(jnp.float32)
    return gpt2_model(config, lora=lora, base=nest(values), seed=seed)


def _locate(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif index.is_file():
        shards = _check.kind("weight_map", _json_object(index).get("weight_map"), dict).values()
        files = sorted({folder / Path(str(name)).name for name in shards})
    else:
        way_out = "Save the model with safe_serialization=True; pickled weights are not read."
        raise _check.reject("folder", str(folder), f"holds no {WEIGHTS}", way_out)
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="flax") as tensors:
                where |= dict.fromkeys(tensors.keys(), file)
        except (SafetensorError, OSError) as error:
            raise _check.reject("folder", str(file), f"cannot be read: {error}") from None
    return where


def save_pretrained(folder: str | Path, config: GPT2Config, params: PyTree) -> None:
    """Write the plain model's parameters as a Hugging Face folder; no optimizer or noise state.

    Each file is written beside its place and moved there at once. Put the tokenizer's
    ``tokenizer.json`` beside them and any Hugging Face loader opens the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"transformer.{name}": np.ascontiguousarray(np.asarray(pick(params, path), np.float32))
        for path, name in _tensor_names(config)
    }
    _files.write(
        folder / WEIGHTS, lambda stream: save_file(tensors, stream.name, metadata={"format": "pt"})
    )
    facts = {name: getattr(config, name) for name in _SHAPE} | _REQUIRED
    facts |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    facts |= {"architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    facts |= {"layer_norm_epsilon": config.layer_norm_epsilon}
    if config.vocab_size <= _GPT2_END:
        # Loaders fall back to GPT-2's own end token, which this vocabulary does not have.
        facts |= {"bos_token_id": None, "eos_token_id": None}
    _files.write(folder / "config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")
