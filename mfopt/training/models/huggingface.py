"""Models on disk: decoders to and from a local Hugging Face folder, any model as safetensors.

The model alone is written: no optimizer, no noise state, no secret. Nothing is downloaded, and only
safetensors files are read (pickled ``pytorch_model.bin`` runs code when loaded: it is refused).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras, _files
from mfopt._runtime._float64 import pinned
from mfopt._runtime._types import JsonObject
from mfopt.training.models import nnx_model
from mfopt.training.models.decoder import TASKS, Decoder, LoRAConfig
from mfopt.training.models.families import FAMILIES, DecoderConfig
from mfopt.training.models.model import Model, PyTree
from mfopt.training.models.nnx_model import from_nnx, nest, pick
from mfopt.training.tokenizers import FILE_NAME, SETTINGS, Tokenizer

with _extras.required():
    from flax import nnx
    from flax.traverse_util import flatten_dict
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

WEIGHTS = "model.safetensors"
ADAPTER = "adapter"  # folder beside the weights
_GENERATION = "generation_config.json"
# files of a base model's folder that say how text is made of it: training does not change them
_KEPT = (_GENERATION, SETTINGS, "special_tokens_map.json", "chat_template.jinja")
_A_FOLDER = "Name the folder of a model; that of a run is RUN/model."
# tensors of older files that follow from others
_DERIVED = (
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
    *(".rotary_emb.inv_freq", "lm_head.weight"),
)


def gpt2_model(
    config: DecoderConfig,
    *,
    lora: LoRAConfig | None = None,
    folder: str | Path = "",
    seed: int = 0,
) -> Model:
    """A decoder to train: all parameters, or adapters only where ``lora`` is given.

    Args:
        config: the shape.
        lora: adapters; the base is then ``Model.frozen``.
        folder: Hugging Face folder with the values of the plain model; empty: they are random.
        seed: of the initial values. A function of ``seed`` alone, so public.

    >>> from mfopt.training.models.families import gpt2_config
    >>> small = gpt2_config(vocab_size=64, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    >>> gpt2_model(small).num_params  # an embedding of 64 tokens, one of 8 positions, a block
    1464
    >>> gpt2_model(small, lora=LoRAConfig(rank=2)).num_params  # A (8, 2) and B (2, 24)
    64
    """
    streams = np.random.SeedSequence(_check.seed("seed", seed)).spawn(2)
    # adapters have a stream of their own: they do not depend on where the base comes from
    draws, adapter_draws = map(np.random.default_rng, streams)
    model = gpt2_shapes(config, lora)
    adapters = {}
    plain = _weights(Path(folder), config) if folder else {}
    shapes = model.params if lora is None else model.frozen
    adapted = _adapted(config, lora)
    for path in [tensor.path for tensor in config.tensors()]:
        shape = pick(shapes, path).shape
        if not folder:
            plain[path] = jnp.asarray(config.initial_value(path, shape, draws))
        elif plain[path].shape != shape:
            wrong_shape = f"{'.'.join(path)} {plain[path].shape}"
            raise _check.reject("folder", wrong_shape, f"must have shape {shape}")
        if lora is None:  # a base that is frozen stays as its file has it, often bfloat16
            plain[path] = plain[path].astype(jnp.float32)
        elif path[-1] == "kernel" and "/".join(path[2:4]) in adapted:
            low = adapter_draws.standard_normal((shape[0], lora.rank), np.float32)
            adapters[*path[:-1], "lora_a"] = jnp.asarray(low / np.float32(np.sqrt(shape[0])))
            adapters[*path[:-1], "lora_b"] = jnp.zeros((lora.rank, shape[1]))
    if lora is None:
        return dataclasses.replace(model, params=nest(plain))
    return dataclasses.replace(model, params=nest(adapters), frozen=nest(plain))


def _adapted(config: DecoderConfig, lora: LoRAConfig | None) -> dict[str, LoRAConfig]:
    """The adapter of each linear layer that has one."""
    adapted: dict[str, LoRAConfig] = {}
    if lora is None:
        return adapted
    for layer in lora.layers:
        present = [x for x in (layer, *TASKS.get(layer, ())) if x in config.matrices]
        if not present:
            raise _check.reject(
                "lora_layers", layer, f"must be some of {', '.join(config.matrices)}"
            )
        adapted |= dict.fromkeys(present, lora)
    return adapted


def gpt2_shapes(config: DecoderConfig, lora: LoRAConfig | None = None) -> Model:
    """:func:`gpt2_model` with shapes in place of values: nothing is drawn, held or read."""

    def export(params: PyTree, frozen: PyTree, folder: Path) -> None:
        """Write the plain model, and in a folder beside it the adapters alone if it has such."""
        plain = params if lora is None else _merge_adapters(params, frozen)
        save_pretrained(folder, config, plain)
        if lora is not None:
            _save_adapters(folder / ADAPTER, config, params, lora)

    module = Decoder(config, _adapted(config, lora))
    model = from_nnx(
        module,
        trainable=nnx.Param if lora is None else nnx.LoRAParam,
        vocab_size=config.vocab_size,
        max_length=module.positions,
        export=export,
    )
    params, frozen = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (model.params, model.frozen)
    )
    return dataclasses.replace(model, params=params, frozen=frozen)


def _save_adapters(folder: Path, config: DecoderConfig, params: PyTree, lora: LoRAConfig) -> None:
    """Write the adapters as a folder that PEFT puts onto the base model.

    Where matrices with adapters share a tensor in the file their adapters are one, of a rank that
    is the sum of theirs: those of other rows are 0.

    Args:
        folder: to make.
        config, params, lora: shape of the base model, its adapters, and how they were made.
    """
    low = flatten_dict(params)
    sizes = _columns(config)
    tensors: dict[str, np.ndarray] = {}
    patterns = {}
    for path, tensor_name, _, rows in config.tensors():
        if (*path[:-1], "lora_a") not in low or path[-1] != "kernel":
            continue
        a, b = (np.asarray(low[*path[:-1], x], np.float32).T for x in ("lora_a", "lora_b"))
        whole = np.zeros((sizes[tensor_name], lora.rank), np.float32)
        whole[slice(None) if rows is None else rows] = b
        module = tensor_name.removesuffix(".weight")
        for letter, part, axis in (("A", a, 0), ("B", whole, 1)):
            name = f"base_model.model.{module}.lora_{letter}.weight"
            parts = [tensors[name], part] if name in tensors else [part]
            # the writer takes the bytes as they lie
            tensors[name] = np.ascontiguousarray(np.concatenate(parts, axis))
        patterns[module.partition(f".{path[1]}.")[2]] = len(tensors[name][0])  # in all blocks alike
    folder.mkdir()
    _save_tensors(folder / "adapter_model.safetensors", tensors)
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.source.get("_name_or_path"),
        "target_modules": sorted(patterns),
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,  # their quotient is the scale of A B: 1
        "fan_in_fan_out": config.family.learned,
        "inference_mode": True,
    }
    _files.write(folder / "adapter_config.json", facts)


def _save_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write a file as PyTorch's tools read it."""
    _files.write(path, lambda stream: save_file(tensors, stream.name, metadata={"format": "pt"}))


def _columns(config: DecoderConfig) -> Counter[str]:
    """Outputs of each tensor of a file that holds matrices or their biases, one or several."""
    counts = Counter[str]()
    for path, name, _, _ in config.tensors():
        counts[name] += config.matrices.get("/".join(path[2:4]), (0, 0))[1]
    return counts


def _merge_adapters(params: PyTree, frozen: PyTree) -> PyTree:
    """The plain model's parameters with A B added to each adapted matrix."""
    merged = flatten_dict(frozen)
    low = flatten_dict(params)
    for *layer, name in low:
        if name == "lora_a":
            # On the host in float64: rounding of the product is then far below float32's.
            parts = (merged[*layer, "kernel"], low[*layer, name], low[*layer, "lora_b"])
            kernel, a, b = (np.asarray(part, np.float64) for part in parts)
            merged[*layer, "kernel"] = np.asarray(kernel + a @ b, np.float32)
    return nest(merged)


def read_config(folder: str | Path) -> DecoderConfig:
    """The shape of the decoder in a Hugging Face folder.

    Refused are other architectures, and settings that make it compute another function than ours.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise _check.reject("model", str(folder), "holds no config.json", _A_FOLDER)
    settings = _json_object(path)
    way_out = "Another model is given as MODULE:FUNCTION, which makes a Flax NNX module."
    _check.choice("config.json model_type", settings.get("model_type"), (*FAMILIES,), way_out)
    return DecoderConfig.read(settings)


def _json_object(path: Path) -> JsonObject:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise _check.reject("model", str(path), f"cannot be read: {error}") from None
    return _check.kind(path.name, content, dict, _A_FOLDER)


@pinned
def load_pretrained(
    folder: str | Path,
    *,
    lora: LoRAConfig | None = None,
    compute_dtype: str = "float32",
    seed: int = 0,
) -> Model:
    """The decoder in a local Hugging Face folder, to train in full or with adapters.

    Args:
        folder: holds ``config.json`` and ``model.safetensors`` (or its shards with an index).
        lora, compute_dtype, seed: as in :func:`gpt2_model` and :class:`DecoderConfig`.
    """
    config = dataclasses.replace(read_config(folder), compute_dtype=compute_dtype)
    return gpt2_model(config, lora=lora, folder=folder, seed=seed)


def _weights(folder: Path, config: DecoderConfig) -> dict[nnx_model.Path, jax.Array]:
    """The parameters without adapters in a Hugging Face folder, as they are stored, by path."""
    files = _locate(folder)
    older = "transformer." if "wte.weight" in files else ""  # a prefix that first files lack
    values = {}
    names = set()
    for tensor in config.tensors():
        name = tensor.name.removeprefix(older)
        names.add(name)
        if name not in files:
            raise _check.reject("folder", str(folder), f"its weights lack the tensor {name}")
        with safe_open(files[name], framework="flax") as tensors:
            value = tensors.get_tensor(name)
        value = value if tensor.rows is None else value[tensor.rows]
        values[tensor.path] = value.T if tensor.turned else value
    for name in files.keys() - names:
        if not name.endswith(_DERIVED):
            rule = f"its weights hold {name}, which config.json does not mention"
            raise _check.reject("folder", str(folder), rule)
    return values


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
    file_of: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="flax") as tensors:
                file_of |= dict.fromkeys(tensors.keys(), file)
        except (SafetensorError, OSError) as error:
            raise _check.reject("folder", str(file), f"cannot be read: {error}") from None
    return file_of


def save_pretrained(folder: str | Path, config: DecoderConfig, params: PyTree) -> None:
    """Write the plain model's parameters as a Hugging Face folder.

    With the tokenizer's ``tokenizer.json`` beside them any Hugging Face loader opens it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, np.ndarray] = {}
    counts = _columns(config)
    for path, name, turned, rows in config.tensors():
        value = np.asarray(pick(params, path), np.float32)
        value = np.ascontiguousarray(value.T if turned else value)
        if rows is not None:  # one of several in a tensor
            empty = np.empty((counts[name], *value.shape[1:]), np.float32)
            tensors.setdefault(name, empty)[rows] = value
        else:
            tensors[name] = value
    _save_tensors(folder / WEIGHTS, tensors)
    _files.write(folder / "config.json", config.facts() | {"dtype": "float32"})


def export_model(
    model: Model,
    params: PyTree,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    end_id: int | None = None,
    base: Path | None = None,
) -> Path:
    """Write ``params`` of ``model`` into ``folder``; returns it.

    A model with its own ``export`` writes what it likes (a Hugging Face folder); any other is
    written as ``model.safetensors``, one tensor per leaf, named by its path.

    Args:
      model, params, folder: the model, its trainable parameters, and where files are written, in
        place of what is there.
      tokenizer: written beside the model as ``tokenizer.json``.
      end_id: the token that ended the records it was trained on, where generation then stops.
      base: folder of the model that was trained further: the settings of its tokenizer and of
        generation, and its template of chats, are copied.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _files.new_folder(folder) as part:
        if model.export is not None:
            model.export(params, model.frozen, part)
        else:
            arrays = {
                jax.tree_util.keystr(path, simple=True, separator=".") or "value": (
                    np.ascontiguousarray(leaf)
                )
                for path, leaf in jax.tree.leaves_with_path(params)
            }
            save_file(arrays, part / WEIGHTS)
        kept_files = [] if base is None else [base / name for name in _KEPT]
        for file in filter(Path.is_file, kept_files):
            shutil.copyfile(file, part / file.name)
        if tokenizer is not None:
            tokenizer.save(part / FILE_NAME)
        if end_id is not None and (part / "config.json").is_file():
            config = _json_object(part / "config.json")
            ends = config.get("eos_token_id")
            ends = [end_id, *(ends if isinstance(ends, list) else [ends])]
            ends = [end for end in dict.fromkeys(ends) if end is not None]
            ending = {"eos_token_id": ends if len(ends) > 1 else end_id}
            _files.write(part / "config.json", config | ending)
            kept = _json_object(part / _GENERATION) if (part / _GENERATION).is_file() else {}
            _files.write(part / _GENERATION, kept | ending)
        for path in (part, *part.rglob("*")):  # made to be released, whatever wrote it
            os.chmod(path, 0o755 if path.is_dir() else 0o644)
    return folder
