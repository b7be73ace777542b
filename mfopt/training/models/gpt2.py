"""GPT-2 of any size as Flax NNX modules, with optional low-rank adapters.

The layout of weights is that of the published checkpoints: matrices are stored (in, out), and the
output layer is the token embedding transposed. Dropout is left out: private training clips
the gradient of a fixed function of the record, and noise is regularization already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _extras

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None
from jax.sharding import PartitionSpec as Spec

from mfopt._runtime import _check

LINEAR_LAYERS = ("attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj")


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """Shape of a GPT-2 (Radford et al. 2019). The defaults are GPT-2 small, 124M parameters.

    Args:
        vocab_size: V, entries of the tokenizer.
        n_positions: longest sequence, tokens.
        n_embd: width of the residual stream.
        n_layer: blocks.
        n_head: attention heads; divides ``n_embd``.
        n_inner: width of the hidden layer of each block; None: 4 * n_embd.
        layer_norm_epsilon: added to the variance in layer norms.
        compute_dtype: type of activations, "float32" or "bfloat16"; parameters stay float32, and
            the loss is computed in float32.
        remat: recompute each block in the backward pass, which saves memory for time.

    >>> GPT2Config(n_embd=1600, n_layer=48, n_head=25).num_params
    1557611200
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    compute_dtype: str = "float32"
    remat: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"):
            if getattr(self, name) is not None or name != "n_inner":
                _check.integer(name, getattr(self, name))
        _check.positive("layer_norm_epsilon", self.layer_norm_epsilon)
        if self.n_embd % self.n_head:
            raise _check.reject("n_head", self.n_head, f"must divide n_embd = {self.n_embd}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise _check.reject("compute_dtype", self.compute_dtype, "must be float32 or bfloat16")

    @classmethod
    def embedded(cls, vocab_size: int = 2048) -> GPT2Config:
        """The small model for the embedded corpus: 2 blocks of width 64, made for two CPU cores.

        >>> GPT2Config.embedded().num_params
        239360
        """
        return cls(vocab_size, n_positions=128, n_embd=64, n_layer=2, n_head=4)

    @property
    def inner(self) -> int:
        """Width of the hidden layer of a block."""
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, without adapters."""
        d, h = self.n_embd, self.inner
        block = (d * 3 * d + 3 * d) + (d * d + d) + (d * h + h) + (h * d + d) + 4 * d
        return (self.vocab_size + self.n_positions) * d + self.n_layer * block + 2 * d


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2022): W + (alpha / rank) A B with A (in, rank), B (rank, out).

    B starts at 0, so the adapted model starts as the base model. Only A and B are trained.

    Args:
        rank: 32 as in Chua et al. 2024, appendix B.2.
        alpha: scale; None: equal to ``rank``, so that the factor is 1.
        layers: which linear layers of each block get an adapter, of ``LINEAR_LAYERS``.
    """

    rank: int = 32
    alpha: float | None = None
    layers: tuple[str, ...] = ("attn/c_attn",)

    def __post_init__(self) -> None:
        _check.integer("rank", self.rank)
        if self.alpha is not None:
            _check.positive("alpha", self.alpha)
        object.__setattr__(self, "layers", tuple(self.layers))
        unknown = set(self.layers) - set(LINEAR_LAYERS)
        if unknown or not self.layers:
            raise _check.reject("layers", self.layers, f"must be some of {LINEAR_LAYERS}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def _zeros(*shape: int) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)  # takes no memory


class Linear(nnx.Module):
    """x W + b, plus a low-rank adapter where ``lora`` is given."""

    def __init__(self, rows: int, columns: int, lora: LoRAConfig | None) -> None:
        self.kernel, self.bias = nnx.Param(_zeros(rows, columns)), nnx.Param(_zeros(columns))
        self.scale = 0.0 if lora is None else lora.scale
        if lora is not None:
            self.lora_a = nnx.LoRAParam(_zeros(rows, lora.rank))
            self.lora_b = nnx.LoRAParam(_zeros(lora.rank, columns))

    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = x.dtype
        out: jax.Array = x @ self.kernel[...].astype(dtype) + self.bias[...].astype(dtype)
        if self.scale:
            low = x @ self.lora_a[...].astype(dtype) @ self.lora_b[...].astype(dtype)
            out = out + self.scale * low
        return out


class LayerNorm(nnx.Module):
    """Layer norm over the last axis, computed in float32."""

    def __init__(self, features: int, epsilon: float) -> None:
        self.scale, self.bias = nnx.Param(_zeros(features)), nnx.Param(_zeros(features))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        scaled: jax.Array = normal * self.scale[...] + self.bias[...]
        return scaled.astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention of one sequence, (L, d) -> (L, d)."""

    def __init__(self, config: GPT2Config, adapters: dict[str, LoRAConfig]) -> None:
        d, self.n_head = config.n_embd, config.n_head
        self.c_attn = Linear(d, 3 * d, adapters.get("attn/c_attn"))
        self.c_proj = Linear(d, d, adapters.get("attn/c_proj"))

    def __call__(self, x: jax.Array) -> jax.Array:
        length, width = x.shape
        heads = self.c_attn(x).reshape(length, 3, self.n_head, width // self.n_head)
        query, key, value = heads[:, 0], heads[:, 1], heads[:, 2]
        # Padding comes after the text, so the causal mask alone keeps it out of real positions.
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.reshape(length, width))


class MLP(nnx.Module):
    """The two-layer network of a block, (L, d) -> (L, d)."""

    def __init__(self, config: GPT2Config, adapters: dict[str, LoRAConfig]) -> None:
        self.c_fc = Linear(config.n_embd, config.inner, adapters.get("mlp/c_fc"))
        self.c_proj = Linear(config.inner, config.n_embd, adapters.get("mlp/c_proj"))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Block(nnx.Module):
    """One transformer block, (L, d) -> (L, d)."""

    def __init__(self, config: GPT2Config, adapters: dict[str, LoRAConfig]) -> None:
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = Attention(config, adapters)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = MLP(config, adapters)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    """Tokens (L,) of one record -> logits (L, V) float32; row i predicts token i + 1.

    All parameters are zeros that take no memory: :func:`initial_value` draws them.
    """

    def __init__(self, config: GPT2Config, lora: LoRAConfig | None = None) -> None:
        d = config.n_embd
        adapters = {} if lora is None else dict.fromkeys(lora.layers, lora)
        self.config = config
        self.wte = nnx.Param(_zeros(config.vocab_size, d))
        self.wpe = nnx.Param(_zeros(config.n_positions, d))
        self.h = nnx.List([Block(config, adapters) for _ in range(config.n_layer)])
        self.ln_f = LayerNorm(d, config.layer_norm_epsilon)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        (length,) = tokens.shape
        if length > self.config.n_positions:
            rule = f"the model has {self.config.n_positions} positions"
            raise _check.reject("length", length, rule)
        dtype = jnp.dtype(self.config.compute_dtype)
        x = (jnp.take(self.wte[...], tokens, axis=0) + self.wpe[:length]).astype(dtype)
        for block in self.h:
            x = _recomputed(block, x) if self.config.remat else block(x)
        x = self.ln_f(x)
        return jnp.matmul(x, self.wte[...].T.astype(dtype), preferred_element_type=jnp.float32)


def _recomputed(block: Block, x: jax.Array) -> jax.Array:
    graph, state = nnx.split(block)
    out: jax.Array = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    return out


def initial_value(
    path: Sequence[str], shape: tuple[int, ...], layers: int, rng: np.random.Generator
) -> np.ndarray:
    """A parameter before training, float32: normal, as in the published model.

    Args:
      path, shape: of the parameter.
      layers: blocks of the model.
      rng: a numpy stream, so that neither a device nor a compiler is involved.
    """
    name = path[-1]
    if name in ("scale", "bias"):
        return np.full(shape, name == "scale", np.float32)
    std = 0.01 if name == "wpe" else 0.02
    if "c_proj" in path:
        std = 0.02 / (2 * layers) ** 0.5  # residual branches add up over the depth
    return np.float32(std) * rng.standard_normal(shape, np.float32)


def partition_spec(path: Sequence[str], axis: str = "model") -> Spec:
    """Sharding of a parameter over the ``axis`` of a device mesh.

    Matrices into a half-block are cut by output, matrices out of it by input, so that the wide
    middle is never gathered; the embedding is cut along its width. The rest is whole.
    """
    name, layer = path[-1], path[-2] if len(path) > 1 else ""
    by_layer = {
        "c_attn": {"kernel": Spec(None, axis), "bias": Spec(axis), "lora_b": Spec(None, axis)},
        "c_proj": {"kernel": Spec(axis, None), "lora_a": Spec(axis, None)},
    }
    if name == "wte":
        return Spec(None, axis)
    return by_layer.get(layer.replace("c_fc", "c_attn"), {}).get(name, Spec())
