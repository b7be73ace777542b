"""The state of a noise stream: secret, and of the size of its buffers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mfopt import _check


@dataclasses.dataclass(frozen=True)
class Layout:
    """Public, static shape information of the parameters.

    Attributes:
      treedef: pytree structure.
      shapes: global shape of each leaf.
      shardings: how each leaf is laid out over devices; None where it lies on one device.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding | None, ...]

    @classmethod
    def of(cls, params: Any) -> Layout:
        """The layout of ``params``: arrays or ``jax.ShapeDtypeStruct``, floating point only."""
        leaves, treedef = jax.tree.flatten(params)
        shapes, shardings = [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = f"params{jax.tree_util.keystr(path)}"
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not hasattr(leaf, "shape"):
                raise _check.reject(name, type(leaf).__name__, "must be an array")
            if not jax.numpy.issubdtype(dtype, np.floating):
                raise _check.reject(
                    name, str(dtype), "noise is added to floating-point parameters only",
                    "Pass only the trainable parameters.",
                )  # fmt: skip
            shapes.append(tuple(leaf.shape))
            shardings.append(_named_sharding(leaf))
        if not leaves:
            raise _check.reject("params", params, "must hold at least one array")
        return cls(treedef, tuple(shapes), tuple(shardings))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def buffer_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a buffer: slots on every device, the rest as the parameter."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NoiseState:
    """State of a :class:`~mfopt.noise.NoiseStream`; a pytree. **Secret**: do not log or share it.

    The key gives all noise of the run, and the buffers give part of it. Whoever has either can
    subtract noise from what was released.

    Attributes:
      key: shape (8,) uint32.
      step: steps done, int32; a host number outside of jit, so that reading it waits for nothing.
      buffers: one array (or None) per parameter.
      layout: of the parameters (static).
      digest: of the factorization (static).
      settings: what else must agree (static).
      pinned: whether the seed was pinned: such noise is reproducible and protects nothing (static).
    """

    key: Any
    step: Any
    buffers: tuple[Any, ...]
    layout: Layout = dataclasses.field(metadata={"static": True})
    digest: str = dataclasses.field(metadata={"static": True})
    settings: str = dataclasses.field(metadata={"static": True})
    pinned: bool = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        step = self.step if isinstance(self.step, jax.core.Tracer) else int(self.step)
        return (
            f"NoiseState(step={step}, parameters={self.layout.size}, digest={self.digest[:12]}, "
            f"key=<{'pinned, not private' if self.pinned else 'secret'}>)"
        )
