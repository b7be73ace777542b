"""A causal decoder as Flax NNX modules, made by its shape (:mod:`~mfopt.training.models.families`).

Parameters are made as zeros that take no memory; values are read or drawn afterwards. Dropout is
left out: private training clips the gradient of a fixed function of the record, and noise is
regularization already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras

with _extras.required():
    from flax import nnx

if TYPE_CHECKING:
    from mfopt.training.models.families import DecoderConfig

# the linear layers of a block of GPT-2, and what has the same task in the other families
TASKS = {
    "attn/c_attn": ("attn/q_proj", "attn/k_proj", "attn/v_proj"),
    "attn/c_proj": ("attn/o_proj",),
    "mlp/c_fc": ("mlp/gate_proj", "mlp/up_proj"),
    "mlp/c_proj": ("mlp/down_proj",),
}
LINEAR_LAYERS = tuple(TASKS)

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), jax.nn.gelu),
}


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2022): W + A B with A (in, rank), B (rank, out).

    B starts at 0, so the adapted model starts as the base model. Only A and B are trained.

    Args:
        rank: 32 as in Chua et al. 2024, appendix B.2.
        layers: linear layers of each block that get one, of ``LINEAR_LAYERS`` or ``TASKS``.
    """

    rank: int = 32
    layers: tuple[str, ...] = ("attn/c_attn",)

    def __post_init__(self) -> None:
        _check.integer("rank", self.rank)
        if not self.layers:
            raise _check.reject("layers", self.layers, f"must be some of {LINEAR_LAYERS}")


Adapters = Mapping[str, LoRAConfig]  # by linear layer of a block


def _parameter(*shape: int, kind: Any = nnx.Param) -> Any:
    """A parameter of float32 zeros that take no memory; its values may be bfloat16 if frozen."""
    return kind(np.broadcast_to(np.float32(0), shape))


class Norm(nnx.Module):
    """Layer norm or, without ``bias``, RMS norm over the last axis, computed in float32.

    Its scale is that parameter + ``shift``.
    """

    def __init__(self, features: int, epsilon: float, bias: bool, shift: bool = False) -> None:
        self.scale = _parameter(features)
        self.bias = _parameter(features) if bias else None
        self.epsilon = epsilon
        self.shift = shift

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        if self.bias is not None:
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(square + self.epsilon)
        # NumPy's float32 widens a scale in bfloat16 before the sum; a Python number would not
        scaled = normal * (self.scale[...] + np.float32(self.shift))
        if self.bias is not None:
            scaled = scaled + self.bias[...]
        return scaled.astype(x.dtype)


class Linear(nnx.Module):
    """x W + b with W (in, out), plus a low-rank adapter where ``lora`` is given."""

    def __init__(self, rows: int, columns: int, lora: LoRAConfig | None, bias: bool = True) -> None:
        self.kernel = _parameter(rows, columns)
        self.bias = _parameter(columns) if bias else None
        self.adapted = lora is not None
        if lora is not None:
            self.lora_a = _parameter(rows, lora.rank, kind=nnx.LoRAParam)
            self.lora_b = _parameter(lora.rank, columns, kind=nnx.LoRAParam)

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        product = x @ self.kernel[...].astype(dtype)
        if self.bias is not None:
            product = product + self.bias[...].astype(dtype)
        if self.adapted:
            product = product + x @ self.lora_a[...].astype(dtype) @ self.lora_b[...].astype(dtype)
        return product


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    scale: float,
    cap: float | None,
) -> jax.Array:
    """Causal attention: what is mixed, (L, heads * head size).

    Args:
        query, key, value: (L, heads, head size); a head of keys and values serves a group of
            queries where there are fewer.
        scale: factor on products of queries and keys.
        cap: c of c tanh(x / c) on them; None: none.
    """
    # Padding comes after the text, so the causal mask alone keeps it out of real positions.
    if cap is None:
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return mixed.reshape(len(query), -1)
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(rows, group, axis=1) for rows in (key, value))
    products = jnp.einsum("qhd,khd->hqk", query, key, preferred_element_type=jnp.float32)
    capped = cap * jnp.tanh(products * scale / cap)
    causal = jnp.tril(jnp.ones(capped.shape[1:], bool))
    shares = jax.nn.softmax(jnp.where(causal, capped, -jnp.inf)).astype(value.dtype)
    return jnp.einsum("hqk,khd->qhd", shares, value).reshape(len(query), -1)


def _rotated(rows: jax.Array, speed: tuple[float, ...]) -> jax.Array:
    """Queries or keys (L, heads, size) of the positions from 0 on, rotated.

    ``speed``: radians by which a position turns each plane. Of the first 2 * planes axes
    axis i and the one half of them further on are a plane.
    """
    planes = len(speed)
    angle = (jnp.arange(len(rows))[:, None] * np.array(speed, np.float32))[:, None]
    first, second, untouched = jnp.split(rows.astype(jnp.float32), (planes, 2 * planes), axis=-1)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    parts = first * cos - second * sin, second * cos + first * sin, untouched
    return jnp.concatenate(parts, axis=-1).astype(rows.dtype)


