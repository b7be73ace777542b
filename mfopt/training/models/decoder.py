"""A causal decoder as Flax NNX modules: what GPT-2 and the other families have in common.

Parameters are made as zeros that take no memory; values are read or drawn afterwards. Dropout is
left out: private training clips the gradient of a fixed function of the record, and noise is
regularization already.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras

with _extras.required():
    from flax import nnx

# the linear layers of a block of GPT-2, and what has the same task in the other families
TASKS = {
    "attn/c_attn": ("attn/q_proj", "attn/k_proj", "attn/v_proj"),
    "attn/c_proj": ("attn/o_proj",),
    "mlp/c_fc": ("mlp/gate_proj", "mlp/up_proj"),
    "mlp/c_proj": ("mlp/down_proj",),
}
LINEAR_LAYERS = tuple(TASKS)

# Settings of a `config.json` that change the function computed, and values at which they do not.
CHANGES_FUNCTION: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
    "is_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), (None,)
    ),
    **dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        (None,),
    ),
    **dict.fromkeys(("clip_qkv", "no_rope_layers", "no_rope_layer_interval"), (None,)),
    **dict.fromkeys(("num_experts", "num_local_experts", "rope_local_base_freq"), (None,)),
    **dict.fromkeys(("use_qk_norm", "qk_layernorm", "use_parallel_residual"), (None, False)),
}
# Settings that say how a model was made, or is to be stored, drawn from or split over devices; and
# dropout, which is off here.
_WITHOUT_EFFECT = {
    *("architectures", "dtype", "torch_dtype", "torchscript", "use_bfloat16", "use_cache"),
    *("transformers_version", "initializer_range", "pretraining_tp", "is_llama_config"),
    *("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"),
    *("classifier_dropout", "cache_implementation"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "tokenizer_class"),
    *("task_specific_params", "prefix", "tie_encoder_decoder", "cross_attention_hidden_size"),
    *("is_decoder", "tf_legacy_loss", "max_window_layers", "n_ctx", "transformers.js_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
    *("cls_token_id", "mask_token_id", "decoder_start_token_id", "gradient_checkpointing"),
    # defaults of generation, which older files hold
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "bad_words_ids"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
    *("num_beam_groups", "diversity_penalty", "output_scores", "return_dict_in_generate"),
    *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
    *("begin_suppress_tokens", "exponential_decay_length_penalty"),
}
_REMOVE = "Take it out if it changes nothing for records of the length that you train on."


def check_settings(
    settings: Mapping[str, Any], fields: set[str], required: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse settings of a ``config.json`` with which the weights compute another function.

    A setting that is not known here is warned about, unless it is null or its name begins with "_".

    Args:
        settings: the file's content.
        fields: settings that the model here follows.
        required: those that it does not follow, with the values at which it need not.
    """
    required = {k: v for k, v in CHANGES_FUNCTION.items() if k not in fields} | dict(required)
    for name, value in settings.items():
        if name in required:
            if value not in required[name]:
                rule = f"only {required[name][-1]!r} is supported"
                raise _check.reject(f"config.json {name}", value, rule, _REMOVE)
        elif value is not None and name not in fields | _WITHOUT_EFFECT and name[:1] != "_":
            warnings.warn(
                f"config.json has {name} = {_check.printable(repr(value)[:80])}, which is not "
                "known here and is passed over: compare the model's loss with another tool's",
                stacklevel=2,
            )


