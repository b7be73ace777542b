"""GPT-2 of any size, with optional low-rank adapters.

The layout of weights is that of the published checkpoints: matrices are stored (in, out), and the
output layer is the token embedding transposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from flax import nnx

from mfopt._runtime import _check
from mfopt.training.models.decoder import (
    Adapters,
    Linear,
    LoRAConfig,
    Norm,
    Shape,
    Tensor,
    attend,
    check_settings,
)

__all__ = ["GPT2Config", "LoRAConfig"]

_END = 50256
_SHAPE = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner")
# Settings of the reference implementation that change the function computed: another value than
# these means another model than the one here.
_REQUIRED = {
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


@dataclasses.dataclass(frozen=True)
class GPT2Config(Shape):
    """Shape of a GPT-2 (Radford et al. 2019). The defaults are GPT-2 small, 124M parameters.

    Its fields are named as in the published ``config.json``; ``n_inner``, the width of the hidden
    layer of each block, is 4 * ``n_embd`` if None.

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

    model_type, learned = "gpt2", True

    def __post_init__(self) -> None:
        for name in _SHAPE:
            if getattr(self, name) is not None or name != "n_inner":
                _check.integer(name, getattr(self, name))
        _check.positive("layer_norm_epsilon", self.layer_norm_epsilon)
        if self.n_embd % self.n_head:
            raise _check.reject("n_head", self.n_head, f"must divide n_embd = {self.n_embd}")
        super().__post_init__()

    @classmethod
    def read(cls, found: dict[str, Any]) -> GPT2Config:
        """The shape that a ``config.json`` says."""
        fields = {*_SHAPE, "layer_norm_epsilon"}
        settings = {name: value for name, value in found.items() if not name.startswith("summary_")}
        check_settings(settings, fields, {name: (value,) for name, value in _REQUIRED.items()})
        return cls(**{name: found[name] for name in fields if name in found})

    def facts(self) -> dict[str, Any]:
        """What a ``config.json`` says of the shape."""
        facts = {name: getattr(self, name) for name in _SHAPE} | _REQUIRED
        facts |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        facts |= {"architectures": ["GPT2LMHeadModel"]}
        facts |= {"layer_norm_epsilon": self.layer_norm_epsilon}
        if self.vocab_size <= _END:
            # Loaders fall back to GPT-2's own end token, which this vocabulary does not have.
            facts |= {"bos_token_id": None, "eos_token_id": None}
        return facts

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.vocab_size, self.n_embd, self.n_layer, self.n_positions

    def norm(self) -> Norm:
        return Norm(self.n_embd, self.layer_norm_epsilon, bias=True)

    def parts(self, adapters: Adapters, number: int) -> tuple[Any, Any]:
        return Attention(self, adapters), MLP(self, adapters)

    def tensors(self) -> Iterator[Tensor]:
        """The parameters without adapters, in the order in which values are drawn."""
        yield Tensor(("wte",), "transformer.wte.weight")
        yield Tensor(("wpe",), "transformer.wpe.weight")
        layers = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
        names = [f"h.{number}.{layer}" for number in range(self.n_layer) for layer in layers]
        for name in [*names, "ln_f"]:
            weight = "scale" if "ln_" in name else "kernel"
            yield Tensor((*name.split("."), weight), f"transformer.{name}.weight")
            yield Tensor((*name.split("."), "bias"), f"transformer.{name}.bias")

    def deviation(self, path: Sequence[str]) -> float:
        if "c_proj" in path:
            return 0.02 / (2 * self.n_layer) ** 0.5  # residual branches add up over the depth
        return 0.01 if path[-1] == "wpe" else 0.02


class Attention(nnx.Module):
    """Causal self-attention of one sequence, (L, d) -> (L, d)."""

    def __init__(self, config: GPT2Config, adapters: Adapters) -> None:
        d, self.n_head = config.n_embd, config.n_head
        self.c_attn = Linear(d, 3 * d, adapters.get("attn/c_attn"))
        self.c_proj = Linear(d, d, adapters.get("attn/c_proj"), out=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        length, width = x.shape
        heads = self.c_attn(x).reshape(length, 3, self.n_head, width // self.n_head)
        return self.c_proj(attend(heads[:, 0], heads[:, 1], heads[:, 2]))


class MLP(nnx.Module):
    """The two-layer network of a block, (L, d) -> (L, d)."""

    def __init__(self, config: GPT2Config, adapters: Adapters) -> None:
        d, hidden = config.n_embd, config.n_inner or 4 * config.n_embd
        self.c_fc = Linear(d, hidden, adapters.get("mlp/c_fc"))
        self.c_proj = Linear(hidden, d, adapters.get("mlp/c_proj"), out=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))
