"""One description for GPT-2, Llama, Mistral, Qwen, Gemma, Phi 3, OLMo 2, SmolLM 3 and Pythia.

Rotary positions (Su et al. 2021), attention with a head of keys and values for each group of
queries (Ainslie et al. 2023), gated networks (Shazeer 2020) and RMS norms; in GPT-2 (Radford et al.
2019) learned positions; in GPT-2 and Pythia layer norms and no gates.
"""

from __future__ import annotations

import dataclasses
import math
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.models.decoder import (
    ACTIVATIONS,
    TASKS,
    Adapters,
    Linear,
    Norm,
)

# Settings of a `config.json` that change the function computed, and values at which they do not.
_UNSET = """
    quantization_config attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar
    attention_multiplier embedding_multiplier residual_multiplier logits_scaling clip_qkv
    no_rope_layers no_rope_layer_interval num_experts num_local_experts rope_local_base_freq
"""
_UNSET_OR_FALSE = """
    add_cross_attention is_encoder_decoder use_qk_norm qk_layernorm use_parallel_residual
    use_bidirectional_attention
"""
_FALSE = """
    rope_interleaved use_mrope mlp_bias scale_attn_by_inverse_layer_idx reorder_and_upcast_attn
"""
CHANGES_FUNCTION: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(_UNSET.split(), (None,)),
    **dict.fromkeys(_UNSET_OR_FALSE.split(), (None, False)),
    **dict.fromkeys(_FALSE.split(), (False,)),
    "pruned_heads": (None, {}),
    "partial_rotary_factor": (None, 1.0),
    "scale_attn_weights": (True,),
}
# Settings that say how a model was made, or is to be stored, drawn from or split over devices; and
# dropout, which is off here.
# The last lines are defaults of generation, which older files hold.
_WITHOUT_EFFECT = """
    architectures dtype torch_dtype torchscript use_bfloat16 use_cache
    transformers_version initializer_range pretraining_tp is_llama_config
    attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout
    classifier_dropout cache_implementation
    output_attentions output_hidden_states return_dict chunk_size_feed_forward
    id2label label2id num_labels problem_type finetuning_task tokenizer_class
    task_specific_params prefix tie_encoder_decoder cross_attention_hidden_size
    is_decoder tf_legacy_loss max_window_layers n_ctx transformers.js_config
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id
    cls_token_id mask_token_id decoder_start_token_id gradient_checkpointing

    max_length min_length do_sample early_stopping num_beams temperature
    top_k top_p typical_p repetition_penalty length_penalty bad_words_ids
    no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    num_beam_groups diversity_penalty output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens
    begin_suppress_tokens exponential_decay_length_penalty
"""
_REMOVE = "Take it out if it changes nothing for records of the length that you train on."


def _check_settings(
    settings: JsonObject, fields: set[str], required: Mapping[str, tuple[object, ...]]
) -> None:
    """Refuse settings of a ``config.json`` with which the weights compute another function.

    A setting that is not known here is warned about, unless it is null or its name begins with "_".

    Args:
        settings: the file's content.
        fields: settings that the model here follows.
        required: those that it does not follow, with the values at which it need not.
    """
    required = {k: v for k, v in CHANGES_FUNCTION.items() if k not in fields} | dict(required)
    passed_over = {*fields, *_WITHOUT_EFFECT.split()}
    for name, value in settings.items():
        if name in required:
            if value not in required[name]:
                rule = f"only {required[name][-1]!r} is supported"
                raise _check.reject(f"config.json {name}", value, rule, _REMOVE)
        elif (
            value is not None and name not in passed_over and not name.startswith(("_", "summary_"))
        ):
            warnings.warn(
                f"config.json has {name} = {_check.printable(repr(value)[:80])}, which is not "
                "known here and is passed over: compare the model's loss with another tool's",
                stacklevel=2,
            )