class Tensor(NamedTuple):
    """A parameter: its path in the module, its name in the file, whether the file transposes it.

    ``rows``: where its outputs are along the first axis of the file's tensor; None: they are all.
    """

    path: tuple[str, ...]
    name: str
    turned: bool = False
    rows: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2022): W + (alpha / rank) A B with A (in, rank), B (rank, out).

    B starts at 0, so the adapted model starts as the base model. Only A and B are trained.

    Args:
        rank: 32 as in Chua et al. 2024, appendix B.2.
        alpha: scale; None: equal to ``rank``, so that the factor is 1.
        layers: linear layers of each block that get one, of ``LINEAR_LAYERS`` or ``TASKS``.
    """

    rank: int = 32
    alpha: float | None = None
    layers: tuple[str, ...] = ("attn/c_attn",)

    def __post_init__(self) -> None:
        _check.integer("rank", self.rank)
        if self.alpha is not None:
            _check.positive("alpha", self.alpha)
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = set(self.layers) - {*TASKS, *sum(TASKS.values(), ())}
        if unknown or not self.layers:
            raise _check.reject("layers", self.layers, f"must be some of {LINEAR_LAYERS}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


Adapters = Mapping[str, LoRAConfig]  # by linear layer of a block


def parameter(*shape: int, cut: tuple[str | None, ...] = (), kind: Any = nnx.Param) -> Any:
    """A parameter of float32 zeros that take no memory; ``cut``: axis of the mesh along each."""
    zeros = np.broadcast_to(np.float32(0), shape)
    return kind(zeros, out_sharding=cut, eager_sharding=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Base of the shapes of decoders.

    Args:
        compute_dtype: type of activations, "float32" or "bfloat16"; parameters stay float32, and
            the loss is computed in float32.
        remat: recompute each block in the backward pass, which saves memory for time.
        logits_cap: c of c tanh(x / c) on the logits; None: they are as they are.
    """

    compute_dtype: str = "float32"
    remat: bool = False
    logits_cap: float | None = None

    learned = False  # each position has an embedding of its own
    tie_word_embeddings = True  # the output layer is the embedding transposed

    def __post_init__(self) -> None:
        _check.choice("compute_dtype", self.compute_dtype, ("float32", "bfloat16"))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Tokens V, width d, blocks, longest sequence."""
        raise NotImplementedError

    @property
    def norms(self) -> tuple[str, ...]:
        """Norms of a :class:`Block`."""
        return "ln_1", "ln_2"

    @property
    def parallel(self) -> bool:
        """True if both halves of a block read the same input."""
        return False

    @property
    def scale(self) -> float:
        """Factor on the embedding."""
        return 1.0

    def norm(self) -> Norm:
        """A norm over the width."""
        raise NotImplementedError

    def parts(self, adapters: Adapters, number: int) -> tuple[Any, Any]:
        """Attention and network of block ``number``, of zeros."""
        raise NotImplementedError

    def deviation(self, path: Sequence[str]) -> float:
        """Standard deviation of a parameter before training, as in the reference implementation."""
        return 0.02

    def initial_value(
        self, path: Sequence[str], shape: tuple[int, ...], rng: np.random.Generator
    ) -> np.ndarray:
        """A parameter before training, float32; no device and no compiler is involved."""
        if path[-1] in ("scale", "bias"):
            return np.full(shape, path[-1] == "scale" and not self.norm().shift, np.float32)
        return np.float32(self.deviation(path)) * rng.standard_normal(shape, np.float32)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, without adapters."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(Decoder(self, {}))))


class Norm(nnx.Module):
    """Layer norm or, without ``bias``, RMS norm over the last axis, computed in float32.

    Its scale is that parameter + ``shift``.
    """

    def __init__(self, features: int, epsilon: float, bias: bool, shift: bool = False) -> None:
        self.scale = parameter(features)
        self.bias = parameter(features) if bias else None
        self.epsilon, self.shift = epsilon, shift

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(square + self.epsilon)
        scaled: jax.Array = normal * (self.scale[...] + 1 if self.shift else self.scale[...])
        if self.bias is not None:
            scaled = scaled + self.bias[...]
        return scaled.astype(x.dtype)


class Linear(nnx.Module):
    """x W + b with W (in, out), plus a low-rank adapter where ``lora`` is given.

    W is cut over devices by output or, if it leads ``out`` of a half-block, by input: so the wide
    middle is never gathered.
    """

    def __init__(
        self, rows: int, columns: int, lora: LoRAConfig | None, bias: bool = True, out: bool = False
    ) -> None:
        of_rows, of_columns = ("model", None) if out else (None, "model")
        self.kernel = parameter(rows, columns, cut=(of_rows, of_columns))
        self.bias = parameter(columns, cut=(of_columns,)) if bias else None
        self.scale = 0.0 if lora is None else lora.scale
        if lora is not None:
            self.lora_a = parameter(rows, lora.rank, cut=(of_rows, None), kind=nnx.LoRAParam)
            self.lora_b = parameter(lora.rank, columns, cut=(None, of_columns), kind=nnx.LoRAParam)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        out: jax.Array = x @ self.kernel[...].astype(dtype)
        if self.bias is not None:
            out = out + self.bias[...].astype(dtype)
        if self.scale:
            low = x @ self.lora_a[...].astype(dtype) @ self.lora_b[...].astype(dtype)
            out = out + self.scale * low
        return out


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float | None = None,
    cap: float | None = None,
) -> jax.Array:
    """Causal attention: what is mixed, (L, heads * head size).

    Args:
        query, key, value: (L, heads, head size); a head of keys and values serves a group of
            queries where there are fewer.
        scale: factor on products of queries and keys; None: 1 / √(head size).
        cap: c of c tanh(x / c) on them; None: none.
    """
    # Padding comes after the text, so the causal mask alone keeps it out of real positions.
    if cap is None:
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return mixed.reshape(len(query), -1)
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(rows, group, axis=1) for rows in (key, value))
    products = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32)
    capped = cap * jnp.tanh(products * (scale or query.shape[-1] ** -0.5) / cap)
    causal = jnp.tril(jnp.ones(capped.shape[1:], bool))
    shares = jax.nn.softmax(jnp.where(causal, capped, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("hqk,khd->qhd", shares, value).reshape(len(query), -1)


class Block(nnx.Module):
    """One transformer block: x (L, d) -> (L, d).

    It has some of four norms: "ln_1" before attention and "post_1" after it, "ln_2" before the
    network and "post_2" after it.
    """

    def __init__(self, shape: Shape, adapters: Adapters, number: int) -> None:
        for name in shape.norms:
            setattr(self, name, shape.norm())
        self.attn, self.mlp = shape.parts(adapters, number)
        self.parallel = shape.parallel

    def _normal(self, name: str, x: jax.Array) -> jax.Array:
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = x + self._normal("post_1", self.attn(self._normal("ln_1", x)))
        read = x if self.parallel else mixed
        return mixed + self._normal("post_2", self.mlp(self._normal("ln_2", read)))


class Decoder(nnx.Module):
    """Tokens (L,) of one record -> logits (L, V) float32; row i predicts token i + 1."""

    def __init__(self, shape: Shape, adapters: Adapters) -> None:
        vocab_size, width, blocks, self.positions = shape.sizes
        self.scale, self.remat, self.dtype = shape.scale, shape.remat, shape.compute_dtype
        self.cap = shape.logits_cap
        self.wte = parameter(vocab_size, width, cut=(None, "model"))
        self.wpe = parameter(self.positions, width) if shape.learned else None
        self.h = nnx.List([Block(shape, adapters, number) for number in range(blocks)])
        self.ln_f = shape.norm()
        tied = shape.tie_word_embeddings
        self.lm_head = None if tied else parameter(vocab_size, width, cut=(None, "model"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (length,) = tokens.shape
        if length > self.positions:
            rule = f"the model has {self.positions} positions"
            raise _check.reject("length", length, rule)
        dtype = jnp.dtype(self.dtype)
        x = jnp.take(self.wte[...], tokens, axis=0)
        if self.scale != 1:
            x = self.scale * x
        if self.wpe is not None:
            x = x + self.wpe[:length]
        x = x.astype(dtype)
        for block in self.h:
            x = _recomputed(block, x) if self.remat else block(x)
        table = self.wte if self.lm_head is None else self.lm_head
        x = self.ln_f(x)
        logits = jnp.matmul(x, table[...].T.astype(dtype), preferred_element_type=jnp.float32)
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)


def _recomputed(block: Block, x: jax.Array) -> jax.Array:
    graph, state = nnx.split(block)
    recompute = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))
    return recompute(state, x)
