"""Conversion of a Flax NNX module that gives next-token logits to a :class:`Model`.

Parameters leave it as nested dictionaries of arrays with string keys, which every optimizer,
checkpointer and sharding rule understands; it is put together again when the loss is traced.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from mfopt._runtime import _check, _extras
from mfopt.training.models.model import Model, PyTree, next_token_loss

with _extras.required():
    from flax import nnx
    from flax.traverse_util import unflatten_dict

Path = tuple[Any, ...]


def nest(flat: dict[Path, jax.Array]) -> PyTree:
    """{("h", 0, "bias"): x} -> {"h": {"0": {"bias": x}}}."""
    return unflatten_dict({tuple(map(str, path)): value for path, value in flat.items()})


def pick(tree: PyTree, path: Path) -> PyTree:
    """The value at ``path`` of a nested dictionary that :func:`nest` made."""
    for part in path:
        tree = tree[str(part)]
    return tree


def _flatten(state: PyTree) -> dict[Path, jax.Array]:
    """{path: array} of an NNX state, in a fixed order."""
    return {
        path: value.get_value() if isinstance(value, nnx.Variable) else value
        for path, value in nnx.to_flat_state(state)
    }


def from_nnx(
    module: nnx.Module,
    *,
    trainable: Any = nnx.Param,
    vocab_size: int | None = None,
    max_length: int | None = None,
    export: Callable[[PyTree, PyTree, pathlib.Path], None] | None = None,
) -> Model:
    """The :class:`Model` of ``module(tokens (L,)) -> logits (L, V)``.

    Args:
        module: any NNX module with that call. Its forward pass must not change its state.
        trainable: an NNX filter: ``nnx.Param`` trains all parameters, ``nnx.LoRAParam`` the
            adapters only. All other state becomes ``frozen``.
        vocab_size, max_length, export: as in :class:`Model`.

    Raises:
        UsageError: ``trainable`` selects nothing.
    """
    graph = nnx.graphdef(module)
    chosen, frozen_state = nnx.state(module, trainable, ...)
    params = _flatten(chosen)
    frozen = _flatten(frozen_state)
    if not params:
        raise _check.reject("trainable", trainable, "selects no parameter of the module")
    paths = list(params), list(frozen)

    def logits(params: PyTree, frozen: PyTree, tokens: jax.Array) -> jax.Array:
        values = {path: pick(params, path) for path in paths[0]}
        values |= {path: pick(frozen, path) for path in paths[1]}
        merged: Any = nnx.merge(graph, nnx.from_flat_state(values))
        return merged(tokens)

    def loss(params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        return next_token_loss(logits(params, frozen, tokens), tokens, mask)

    return Model(
        params=nest(params),
        loss=loss,
        frozen=nest(frozen),
        vocab_size=vocab_size,
        max_length=max_length,
        logits=logits,
        export=export,
    )
