"""An NNX module as a flat dictionary of parameter vectors and a pure function of them.

One name for each parameter vector (``gate_i.kernel``): clipping by layer then bounds each vector on
its own, as McMahan et al. 2018 do, and runs of many seeds and rates are one ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mfopt._runtime import _extras
from mfopt.training.models.nnx_model import flatten

try:
    from flax import nnx
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

Params = dict[str, jax.Array]
Apply = Callable[..., Any]


def functional(module: nnx.Module) -> tuple[Params, Apply]:
    """({name: array} of all parameters, ``apply(params, *inputs)`` = ``module(*inputs)``).

    The module's forward pass must not change its state; state that is no parameter is kept as it
    is now.
    """
    graph, *states = nnx.split(module, nnx.Param, ...)
    state, rest = states
    values = flatten(state)
    paths = {".".join(map(str, path)): path for path in values}
    params = {name: values[path] for name, path in paths.items()}

    def apply(params: Params, *inputs: Any) -> Any:
        flat = {path: params[name] for name, path in paths.items()}
        return nnx.merge(graph, nnx.from_flat_state(flat), rest)(*inputs)

    return params, apply


def size(params: Any) -> int:
    """Number of trained numbers."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