class _Tensor(NamedTuple):
    """A parameter: its path in the module, its name in the file, whether the file transposes it.

    ``rows``: where its outputs are along the first axis of the file's tensor; None: they are all.
    """

    path: tuple[str, ...]
    name: str
    turned: bool = False
    rows: np.ndarray | None = None


class _DecoderFamily(NamedTuple):
    """In what the models of one ``model_type`` differ from a Llama.

    ``norms``: names in the file of the norms of a decoder's block; ``query_norm``:
    queries and keys are normalized in each "head" or over the "width"; ``biased``: layers that
    always have biases; ``gemma``: the embedding is scaled by √d and scales of norms count from 1;
    ``plain``: layer norms and no gates; ``parallel``: both halves of a block read the same input;
    ``learned``: each position has an embedding; ``names``: of tensors; ``follows``: further
    settings of its ``config.json`` that are followed here.
    """

    architecture: str
    norms: dict[str, str]
    query_norm: str = ""
    biased: tuple[str, ...] = ()
    gemma: bool = False
    plain: bool = False
    parallel: bool = False
    learned: bool = False
    names: Mapping[str, str] = types.MappingProxyType({})
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
# names in the file; of several matrices in one tensor the same
_NAMES = {layer: layer.replace("attn", "self_attn").replace("/", ".") for layer in _MATRICES}
_NAMES |= {"wte": "model.embed_tokens", "ln_f": "model.norm", "lm_head": "lm_head"}
_GPT2_NAMES = {layer: layer.replace("/", ".") for layer in TASKS}
_GPT2_NAMES |= {name: f"transformer.{name}" for name in ("wte", "wpe", "ln_f")}
_PHI_NAMES = dict.fromkeys(_QKV, "self_attn.qkv_proj")
_PHI_NAMES |= dict.fromkeys(TASKS["mlp/c_fc"], "mlp.gate_up_proj")
_PYTHIA_NAMES = {
    **dict.fromkeys(_QKV, "attention.query_key_value"),
    "attn/o_proj": "attention.dense",
    "mlp/up_proj": "mlp.dense_h_to_4h",
    "mlp/down_proj": "mlp.dense_4h_to_h",
    "wte": "gpt_neox.embed_in",
    "ln_f": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
FAMILIES = {
    "gpt2": _DecoderFamily(
        "GPT2LMHeadModel",
        {"ln_1": "ln_1", "ln_2": "ln_2"},
        biased=("mlp/c_fc", "mlp/c_proj"),
        plain=True,
        learned=True,
        names=_GPT2_NAMES,
    ),
    "llama": _DecoderFamily("LlamaForCausalLM", _BEFORE),
    "mistral": _DecoderFamily("MistralForCausalLM", _BEFORE),
    "qwen2": _DecoderFamily("Qwen2ForCausalLM", _BEFORE, biased=_QKV),
    "qwen3": _DecoderFamily("Qwen3ForCausalLM", _BEFORE, "head"),
    "smollm3": _DecoderFamily("SmolLM3ForCausalLM", _BEFORE, follows=_WHERE),
    "olmo2": _DecoderFamily("Olmo2ForCausalLM", _AFTER, "width"),
    "phi3": _DecoderFamily("Phi3ForCausalLM", _BEFORE, names=_PHI_NAMES, follows=_PARTLY),
    "gemma": _DecoderFamily("GemmaForCausalLM", _BEFORE, gemma=True),
    "gemma2": _DecoderFamily("Gemma2ForCausalLM", _BOTH, gemma=True, follows=_CAPS),
    "gemma3_text": _DecoderFamily(
        "Gemma3ForCausalLM", _BOTH, "head", gemma=True, follows=(*_CAPS, *_LOCAL)
    ),
    "gpt_neox": _DecoderFamily(
        "GPTNeoXForCausalLM",
        _BEFORE,
        biased=("mlp/up_proj", "mlp/down_proj"),
        plain=True,
        parallel=True,
        names=_PYTHIA_NAMES,
        follows=_PARTLY,
    ),
}
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
# what the settings are called in the file of a GPT-2, and their values where it has none
_OF_GPT2: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 50257),
    "n_positions": ("max_position_embeddings", 1024),
    "n_embd": ("hidden_size", 768),
    "n_layer": ("num_hidden_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "n_inner": ("intermediate_size", None),
    "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
    "activation_function": ("hidden_act", "gelu_new"),
    "tie_word_embeddings": ("tie_word_embeddings", True),
}
# settings that are followed in every family, beside sizes
_FOLLOWED = {
    *("tie_word_embeddings", "attention_bias", "sliding_window", "use_sliding_window"),
    *("layer_types", "rope_theta", "rms_norm_eps", "layer_norm_eps"),
}
# Ways to stretch the rotary positions, with the numbers that each has.
_STRETCHED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPES = {"default": (), "linear": _STRETCHED[:1], "llama3": _STRETCHED}
_GPT2_END = 50256
_FULL = "full_attention"
_SLIDING = "sliding_attention"


