"""Llama, Mistral, Qwen, Gemma, Phi 3, OLMo 2, SmolLM 3 and Pythia: variants of one decoder.

Rotary positions (Su et al. 2021), attention with a head of keys and values for each group of
queries (Ainslie et al. 2023), and, but in Pythia, gated networks (Shazeer 2020) and RMS norms.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

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


class DecoderFamily(NamedTuple):
    """In what the models of one ``model_type`` differ from a Llama.

    ``norms``: names in the file of the norms of a block (:class:`~.decoder.Block`); ``query_norm``:
    queries and keys are normalized in each "head" or over the "width"; ``biased``: layers that
    always have biases; ``gemma``: the embedding is scaled by √d and scales of norms count from 1;
    ``pythia``: layer norms, both halves of a block read the same input, no gates; ``follows``:
    further settings of its ``config.json`` that are followed here.
    """

    architecture: str
    norms: dict[str, str]
    query_norm: str = ""
    biased: tuple[str, ...] = ()
    gemma: bool = False
    pythia: bool = False
    follows: tuple[str, ...] = ()


_BEFORE = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
_AFTER = {"post_1": "post_attention_layernorm", "post_2": "post_feedforward_layernorm"}
_BOTH = _AFTER | {"ln_1": "input_layernorm", "ln_2": "pre_feedforward_layernorm"}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_WHERE = ("no_rope_layers", "no_rope_layer_interval")
_PARTLY = ("partial_rotary_factor", "original_max_position_embeddings")
_LOCAL = ("rope_local_base_freq", "sliding_window_pattern")
_QKV = TASKS["attn/c_attn"]
_MATRICES = sum(TASKS.values(), ())
FAMILIES = {
    "llama": DecoderFamily("LlamaForCausalLM", _BEFORE),
    "mistral": DecoderFamily("MistralForCausalLM", _BEFORE),
    "qwen2": DecoderFamily("Qwen2ForCausalLM", _BEFORE, biased=_QKV),
    "qwen3": DecoderFamily("Qwen3ForCausalLM", _BEFORE, "head"),
    "smollm3": DecoderFamily("SmolLM3ForCausalLM", _BEFORE, follows=_WHERE),
    "olmo2": DecoderFamily("Olmo2ForCausalLM", _AFTER, "width"),
    "phi3": DecoderFamily("Phi3ForCausalLM", _BEFORE, follows=_PARTLY),
    "gemma": DecoderFamily("GemmaForCausalLM", _BEFORE, gemma=True),
    "gemma2": DecoderFamily("Gemma2ForCausalLM", _BOTH, gemma=True, follows=_CAPS),
    "gemma3_text": DecoderFamily(
        "Gemma3ForCausalLM", _BOTH, "head", (), True, False, (*_CAPS, *_LOCAL)
    ),
    "gpt_neox": DecoderFamily(
        "GPTNeoXForCausalLM", _BEFORE, biased=_MATRICES, pythia=True, follows=_PARTLY
    ),
}
# names in the file; of several matrices in one tensor the same
_NAMES = {layer: layer.replace("attn", "self_attn").replace("/", ".") for layer in _MATRICES}
_ENDS = {"wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head"}
_OTHER_NAMES = {
    "phi3": dict.fromkeys(_QKV, "self_attn.qkv_proj")
    | dict.fromkeys(TASKS["mlp/c_fc"], "mlp.gate_up_proj"),
    "gpt_neox": dict.fromkeys(_QKV, "attention.query_key_value")
    | {"attn/o_proj": "attention.dense"}
    | {"mlp/up_proj": "mlp.dense_h_to_4h", "mlp/down_proj": "mlp.dense_4h_to_h"}
    | {"wte": "gpt_neox.embed_in", "ln_f": "gpt_neox.final_layer_norm", "lm_head": "embed_out"},
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
# settings that are followed in every family, beside sizes
_FOLLOWED = {
    *("tie_word_embeddings", "attention_bias", "sliding_window", "use_sliding_window"),
    *("layer_types", "rope_theta", "rms_norm_eps", "layer_norm_eps"),
}
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), jax.nn.gelu),
}
# Values of settings that change the function computed, with which it is the one here.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_bidirectional_attention": (None, False),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1.0),
}
# Ways to stretch the rotary positions, with the numbers that each has.
_STRETCHED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPES = {"linear": _STRETCHED[:1], "llama3": _STRETCHED}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_WAY_OUT = "Take it out if it changes nothing for records of the length that you train on."


class Rotary(NamedTuple):
    """Rotary positions of a layer.

    ``theta``: base of the wavelengths; ``share``: of a head's axes that are rotated; ``scaling``:
    (name, value) of how wavelengths are stretched, ``rope_type`` first; empty: they are not.
    """

    theta: float = 1e4
    share: float = 1.0
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyConfig(Shape):
    """Shape of a decoder of one of the ``FAMILIES``; sizes are named as in its ``config.json``.

    Args:
        model_type: which of ``FAMILIES``.
        norm_epsilon: that of the norms.
        rotary: of each layer; None: it has no positions.
        tie_word_embeddings: the output layer is the embedding transposed.
        attention_bias: all four matrices of attention have biases.
        sliding_window: positions that a token attends to at most; longer records are refused, so
            that attention is full.
        activation: of the network of a block.
        query_scale: factor on products of queries and keys.
        attention_cap: c of c tanh(x / c) on these products; None: none.
        source: the content of ``config.json``.
        logits_cap, compute_dtype, remat: as in :class:`~mfopt.training.models.decoder.Shape`.
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
    norm_epsilon: float
    rotary: tuple[Rotary | None, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    sliding_window: int | None
    activation: str
    query_scale: float
    attention_cap: float | None
    source: str = dataclasses.field(compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("tie_word_embeddings", "attention_bias"):
            _check.kind(name, getattr(self, name), bool)
        for name in _SIZES:
            _check.integer(name, getattr(self, name))
        if self.sliding_window is not None:
            _check.integer("sliding_window", self.sliding_window)
        for name in ("norm_epsilon", "query_scale", "attention_cap", "logits_cap"):
            if getattr(self, name) is not None:
                _check.positive(name, getattr(self, name))
        for rotary in filter(None, self.rotary):
            _check.positive("rope_theta", rotary.theta)
            _check.probability("partial_rotary_factor", rotary.share, closed=True)
            for name, value in rotary.scaling[1:]:
                _check.positive(f"rope_scaling {name}", value)
            numbers = dict(rotary.scaling)
            if numbers.get("low_freq_factor", 0) >= numbers.get("high_freq_factor", 1):
                rule = "needs low_freq_factor < high_freq_factor"
                raise _check.reject("rope_scaling", numbers, rule)
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            rule = f"must divide num_attention_heads = {heads}"
            raise _check.reject("num_key_value_heads", self.num_key_value_heads, rule)
        if self.head_dim % 2:
            raise _check.reject("head_dim", self.head_dim, "must be even")
        super().__post_init__()

    @classmethod
    def read(cls, settings: dict[str, Any]) -> FamilyConfig:
        """The shape that a ``config.json`` says; refused is one of another function."""
        found = dict(settings)
        family = FAMILIES[found["model_type"]]
        blocks = _check.integer("num_hidden_layers", found.get("num_hidden_layers"))
        kinds = _kinds(found, blocks)
        ropes = _ropes(found)
        if found.get("use_sliding_window") is False:
            found["sliding_window"] = None
        windowed = found.get("sliding_window") is not None
        if not windowed and found.get("layer_types") and _SLIDING in kinds:
            rule = "has layers with a window, and there is no `sliding_window`"
            raise _check.reject("config.json layer_types", kinds, rule)
        usual = "gelu_pytorch_tanh" if family.gemma else "gelu" if family.pythia else "silu"
        activations = (*_ACTIVATIONS,)[1:] if family.gemma or family.pythia else ("silu",)
        required = {k: v for k, v in _REQUIRED.items() if k not in family.follows}
        found["partial_rotary_factor"] = min(rotary.share for rotary in ropes.values())
        required |= dict.fromkeys(("hidden_act", "hidden_activation"), activations)
        required["hidden_activation"] += (None,)
        if family.pythia:
            required["use_parallel_residual"] = (True,)
        check_settings(found, {*_SIZES, *_FOLLOWED, *family.follows, "model_type"}, required)
        known = {name: found[name] for name in _SIZES if found.get(name) is not None}
        for name in _SIZES:
            if name not in known and name not in ("num_key_value_heads", "head_dim"):
                raise _check.reject("config.json", name, "is missing")
        epsilon = "layer_norm_eps" if family.pythia else "rms_norm_eps"
        if found.get(epsilon) is None:
            raise _check.reject("config.json", epsilon, "is missing")
        heads = _check.integer("num_attention_heads", known["num_attention_heads"])
        size = _check.integer("hidden_size", known["hidden_size"]) // heads
        known = {"num_key_value_heads": heads, "head_dim": size} | known
        if family.pythia:
            known["num_key_value_heads"] = heads
        positions = found.get("no_rope_layers") or [1] * blocks
        if len(positions) != blocks or len(kinds) != blocks:
            raise _check.reject("config.json layers", blocks, "is not the length of their settings")
        scalar = found.get("query_pre_attn_scalar") or known["head_dim"]
        # older Gemma files name the exact GELU where all readers take the other one
        named = found.get("hidden_activation") or (found.get("hidden_act"), usual)[family.gemma]
        return cls(
            model_type=found["model_type"],
            norm_epsilon=_check.positive(epsilon, found[epsilon]),
            rotary=tuple(
                ropes[kind] if there else None for kind, there in zip(kinds, positions, strict=True)
            ),
            tie_word_embeddings=found.get("tie_word_embeddings", family.gemma),
            attention_bias=found.get("attention_bias", family.pythia),
            sliding_window=found.get("sliding_window"),
            activation=named or usual,
            query_scale=_check.positive("query_pre_attn_scalar", scalar) ** -0.5,
            attention_cap=found.get("attn_logit_softcapping"),
            logits_cap=found.get("final_logit_softcapping"),
            source=json.dumps(settings),
            **known,
        )

    def facts(self) -> dict[str, Any]:
        """What a ``config.json`` says of the shape: all that was read."""
        return json.loads(self.source) | {"architectures": [self.family.architecture]}

    @property
    def family(self) -> DecoderFamily:
        """In what it differs from a Llama."""
        return FAMILIES[self.model_type]

    @property
    def norms(self) -> tuple[str, ...]:
        return (*self.family.norms,)

    @property
    def parallel(self) -> bool:
        return self.family.pythia

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        shape = self.vocab_size, self.hidden_size
        longest = min(self.max_position_embeddings, self.sliding_window or math.inf)
        return *shape, self.num_hidden_layers, int(longest)

    @property
    def scale(self) -> float:
        return self.hidden_size**0.5 if self.family.gemma else 1.0

    def parts(self, adapters: Adapters, number: int) -> tuple[Any, Any]:
        return GroupedAttention(self, adapters, self.rotary[number]), Network(self, adapters)

    def norm(self, features: int | None = None) -> Norm:
        """A norm over ``features``; None: the width of the model."""
        family = self.family
        features = features or self.hidden_size
        return Norm(features, self.norm_epsilon, bias=family.pythia, shift=family.gemma)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each linear layer of a block."""
        d, hidden = self.hidden_size, self.intermediate_size
        queries, shared = (
            heads * self.head_dim for heads in (self.num_attention_heads, self.num_key_value_heads)
        )
        columns = (queries, shared, shared, d, hidden, hidden, d)
        rows = (d, d, d, queries, d, d, hidden)
        sizes = dict(zip(_MATRICES, zip(rows, columns, strict=True), strict=True))
        if self.family.pythia:
            del sizes["mlp/gate_proj"]
        return sizes

    def linear(self, layer: str, adapters: Adapters) -> Linear:
        """The linear layer of a block, of zeros."""
        of_residual = layer in ("attn/o_proj", "mlp/down_proj")
        bias = self.biased(layer)
        return Linear(*self.matrices[layer], adapters.get(layer), bias, out=of_residual)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters without adapters, in the order in which values are drawn."""
        names = _NAMES | _ENDS | _OTHER_NAMES.get(self.model_type, {})
        stem = f"{names['wte'].partition('.')[0]}.layers"
        norms = dict(self.family.norms)
        if self.family.query_norm:
            norms |= {f"attn/{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
        yield Tensor(("wte",), f"{names['wte']}.weight")
        for number in map(str, range(self.num_hidden_layers)):
            for norm, name in norms.items():
                path = ("h", number, *norm.split("/"))
                yield from self._norm(path, f"{stem}.{number}.{name}")
            for layer in self.matrices:
                path, name = ("h", number, *layer.split("/")), f"{stem}.{number}.{names[layer]}"
                rows = self._rows(layer)
                yield Tensor((*path, "kernel"), f"{name}.weight", True, rows)
                if self.biased(layer):
                    yield Tensor((*path, "bias"), f"{name}.bias", False, rows)
        yield from self._norm(("ln_f",), names["ln_f"])
        if not self.tie_word_embeddings:
            yield Tensor(("lm_head",), f"{names['lm_head']}.weight")

    def _norm(self, path: tuple[str, ...], name: str) -> Iterator[Tensor]:
        yield Tensor((*path, "scale"), f"{name}.weight")
        if self.family.pythia:
            yield Tensor((*path, "bias"), f"{name}.bias")

    def _rows(self, layer: str) -> np.ndarray | None:
        """Numbers of a layer's outputs among those of the file's tensor; None: it is alone there.

        One after the other in Phi 3; in Pythia queries, keys and values of each head together.
        """
        names = _OTHER_NAMES.get(self.model_type, {})
        together = [other for other in self.matrices if names.get(other, other) == names.get(layer)]
        if len(together) < 2:
            return None
        columns = [self.matrices[other][1] for other in together]
        if self.family.pythia:
            numbers = np.arange(sum(columns)).reshape(-1, len(columns), self.head_dim)
            return numbers[:, together.index(layer)].ravel()
        return np.split(np.arange(sum(columns)), np.cumsum(columns[:-1]))[together.index(layer)]

    def biased(self, layer: str) -> bool:
        """True if a linear layer has a bias."""
        of_attention = layer.startswith("attn/")
        if self.family.pythia and of_attention:
            return self.attention_bias
        return layer in self.family.biased or (self.attention_bias and of_attention)


class GroupedAttention(nnx.Module):
    """Causal self-attention of one sequence, (L, d) -> (L, d)."""

    def __init__(self, config: FamilyConfig, adapters: Adapters, rotary: Rotary | None) -> None:
        self.size, self.rotary = config.head_dim, rotary
        self.scale, self.cap = config.query_scale, config.attention_cap
        layers = [config.linear(layer, adapters) for layer in _QKV]
        self.q_proj, self.k_proj, self.v_proj = layers
        self.o_proj = config.linear("attn/o_proj", adapters)
        self.normed = config.family.query_norm
        normed = [config.matrices[layer][1] for layer in _QKV[:2]]
        if self.normed == "head":
            normed = [self.size, self.size]
        self.q_norm, self.k_norm = (config.norm(x) if self.normed else None for x in normed)

    def _heads(self, rows: jax.Array, norm: Norm | None) -> jax.Array:
        """Rows (L, heads * size) of queries or keys as (L, heads, size), normalized, rotated."""
        if norm is not None and self.normed == "width":
            rows = norm(rows)
        rows = rows.reshape(len(rows), -1, self.size)
        if norm is not None and self.normed == "head":
            rows = norm(rows)
        return rows if self.rotary is None else rotated(rows, self.rotary)

    def __call__(self, x: jax.Array) -> jax.Array:
        query = self._heads(self.q_proj(x), self.q_norm)
        key = self._heads(self.k_proj(x), self.k_norm)
        value = self.v_proj(x).reshape(len(x), -1, self.size)
        return self.o_proj(attend(query, key, value, self.scale, self.cap))


def _kinds(found: dict[str, Any], blocks: int) -> list[str]:
    """Which layers attend to a window only, where that decides their positions."""
    kinds = found.get("layer_types")
    if kinds is not None:
        _check.kind("config.json layer_types", kinds, list)
        if not {*map(str, kinds)} <= {_FULL, _SLIDING}:
            raise _check.reject("config.json layer_types", kinds, "has a layer of another kind")
        return kinds
    every = found.pop("sliding_window_pattern", None)  # of older Gemma 3 files
    if found["model_type"] != "gemma3_text":
        return [_FULL] * blocks
    every = _check.integer("sliding_window_pattern", every or 6)
    return [_SLIDING if (number + 1) % every else _FULL for number in range(blocks)]


def _ropes(found: dict[str, Any]) -> dict[str, Rotary]:
    """Rotary positions by kind of layer, taken out of what a ``config.json`` says of them."""
    given = found.pop("rope_parameters", None) or {}
    local = found.pop("rope_local_base_freq", None)
    # older files have all but the stretching outside
    outside = {"rope_theta": found.pop("rotary_emb_base", None) or found.get("rope_theta")}
    share = found.pop("rotary_pct", None) or found.get("partial_rotary_factor")
    outside |= {"partial_rotary_factor": share} | (found.pop("rope_scaling", None) or {})
    outside = {name: value for name, value in outside.items() if value is not None}
    if {*given} <= {_FULL, _SLIDING} and given:
        return {kind: _rotary(dict(given[kind])) for kind in given}
    full = _rotary(given | outside)
    return {_FULL: full, _SLIDING: full if local is None else Rotary(local)}


def _rotary(rope: dict[str, Any]) -> Rotary:
    kind = rope.pop("rope_type", "default")
    kind = rope.pop("type", kind)  # in older files
    theta, share = rope.pop("rope_theta", 1e4), rope.pop("partial_rotary_factor", 1.0)
    if kind not in ("default", *_ROPES):
        rule = f"only {' and '.join(_ROPES)} are supported"
        raise _check.reject("config.json rope_scaling", kind, rule, _WAY_OUT)
    names = _ROPES.get(kind, ())
    if missing := [name for name in names if name not in rope]:
        raise _check.reject("config.json rope_scaling", kind, f"lacks {', '.join(missing)}")
    for name in rope.keys() - {*names}:
        raise _check.reject(f"config.json {name}", rope[name], "is not known here", _WAY_OUT)
    scaling = (("rope_type", kind), *((name, rope[name]) for name in names))
    return Rotary(theta, share, scaling if names else ())


def speeds(planes: int, rotary: Rotary) -> np.ndarray:
    """Radians by which a position turns each plane, float32 (planes,): plane i by θ^(-i / planes).

    Stretched by a factor; with "llama3" planes that turn often enough within the original length
    are left as they are, with a passage in between.
    """
    speed = rotary.theta ** (-np.arange(planes) / planes)
    if given := dict(rotary.scaling):
        share = np.zeros(planes)  # left as it is
        if given["rope_type"] == "llama3":
            turns = given["original_max_position_embeddings"] * speed / (2 * np.pi)
            low, high = given["low_freq_factor"], given["high_freq_factor"]
            share = np.clip((turns - low) / (high - low), 0.0, 1.0)
        speed = speed * (share + (1 - share) / given["factor"])
    return speed.astype(np.float32)


def rotated(rows: jax.Array, rotary: Rotary) -> jax.Array:
    """Queries or keys (L, heads, size) of the positions from 0 on, rotated.

    Of the axes that are rotated, the first ones, axis i and the one half of them further on are a
    plane.
    """
    planes = int(rows.shape[-1] * rotary.share) // 2
    angle = (jnp.arange(len(rows))[:, None] * speeds(planes, rotary))[:, None]
    first, second, rest = jnp.split(rows.astype(jnp.float32), (planes, 2 * planes), axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    parts = first * cos - second * sin, second * cos + first * sin, rest
    return jnp.concatenate(parts, axis=-1).astype(rows.dtype)


class Network(nnx.Module):
    """The network of a block, gated where it has a gate, (L, d) -> (L, d)."""

    def __init__(self, config: FamilyConfig, adapters: Adapters) -> None:
        self.activation = config.activation
        self.gate_proj = None if config.family.pythia else config.linear("mlp/gate_proj", adapters)
        self.up_proj = config.linear("mlp/up_proj", adapters)
        self.down_proj = config.linear("mlp/down_proj", adapters)

    def __call__(self, x: jax.Array) -> jax.Array:
        activate, wide = _ACTIVATIONS[self.activation], self.up_proj(x)
        inner = activate(wide) if self.gate_proj is None else activate(self.gate_proj(x)) * wide
        return self.down_proj(inner)
