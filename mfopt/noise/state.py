"""The state of a noise stream: secret, and of the size of its buffers."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding, PartitionSpec

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._pytree import STATIC, pytree
from mfopt._runtime._types import PyTree
from mfopt.noise import ledger, uses


@dataclasses.dataclass(frozen=True)
class Layout:
    """Public, static shape information of the parameters.

    ``treedef``: pytree structure; ``shapes``: global shape of each leaf; ``shardings``: how each
    leaf is laid out over devices, None where it lies on one device.
    """

    treedef: jax.tree_util.PyTreeDef
    shapes: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding | None, ...]

    @classmethod
    def of_params(cls, params: PyTree) -> Layout:
        """The layout of ``params``: arrays or ``jax.ShapeDtypeStruct``, floating point only."""
        leaves, treedef = jax.tree.flatten(params)
        shapes, shardings = [], []
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = f"params{jax.tree_util.keystr(path)}"
            dtype = getattr(leaf, "dtype", None)
            if dtype is None or not hasattr(leaf, "shape"):
                raise _check.reject(name, type(leaf).__name__, "must be an array")
            if not jax.numpy.issubdtype(dtype, np.floating):
                rule = "noise is added to floating-point parameters only"
                way_out = "Pass only the trainable parameters."
                raise _check.reject(name, str(dtype), rule, way_out)
            shapes.append(tuple(leaf.shape))
            shardings.append(_named_sharding(leaf))
        if not leaves:
            raise _check.reject("params", params, "must hold at least one array")
        return cls(treedef, tuple(shapes), tuple(shardings))

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)


def _named_sharding(leaf: object) -> NamedSharding | None:
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return NamedSharding(sharding.mesh, sharding.spec)


def buffer_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding of a buffer: slots on every device, the rest as the parameter."""
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def mark(layout: Layout, digest: str, settings: str) -> np.ndarray:
    """Fingerprint of the stream a state belongs to, stored in the state: uint32 (8,).

    The static fields of a state come from the program that restores it, not from the checkpoint:
    only what is saved with the buffers can show that they were another stream's.
    """
    text = f"mfopt noise state\n{digest}\n{settings}\n{layout.shapes}\n{layout.treedef}"
    return np.frombuffer(hashlib.sha256(text.encode()).digest(), "<u4").astype(np.uint32)


@pytree
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NoiseState:
    """State of a :class:`~mfopt.noise.NoiseStream`; a pytree. **Secret**: do not log or share it.

    The key gives all noise of the run, and the buffers give part of it. Whoever has either can
    subtract noise from what was released.

    Besides :func:`mfopt.noise.save_state`, Orbax saves it as any pytree. Write such files inside
    :func:`mfopt.noise.owner_only`. Copies and pickles, also of what holds it, are refused. A
    restored state of another stream is refused, or gives NaN inside jit.

    Attributes:
      key: shape (8,) uint32.
      step: steps done, int32; a host number outside of jit, so that reading it waits for nothing.
      buffers: arrays (or None): one for all parameters that lie on one device, a few for those
        that are spread over several.
      mark: of :func:`mark`, shape (8,) uint32.
      layout: of the parameters (static).
      digest: of the factorization (static).
      settings: what else must agree (static).
      pinned: whether the seed was pinned: such noise is reproducible and protects nothing (static).
      counted: whether a ledger notes the steps of its key (static): not where the caller gave it.
    """

    key: Any
    step: Any
    buffers: tuple[Any, ...]
    mark: Any
    layout: Layout = dataclasses.field(metadata=STATIC)
    digest: str = dataclasses.field(metadata=STATIC)
    settings: str = dataclasses.field(metadata=STATIC)
    pinned: bool = dataclasses.field(metadata=STATIC)
    counted: bool = dataclasses.field(metadata=STATIC)

    def before_flatten(self) -> None:
        """Called by JAX, and so by what saves pytrees, before it takes a state apart."""
        _register_with_orbax()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy(self)

    def __repr__(self) -> str:
        step = self.step if isinstance(self.step, jax.core.Tracer) else int(self.step)
        return (
            f"NoiseState(step={step}, parameters={self.layout.size}, digest={self.digest[:12]}, "
            f"{'guarantee=none: seed pinned' if self.pinned else 'key=<secret>'})"
        )


def no_copy(noise: object) -> _check.UsageError:
    """The error for copying or pickling what adds noise: two would add the same draws."""
    return _check.reject(
        type(noise).__name__,
        "a copy",
        "cannot be made: a file of it would show the key, and both would add the same noise",
        "Make a new one, or resume from its state_dict() or a file of save_state(), mode 0600; of "
        "a private model copy or average (AveragedModel) the module that it was made from.",
    )


def set_once(self: object, name: str, value: object) -> None:
    """``__setattr__`` of objects whose guarantee rests on the values that they were made with."""
    if name in vars(self):
        rule = "is set already, and batches, clipping and noise follow from its value"
        raise _check.reject(name, value, rule, "Make a new run: both count against privacy.")
    object.__setattr__(self, name, value)


def check_arrays(
    arrays: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]]
) -> None:
    """Raise :class:`UsageError` unless the arrays have exactly these names, shapes and types."""
    if differing := sorted(set(arrays) ^ set(expected)):
        kind = "lacks" if differing[0] in expected else "should not hold"
        raise _check.reject("state", f"{len(arrays)} arrays", f"{kind} {differing[0]}")
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        have = tuple(np.shape(array)), str(getattr(array, "dtype", type(array)))
        if have != (tuple(shape), str(np.dtype(dtype))):
            rule = f"must be {np.dtype(dtype)}{list(shape)}"
            raise _check.reject(f"state: {name}", f"{have[1]}{list(have[0])}", rule)


def parts_of(state: NoiseState) -> dict[str, Array]:
    """Data of a state by name: key, step, mark and buffers."""
    buffers = {f"buffer/{i}": b for i, b in enumerate(state.buffers) if b is not None}
    return {"key": state.key, "step": state.step, "mark": state.mark, **buffers}


def _check_saving(arrays: Iterable[Array]) -> None:
    """Called before ``arrays`` go to a file: store the ledgers of the keys among them.

    Raises:
      UsageError: others than the owner could read the file.
    """
    for array in arrays:
        if getattr(array, "dtype", None) != np.uint32 or np.shape(array)[-1:] != (8,):
            continue
        for key in uses.on_host(array).reshape(-1, 8):
            if not ledger.is_counted(key):
                continue
            mask = os.umask(0o077)
            os.umask(mask)
            if mask & 0o077 != 0o077:
                rule = "holds the key of the noise, and its file would be for others to read"
                way_out = "Write it inside `with mfopt.noise.owner_only():`."
                raise _check.reject("state", f"written with umask {mask:04o}", rule, way_out)
            ledger.store(key)


def _register_with_orbax() -> None:
    """Have Orbax show what it writes: it takes a state apart, down to arrays without a class."""
    handlers = getattr(sys.modules.get("orbax.checkpoint"), "type_handlers", None)
    if handlers is None or handlers.ArrayHandler in _watched:
        return
    for handler in (handlers.ArrayHandler, handlers.NumpyHandler):
        handler.serialize = _watching(handler.serialize)
        _watched.add(handler)


_watched: set[type] = set()


def _watching(serialize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(serialize)
    async def watched(
        self: object, values: Iterable[Array], *arguments: object, **keywords: object
    ) -> object:
        _check_saving(values)
        return await serialize(self, values, *arguments, **keywords)

    return watched