class _Rotary(NamedTuple):
    """Rotary positions of a layer.

    ``theta``: base of the wavelengths; ``share``: of a head's axes that are rotated; ``scaling``:
    (name, number) by which wavelengths are stretched, of one of ``_ROPES``; empty: they are not.
    """

    theta: float
    share: float = 1.0
    scaling: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape of a decoder of one of the ``FAMILIES``; sizes are named as in the file of a Llama.

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
        logits_cap: c of c tanh(x / c) on the logits; None: they are as they are.
        compute_dtype: type of activations, "float32" or "bfloat16"; parameters that are trained
            stay float32, and the loss is computed in float32.
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
    rotary: tuple[_Rotary | None, ...]
    tie_word_embeddings: bool
    attention_bias: bool
    sliding_window: int | None
    activation: str
    query_scale: float
    attention_cap: float | None
    logits_cap: float | None
    source: JsonObject = dataclasses.field(compare=False, repr=False)
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("tie_word_embeddings", "attention_bias"):
            _check.kind(name, getattr(self, name), bool)
        _check.optional(_check.integer, "sliding_window", self.sliding_window)
        for name in ("attention_cap", "logits_cap"):
            _check.optional(_check.positive, name, getattr(self, name))
        for rotary in filter(None, self.rotary):
            _check.positive("rope_theta", rotary.theta)
            _check.probability("partial_rotary_factor", rotary.share, closed=True)
            numbers = dict(rotary.scaling)
            for name, value in numbers.items():
                _check.positive(f"rope_scaling {name}", value)
            if numbers.get("low_freq_factor", 0) >= numbers.get("high_freq_factor", 1):
                rule = "needs low_freq_factor < high_freq_factor"
                raise _check.reject("rope_scaling", numbers, rule)
        heads = self.num_attention_heads
        if heads % self.num_key_value_heads:
            rule = f"must divide num_attention_heads = {heads}"
            raise _check.reject("num_key_value_heads", self.num_key_value_heads, rule)
        if self.head_dim % 2 and any(self.rotary):
            raise _check.reject("head_dim", self.head_dim, "must be even")
        _check.choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))

    @classmethod
    def read(cls, settings: JsonObject) -> DecoderConfig:
        """The shape that a ``config.json`` says; refused is one of another function."""
        values = dict(settings)
        family = FAMILIES[values["model_type"]]
        if family.learned:
            for name, (meaning, default) in _OF_GPT2.items():
                value = values.pop(name, default)
                values[meaning] = default if value is None else value
            values["intermediate_size"] = values["intermediate_size"] or 4 * values["hidden_size"]
        heads, width = (
            _check.integer(name, values.get(name))
            for name in ("num_attention_heads", "hidden_size")
        )
        if values.get("head_dim") is None:
            if width % heads:
                rule = f"must divide hidden_size = {width}"
                raise _check.reject("num_attention_heads", heads, rule)
            values["head_dim"] = width // heads
        if values.get("num_key_value_heads") is None:
            values["num_key_value_heads"] = heads
        sizes: JsonObject = {name: _check.integer(name, values.get(name)) for name in _SIZES}
        blocks = sizes["num_hidden_layers"]
        kinds = _kinds(values, blocks)
        ropes = _ropes(values)
        if values.get("use_sliding_window") is False:
            values["sliding_window"] = None
        windowed = values.get("sliding_window") is not None
        if not windowed and values.get("layer_types") and _SLIDING in kinds:
            rule = "has layers with a window, and there is no `sliding_window`"
            raise _check.reject("config.json layer_types", kinds, rule)
        default = "gelu_pytorch_tanh" if family.gemma else "gelu" if family.plain else "silu"
        activations: tuple[object, ...] = ("silu",)
        if family.gemma or family.plain:
            activations = (*ACTIVATIONS,)[1:]
        values["partial_rotary_factor"] = min(rotary.share for rotary in ropes.values())
        required = {"hidden_act": activations, "hidden_activation": (*activations, None)}
        if family.parallel:
            required["use_parallel_residual"] = (True,)
        _check_settings(values, {*_SIZES, *_FOLLOWED, *family.follows, "model_type"}, required)
        epsilon = "layer_norm_eps" if family.plain else "rms_norm_eps"
        positions = values.get("no_rope_layers") or [1] * blocks
        if len(positions) != blocks or len(kinds) != blocks:
            raise _check.reject("config.json layers", blocks, "is not the length of their settings")
        scalar = values.get("query_pre_attn_scalar") or sizes["head_dim"]
        # older Gemma files name the exact GELU where all readers take the other one
        activation = (
            values.get("hidden_activation") or (values.get("hidden_act"), default)[family.gemma]
        )
        return cls(
            model_type=values["model_type"],
            norm_epsilon=_check.positive(epsilon, values.get(epsilon, math.nan)),
            rotary=tuple(
                ropes[kind] if is_there and not family.learned else None
                for kind, is_there in zip(kinds, positions, strict=True)
            ),
            tie_word_embeddings=values.get("tie_word_embeddings", family.gemma),
            attention_bias=values.get("attention_bias", family.plain),
            sliding_window=values.get("sliding_window"),
            activation=activation or default,
            query_scale=_check.positive("query_pre_attn_scalar", scalar) ** -0.5,
            attention_cap=values.get("attn_logit_softcapping"),
            logits_cap=values.get("final_logit_softcapping"),
            source=settings,
            **sizes,
        )

    def facts(self) -> JsonObject:
        """What a ``config.json`` says of the shape: all that was read."""
        return self.source | {"architectures": [self.family.architecture]}

    @property
    def family(self) -> _DecoderFamily:
        """In what it differs from a Llama."""
        return FAMILIES[self.model_type]

    @property
    def positions(self) -> int:
        """Tokens of the longest sequence."""
        return int(min(self.max_position_embeddings, self.sliding_window or math.inf))

    def norm(self, features: int | None = None) -> Norm:
        """A norm over ``features``; None: the width of the model."""
        family = self.family
        features = features or self.hidden_size
        return Norm(features, self.norm_epsilon, bias=family.plain, shift=family.gemma)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each linear layer of a block."""
        d = self.hidden_size
        hidden = self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        shared = self.num_key_value_heads * self.head_dim  # of keys, and of values
        if self.family.learned:
            return dict(zip(TASKS, ((d, 3 * d), (d, d), (d, hidden), (hidden, d)), strict=True))
        columns = (queries, shared, shared, d, hidden, hidden, d)
        rows = (d, d, d, queries, d, d, hidden)
        sizes = dict(zip(_MATRICES, zip(rows, columns, strict=True), strict=True))
        if self.family.plain:
            del sizes["mlp/gate_proj"]
        return sizes

    def layers_of(self, half: str) -> tuple[str, ...]:
        """Names of the linear layers of a block's "attn" or "mlp"; the last one leads out of it."""
        return tuple(x.split("/")[1] for x in self.matrices if x.startswith(half))

    def linear(self, layer: str, adapters: Adapters) -> Linear:
        """The linear layer of a block, of zeros."""
        return Linear(*self.matrices[layer], adapters.get(layer), self.biased(layer))

    def tensors(self) -> Iterator[_Tensor]:
        """The parameters without adapters, in the order in which values are drawn."""
        names = _NAMES | dict(self.family.names)
        learned = self.family.learned
        stem = f"{names['wte'].partition('.')[0]}.{'h' if learned else 'layers'}"
        norms = dict(self.family.norms)
        if self.family.query_norm:
            norms |= {f"attn/{name}": f"self_attn.{name}" for name in ("q_norm", "k_norm")}
        for table in ("wte", "wpe") if learned else ("wte",):
            yield _Tensor((table,), f"{names[table]}.weight")
        for number in map(str, range(self.num_hidden_layers)):
            for norm, name in norms.items():
                path = ("h", number, *norm.split("/"))
                yield from self._norm(path, f"{stem}.{number}.{name}")
            for layer in self.matrices:
                path = ("h", number, *layer.split("/"))
                name = f"{stem}.{number}.{names[layer]}"
                rows = self._rows(layer)
                yield _Tensor((*path, "kernel"), f"{name}.weight", not learned, rows)
                if self.biased(layer):
                    yield _Tensor((*path, "bias"), f"{name}.bias", False, rows)
        yield from self._norm(("ln_f",), names["ln_f"])
        if not self.tie_word_embeddings:
            yield _Tensor(("lm_head",), f"{names['lm_head']}.weight")

    def _norm(self, path: tuple[str, ...], name: str) -> Iterator[_Tensor]:
        yield _Tensor((*path, "scale"), f"{name}.weight")
        if self.family.plain:
            yield _Tensor((*path, "bias"), f"{name}.bias")

    def initial_value(
        self, path: Sequence[str], shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray:
        """A parameter before training, float32; no device and no compiler is involved."""
        if path[-1] in ("scale", "bias"):
            return np.full(shape, path[-1] == "scale" and not self.family.gemma, np.float32)
        deviation = 0.01 if path[-1] == "wpe" else 0.02
        if "c_proj" in path:  # residual branches add up over the depth
            deviation /= (2 * self.num_hidden_layers) ** 0.5
        return np.float32(deviation) * rng.standard_normal(shape, np.float32)

    def speeds(self, number: int) -> tuple[float, ...]:
        """Radians by which a position turns each plane of a block's heads, rounded to float32.

        Plane i by θ^(-i / planes), stretched by a factor; with "llama3" planes that turn often
        enough within the original length are left as they are, with a passage in between. Empty:
        the block has no rotary positions.
        """
        rotary = self.rotary[number]
        if rotary is None:
            return ()
        planes = int(self.head_dim * rotary.share) // 2
        speed = rotary.theta ** (-np.arange(planes) / planes)
        if scaling := dict(rotary.scaling):
            share = np.zeros(planes)  # left as it is
            if "low_freq_factor" in scaling:
                turns = scaling["original_max_position_embeddings"] * speed / (2 * np.pi)
                low = scaling["low_freq_factor"]
                high = scaling["high_freq_factor"]
                share = np.clip((turns - low) / (high - low), 0.0, 1.0)
            speed = speed * (share + (1 - share) / scaling["factor"])
        return tuple(speed.astype(np.float32).tolist())

    def _rows(self, layer: str) -> np.ndarray | None:
        """Numbers of a layer's outputs among those of the file's tensor; None: it is alone there.

        One after the other in Phi 3; in Pythia queries, keys and values of each head together.
        """
        names = self.family.names
        together = [
            matrix for matrix in self.matrices if names.get(matrix, matrix) == names.get(layer)
        ]
        if len(together) < 2:
            return None
        columns = [self.matrices[matrix][1] for matrix in together]
        if self.family.parallel:
            numbers = np.arange(sum(columns)).reshape(-1, len(columns), self.head_dim)
            return numbers[:, together.index(layer)].ravel()
        return np.split(np.arange(sum(columns)), np.cumsum(columns[:-1]))[together.index(layer)]

    def biased(self, layer: str) -> bool:
        """True if a linear layer has a bias."""
        of_attention = layer.startswith("attn/")
        return layer in self.family.biased or (self.attention_bias and of_attention)


def _kinds(values: JsonObject, blocks: int) -> list[str]:
    """Which layers attend to a window only, where that decides their positions."""
    kinds = values.get("layer_types")
    if kinds is not None:
        _check.kind("config.json layer_types", kinds, list)
        if not {*map(str, kinds)} <= {_FULL, _SLIDING}:
            raise _check.reject("config.json layer_types", kinds, "has a layer of another kind")
        return kinds
    period = values.pop("sliding_window_pattern", None)  # of older Gemma 3 files
    if values["model_type"] != "gemma3_text":
        return [_FULL] * blocks
    period = _check.integer("sliding_window_pattern", period or 6)
    return [_SLIDING if (number + 1) % period else _FULL for number in range(blocks)]


def _ropes(values: JsonObject) -> dict[str, _Rotary]:
    """Rotary positions by kind of layer, taken out of what a ``config.json`` says of them."""
    parameters = values.pop("rope_parameters", None) or {}
    local = values.pop("rope_local_base_freq", None)
    # older files have all but the stretching outside
    outside = {"rope_theta": values.pop("rotary_emb_base", None) or values.get("rope_theta")}
    share = values.pop("rotary_pct", None) or values.get("partial_rotary_factor")
    outside |= {"partial_rotary_factor": share} | (values.pop("rope_scaling", None) or {})
    outside = {name: value for name, value in outside.items() if value is not None}
    if {*parameters} <= {_FULL, _SLIDING} and parameters:
        return {kind: _rotary(dict(parameters[kind])) for kind in parameters}
    full = _rotary(parameters | outside)
    return {_FULL: full, _SLIDING: full if local is None else _Rotary(local)}


def _rotary(rope: JsonObject) -> _Rotary:
    kind = rope.pop("rope_type", "default")
    kind = rope.pop("type", kind)  # in older files
    theta = rope.pop("rope_theta", 1e4)
    share = rope.pop("partial_rotary_factor", 1.0)
    names = _ROPES[_check.choice("config.json rope_scaling", kind, _ROPES, _REMOVE)]
    if missing := [name for name in names if name not in rope]:
        raise _check.reject("config.json rope_scaling", kind, f"lacks {', '.join(missing)}")
    for name in rope.keys() - {*names}:
        raise _check.reject(f"config.json {name}", rope[name], "is not known here", _REMOVE)
    return _Rotary(theta, share, tuple((name, rope[name]) for name in names))


def gpt2_config(
    vocab_size: int = 50257,
    n_positions: int = 1024,
    n_embd: int = 768,
    n_layer: int = 12,
    n_head: int = 12,
    n_inner: int | None = None,
) -> DecoderConfig:
    """Shape of a GPT-2 by the names of its ``config.json``; the defaults are GPT-2 small.

    Args:
      vocab_size: number of tokens.
      n_positions: longest sequence, in tokens.
      n_embd: width.
      n_layer: number of blocks.
      n_head: heads of attention in each block.
      n_inner: width of the hidden layer of each block; 4 * ``n_embd`` if None.

    >>> gpt2_config(n_embd=1600, n_layer=48, n_head=25).intermediate_size
    6400
    """
    sizes = (vocab_size, n_positions, n_embd, n_layer, n_head, n_inner)
    settings: JsonObject = dict(zip(_OF_GPT2, sizes, strict=False))
    settings |= {name: default for name, (_, default) in _OF_GPT2.items() if name not in settings}
    settings |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    settings["model_type"] = "gpt2"
    if vocab_size <= _GPT2_END:
        # Loaders fall back to GPT-2's own end token, which this vocabulary does not have.
        settings |= {"bos_token_id": None, "eos_token_id": None}
    return DecoderConfig.read(settings)