class _Attention(nnx.Module):
    """Causal self-attention of one sequence, (L, d) -> (L, d); ``number``: of the block."""

    def __init__(self, config: DecoderConfig, adapters: Adapters, number: int) -> None:
        self.size = config.head_dim
        self.speed = config.speeds(number)
        self.scale = config.query_scale
        self.cap = config.attention_cap
        self.layers = config.layers_of("attn")
        for layer in self.layers:
            setattr(self, layer, config.linear(f"attn/{layer}", adapters))
        self.normed = config.family.query_norm
        for name in ("q", "k") if self.normed else ():
            columns = config.matrices[f"attn/{name}_proj"][1]
            features = self.size if self.normed == "head" else columns
            setattr(self, f"{name}_norm", config.norm(features))

    def _heads(self, rows: jax.Array, norm: str) -> jax.Array:
        """Rows (L, heads * size) of queries or keys as (L, heads, size), normalized, rotated."""
        if self.normed == "width":
            rows = getattr(self, norm)(rows)
        rows = rows.reshape(len(rows), -1, self.size)
        if self.normed == "head":
            rows = getattr(self, norm)(rows)
        return _rotated(rows, self.speed) if self.speed else rows

    def __call__(self, x: jax.Array) -> jax.Array:
        *read, output_layer = (getattr(self, layer) for layer in self.layers)
        # of queries, keys and values, which one matrix may give
        query, key, value = (
            [layer(x) for layer in read] if len(read) > 1 else jnp.split(read[0](x), 3, axis=-1)
        )
        heads = self._heads(query, "q_norm"), self._heads(key, "k_norm")
        value = value.reshape(len(x), -1, self.size)
        return output_layer(_attend(*heads, value, self.scale, self.cap))


class Network(nnx.Module):
    """The network of a block, gated where it has a gate, (L, d) -> (L, d)."""

    def __init__(self, config: DecoderConfig, adapters: Adapters) -> None:
        self.activation = config.activation
        self.layers = config.layers_of("mlp")
        for layer in self.layers:
            setattr(self, layer, config.linear(f"mlp/{layer}", adapters))

    def __call__(self, x: jax.Array) -> jax.Array:
        *wide, output_layer = (getattr(self, layer) for layer in self.layers)
        inner = ACTIVATIONS[self.activation](wide[0](x))
        return output_layer(inner * wide[1](x) if len(wide) > 1 else inner)


class _Block(nnx.Module):
    """One transformer block: x (L, d) -> (L, d).

    It has some of four norms: "ln_1" before attention and "post_1" after it, "ln_2" before the
    network and "post_2" after it.
    """

    def __init__(self, config: DecoderConfig, adapters: Adapters, number: int) -> None:
        for name in config.family.norms:
            setattr(self, name, config.norm())
        self.attn = _Attention(config, adapters, number)
        self.mlp = Network(config, adapters)
        self.parallel = config.family.parallel

    def _normal(self, name: str, x: jax.Array) -> jax.Array:
        return getattr(self, name, lambda same: same)(x)  # a block has some of the norms

    def __call__(self, x: jax.Array) -> jax.Array:
        mixed = x + self._normal("post_1", self.attn(self._normal("ln_1", x)))
        read = x if self.parallel else mixed
        return mixed + self._normal("post_2", self.mlp(self._normal("ln_2", read)))


class Decoder(nnx.Module):
    """Tokens (L,) of one record -> logits (L, V) float32; row i predicts token i + 1."""

    def __init__(self, config: DecoderConfig, adapters: Adapters) -> None:
        size = config.vocab_size
        width = config.hidden_size
        self.dtype = config.compute_dtype
        self.cap = config.logits_cap
        self.scale = width**0.5 if config.family.gemma else 1.0
        self.positions = config.positions
        self.wte = _parameter(size, width)
        self.wpe = _parameter(self.positions, width) if config.family.learned else None
        blocks = range(config.num_hidden_layers)
        self.h = nnx.List([_Block(config, adapters, number) for number in blocks])
        self.ln_f = config.norm()
        self.lm_head = None if config.tie_word_embeddings else _parameter(size, width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (length,) = tokens.shape
        if length > self.positions:
            raise _check.reject("length", length, f"the model has {self.positions} positions")
        # widens an embedding in bfloat16, as in the norms
        x = np.float32(self.scale) * jnp.take(self.wte[...], tokens, axis=0)
        if self.wpe is not None:
            x = x + self.wpe[:length]
        x = x.astype(self.dtype)
        for block in self.h:
            x = block(x)
        table = self.wte if self.lm_head is None else self.lm_head
        x = self.ln_f(x)
        logits = jnp.matmul(x, table[...].T.astype(self.dtype), preferred_element_type=jnp.float32)
        return logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)
