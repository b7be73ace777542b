"""Llama, Mistral, Qwen 2 and 3, and Gemma: one decoder, of which they are the variants.

RMS norms, rotary positions (Su et al. 2021), attention with a head of keys and values for each
group of queries (Ainslie et al. 2023), and gated networks (Shazeer 2020).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mfopt._runtime import _check
from mfopt.training.models.decoder import (
    TASKS,
    Adapters,
    Linear,
    Norm,
    Shape,
    Tensor,
    attend,
    check_settings,
)

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
_OURS = {"compute_dtype", "remat", "carried"}  # fields that config.json does not have
# read by other loaders of an exported file only
_CARRIED = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")
_WINDOW = ("use_sliding_window", "layer_types", "max_window_layers")
# Values of settings that change the function computed, with which it is the one here.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1.0),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
}
# Ways to stretch the rotary positions, with the numbers that each has.
_STRETCHED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPES = {"linear": _STRETCHED[:1], "llama3": _STRETCHED}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_WAY_OUT = "Take it out if it changes nothing for records of the length that you train on."


@dataclasses.dataclass(frozen=True)
class LlamaConfig(Shape):
    """Shape of a decoder of the Llama family, with the names of its ``config.json``.

    Args:
        model_type: which of ``FAMILIES``. In Qwen 2 queries, keys and values have biases, in
            Qwen 3 queries and keys are normalized in each head; Gemma scales the embedding by √d,
            counts the scales of its norms from 1, and its gate is a GELU, not a SiLU.
        rope_theta, rope_scaling: base of the wavelengths of the rotary positions, and (name, value)
            of how these are stretched, ``rope_type`` first; empty: they are not.
        attention_bias: all four matrices of attention have biases.
        sliding_window: positions that a token attends to at most; longer records are refused, so
            that attention is full.
        carried: (name, value) of settings that only other loaders of the file read.
        compute_dtype, remat: as in :class:`~mfopt.training.models.decoder.Shape`.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    carried: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _check.choice("model_type", self.model_type, FAMILIES)
        for name in ("tie_word_embeddings", "attention_bias"):
            _check.kind(name, getattr(self, name), bool)
        for name in _SIZES:
            _check.integer(name, getattr(self, name))
        if self.sliding_window is not None:
            _check.integer("sliding_window", self.sliding_window)
        for name in ("rms_norm_eps", "rope_theta"):
            _check.positive(name, getattr(self, name))
        for name, value in self.rope_scaling[1:]:
            _check.positive(f"rope_scaling {name}", value)
        ends = dict(self.rope_scaling)
        if ends.get("low_freq_factor", 0) >= ends.get("high_freq_factor", 1):
            rule = "needs low_freq_factor < high_freq_factor"
            raise _check.reject("rope_scaling", ends, rule)
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            rule = f"must divide num_attention_heads = {heads}"
            raise _check.reject("num_key_value_heads", self.num_key_value_heads, rule)
        if self.head_dim % 2:
            raise _check.reject("head_dim", self.head_dim, "must be even")
        super().__post_init__()

    @classmethod
    def read(cls, found: dict[str, Any]) -> LlamaConfig:
        """The shape that a ``config.json`` says; refused is one of another function."""
        found = dict(found)
        gemma, layers = found["model_type"] == "gemma", found.get("num_hidden_layers")
        # older files have the base of the positions outside
        rope = (found.pop("rope_parameters", None) or {}) | (found.pop("rope_scaling", None) or {})
        found["rope_scaling"] = _scaling(rope)  # takes its numbers out
        for name in rope.keys() - {"rope_theta", "partial_rotary_factor"}:
            raise _check.reject(f"config.json {name}", rope[name], "is not known here", _WAY_OUT)
        found |= rope
        if found.get("use_sliding_window") is False:
            found["sliding_window"] = None
        activations = ("gelu", "gelu_pytorch_tanh") if gemma else ("silu",)
        required = _REQUIRED | {"hidden_act": activations}
        every = ["full_attention"] * (layers if isinstance(layers, int) else 0)
        kinds = found.get("layer_types")
        windowed = found.get("sliding_window") is not None
        if not (windowed and isinstance(kinds, list) and {*kinds} <= _LAYER_TYPES):
            required["layer_types"] = (None, every)
        fields = {field.name for field in dataclasses.fields(cls)} - _OURS
        check_settings(found, fields | {"use_sliding_window", "layer_types"}, required)
        known = {name: found[name] for name in fields if found.get(name) is not None}
        for name in _SIZES:
            if name not in known and name not in ("num_key_value_heads", "head_dim"):
                raise _check.reject("config.json", name, "is missing")
        heads = _check.integer("num_attention_heads", known["num_attention_heads"])
        size = _check.integer("hidden_size", known["hidden_size"]) // heads
        usual = {"num_key_value_heads": heads, "head_dim": size, "tie_word_embeddings": gemma}
        names = (*_CARRIED, *_WINDOW) if windowed else _CARRIED
        carried = {name: found[name] for name in names if name in found}
        if "layer_types" in carried:
            carried["layer_types"] = tuple(carried["layer_types"])
        return cls(**usual | known, carried=tuple(carried.items()))

    def facts(self) -> dict[str, Any]:
        """What a ``config.json`` says of the shape."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        facts = {name: value for name, value in facts.items() if name not in _OURS}
        facts["hidden_act"] = "gelu_pytorch_tanh" if self.gemma else "silu"
        facts["rope_scaling"] = dict(self.rope_scaling) or None
        return facts | dict(self.carried) | {"architectures": [FAMILIES[self.model_type]]}

    @property
    def gemma(self) -> bool:
        """True for a Gemma."""
        return self.model_type == "gemma"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        shape = self.vocab_size, self.hidden_size
        longest = min(self.max_position_embeddings, self.sliding_window or math.inf)
        return *shape, self.num_hidden_layers, int(longest)

    @property
    def scale(self) -> float:
        return self.hidden_size**0.5 if self.gemma else 1.0

    def parts(self, adapters: Adapters) -> tuple[Any, Any]:
        return GroupedAttention(self, adapters), GatedMLP(self, adapters)

    def norm(self, features: int | None = None) -> Norm:
        """A norm over ``features``; None: the width of the model."""
        return Norm(features or self.hidden_size, self.rms_norm_eps, bias=False, shift=self.gemma)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters without adapters, in the order in which values are drawn."""
        yield Tensor(("wte",), "model.embed_tokens.weight")
        norms = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
        if self.model_type == "qwen3":
            norms |= {f"attn/{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
        for number in map(str, range(self.num_hidden_layers)):
            block = f"model.layers.{number}"
            for norm, name in norms.items():
                path = ("h", number, *norm.split("/"), "scale")
                yield Tensor(path, f"{block}.{name}.weight")
            for layer in sum(TASKS.values(), ()):
                path = ("h", number, *layer.split("/"))
                name = f"{block}.{layer.replace('attn/', 'self_attn/').replace('/', '.')}"
                yield Tensor((*path, "kernel"), f"{name}.weight", True)
                if self.biased(layer):
                    yield Tensor((*path, "bias"), f"{name}.bias")
        yield Tensor(("ln_f", "scale"), "model.norm.weight")
        if not self.tie_word_embeddings:
            yield Tensor(("lm_head",), "lm_head.weight")

    def biased(self, layer: str) -> bool:
        """True if a linear layer has a bias."""
        qwen2 = self.model_type == "qwen2" and layer in TASKS["attn/c_attn"]
        return qwen2 or (self.attention_bias and layer.startswith("attn/"))


class GroupedAttention(nnx.Module):
    """Causal self-attention of one sequence, (L, d) -> (L, d), and keys and values."""

    def __init__(self, config: LlamaConfig, adapters: Adapters) -> None:
        d, self.size = config.hidden_size, config.head_dim
        self.theta, self.scaling = config.rope_theta, config.rope_scaling
        queries = config.num_attention_heads * self.size
        shared = config.num_key_value_heads * self.size

        def linear(name: str, rows: int, columns: int) -> Linear:
            lora, bias = adapters.get(name), config.biased(name)
            return Linear(rows, columns, lora, bias, out=name == "attn/o_proj")

        self.q_proj = linear("attn/q_proj", d, queries)
        self.k_proj = linear("attn/k_proj", d, shared)
        self.v_proj = linear("attn/v_proj", d, shared)
        self.o_proj = linear("attn/o_proj", queries, d)
        normed = config.model_type == "qwen3"
        self.q_norm = config.norm(self.size) if normed else None
        self.k_norm = config.norm(self.size) if normed else None

    def __call__(self, x: jax.Array, at: Any, cache: Any) -> tuple[jax.Array, Any]:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (layer(x).reshape(len(x), -1, self.size) for layer in layers)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        speed = speeds(self.size // 2, self.theta, self.scaling)
        query, key = (rotated(rows, at, speed) for rows in (query, key))
        mixed, cache = attend(query, key, value, at, cache)
        return self.o_proj(mixed), cache


def _scaling(rope: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """``rope_scaling`` of :class:`LlamaConfig`, taken out of what a ``config.json`` says of it."""
    kind = rope.pop("rope_type", "default")
    kind = rope.pop("type", kind)  # in older files
    if kind == "default":
        return ()
    if kind not in _ROPES:
        rule = f"only {' and '.join(_ROPES)} are supported"
        raise _check.reject("config.json rope_scaling", kind, rule, _WAY_OUT)
    if missing := [name for name in _ROPES[kind] if name not in rope]:
        raise _check.reject("config.json rope_scaling", kind, f"lacks {', '.join(missing)}")
    return (("rope_type", kind), *((name, rope.pop(name)) for name in _ROPES[kind]))


def speeds(planes: int, theta: float, scaling: tuple[tuple[str, Any], ...] = ()) -> np.ndarray:
    """Radians by which a position turns each plane, float32 (planes,): plane i by θ^(-i / planes).

    ``scaling``: stretched by a factor; with "llama3" planes that turn often enough within the
    original length are left as they are, with a passage in between.
    """
    speed = theta ** (-np.arange(planes) / planes)
    if given := dict(scaling):
        share = np.zeros(planes)  # left as it is
        if given["rope_type"] == "llama3":
            turns = given["original_max_position_embeddings"] * speed / (2 * np.pi)
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        speed = speed * (share + (1 - share) / given["factor"])
    return speed.astype(np.float32)


def rotated(rows: jax.Array, at: Any, speed: np.ndarray) -> jax.Array:
    """Queries or keys (T, heads, size) of the positions from ``at`` on, rotated.

    Axis i and axis i + size / 2 are a plane, which turns by ``speed`` (size / 2,) a position.
    """
    angle = ((at + jnp.arange(len(rows)))[:, None] * speed)[:, None]
    first, second = jnp.split(rows.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    both = first * cos - second * sin, second * cos + first * sin
    return jnp.concatenate(both, axis=-1).astype(rows.dtype)


class GatedMLP(nnx.Module):
    """The gated network of a block, (L, d) -> (L, d)."""

    def __init__(self, config: LlamaConfig, adapters: Adapters) -> None:
        d, hidden, self.gemma = config.hidden_size, config.intermediate_size, config.gemma
        self.gate_proj = Linear(d, hidden, adapters.get("mlp/gate_proj"), False)
        self.up_proj = Linear(d, hidden, adapters.get("mlp/up_proj"), False)
        self.down_proj = Linear(hidden, d, adapters.get("mlp/down_proj"), False, out=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = self.gate_proj(x)
        open = jax.nn.gelu(gate, approximate=True) if self.gemma else jax.nn.silu(gate)
        return self.down_proj(open * self.up_proj(x))
