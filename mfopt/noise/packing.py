"""Packing of many parameters into one array, so that one compiled loop makes all their noise.

A draw is compiled once for every shape, at a tenth of a CPU-second each: a model of 148 arrays took
23. A leaf's draws depend on the number of each element in it and on nothing of its shape, so leaves
can be laid end to end, in rows of one width, without changing a number. What one device has of
spread leaves is packed alike: a row's elements are neighbours in the whole leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mfopt._runtime._arrays import Array, Step
from mfopt._runtime._types import PyTree
from mfopt.noise import _draws
from mfopt.noise.state import buffer_sharding

_WIDTH = 1024  # elements of a row: each has subkeys to read, and each leaf half a row to spare
_NARROWEST = 64  # of blocks whose rows are shorter, each leaf is streamed by itself
_WORD = 2**32


@dataclasses.dataclass(frozen=True)
class Packing:
    """Some leaves of a pytree as rows of one matrix; a leaf's last row is filled up.

    ``leaves`` are their numbers in the pytree. Leaves of equal size have a row each and nothing to
    fill. ``divisor``: where not 0, the width of a row.
    """

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    divisor: int = 0

    @property
    def sizes(self) -> list[int]:
        """Elements of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def width(self) -> int:
        """Elements of a row."""
        if self.divisor:
            return self.divisor
        sizes = set(self.sizes)
        if len(sizes) == 1:
            return max(1, sizes.pop())
        return min(_WIDTH, 1 << (max(sizes) - 1).bit_length())

    @property
    def starts(self) -> np.ndarray:
        """First row of each leaf, and behind it the number of rows: shape (leaves + 1,)."""
        rows = [-(-size // self.width) for size in self.sizes]
        return np.cumsum([0, *rows], dtype=np.int64)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, width)."""
        return int(self.starts[-1]), self.width

    @property
    def owners(self) -> np.ndarray:
        """Place in ``leaves`` of the leaf of each row: shape (rows,)."""
        return np.repeat(np.arange(len(self.leaves)), np.diff(self.starts))

    def row_starts(self, offset: int | list[int] = 0) -> np.ndarray:
        """Number of each row's first element in its leaf, uint32 (rows,).

        ``offset``: elements of each leaf that lie in front of what is packed of it.
        """
        rows_before = np.arange(self.starts[-1]) - self.starts[self.owners]
        begin = np.broadcast_to(np.asarray(offset, np.int64), len(self.leaves))[self.owners]
        return (begin + rows_before * self.width).astype(np.uint32)

    def words(self, row_starts: Array | None = None) -> Array:
        """Number of each element in its leaf, uint32 of shape :attr:`shape`.

        ``row_starts``: that of the first element of each row, (rows,); None: as in whole leaves.
        """
        row_starts = self.row_starts() if row_starts is None else row_starts
        shape = len(row_starts), self.width
        return row_starts[:, None] + jax.lax.broadcasted_iota(jnp.uint32, shape, 1)

    def draw(
        self, key: Array, step: Step, dtype: np.dtype, row_starts: Array | None = None
    ) -> jax.Array:
        """White noise N(0, 1) of all leaves, shape :attr:`shape`; what fills up is noise too.

        Args:
          key, step: of the run, uint32 (8,), secret; and number of the step, from 0.
          dtype, row_starts: float32 or float64; and of :meth:`words`.
        """
        subkeys, offset = _draws.seeds(key, step, np.array(self.leaves))
        return _draws.normal(
            subkeys[:, self.owners, None],
            self.words(row_starts),
            jnp.zeros((), jnp.uint32),
            offset[self.owners, None],
            dtype=np.dtype(dtype),
        )

    def unpacked(self, packed: Any) -> list[Any]:
        """The leaves of an array of shape (..., rows, width): each (..., *shape of the leaf)."""
        leading = packed.shape[:-2]
        flat = packed.reshape((*leading, -1))
        begins = self.starts * self.width
        return [
            flat[..., int(start) : int(start) + size].reshape((*leading, *shape))
            for start, size, shape in zip(begins, self.sizes, self.shapes, strict=False)
        ]

    def packed(self, leaves: list[np.ndarray]) -> Array:
        """The inverse of :meth:`unpacked`, filled up with 0; on the host."""
        leading = leaves[0].shape[: leaves[0].ndim - len(self.shapes[0])]
        matrix = np.zeros((*leading, self.starts[-1], self.width), leaves[0].dtype)
        flat = matrix.reshape(*leading, -1)
        for start, size, leaf in zip(self.starts * self.width, self.sizes, leaves, strict=False):
            flat[..., start : start + size] = leaf.reshape(*leading, size)
        return matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafGroup(Packing):
    """Leaves that are streamed as one array: on one device, or spread over one mesh.

    ``shapes`` are those of the part of each leaf that a device has, ``whole`` those of the whole
    leaves; their ``shardings`` are all None on one device.
    """

    whole: tuple[tuple[int, ...], ...]
    shardings: tuple[NamedSharding | None, ...]

    @property
    def sharding(self) -> NamedSharding | None:
        """Layout of the packed array: the rows of each device behind those of the one before."""
        if self.shardings[0] is None:
            return None
        mesh = self.shardings[0].mesh
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names, None))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows of all devices, width)."""
        rows, width = super().shape
        return rows * (self.sharding.mesh.size if self.sharding else 1), width

    def begin(self) -> Array | None:
        """Argument of :meth:`Packing.words` for this device; inside a ``shard_map`` of the mesh."""
        if self.sharding is None:
            return None
        inside, block_starts = [], []
        counts = np.diff(self.starts)
        for whole, block, sharding, rows in zip(
            self.whole, self.shapes, self.shardings, counts, strict=True
        ):
            strides = np.array([math.prod(whole[axis + 1 :]) for axis in range(len(whole))])
            starts = np.arange(rows) * self.width
            places = np.unravel_index(starts, block) if block and rows else ()
            inside.append(np.tensordot(strides, places, 1) if len(places) else starts)
            begin = [jnp.asarray(x).astype(jnp.uint32) for x in offsets(sharding, block)]
            weighted = zip(begin, strides.astype(np.uint32), strict=True)
            block_starts.append(
                sum((x * stride for x, stride in weighted), jnp.zeros((), jnp.uint32))
            )
        numbers = np.concatenate(inside).astype(np.uint32)
        return numbers + jnp.stack(block_starts)[self.owners]

    def elements(self, begin: PyTree) -> tuple[Array, Array, jax.Array]:
        """(leaf, low word, high word) of each element that this device has, from its ``begin``."""
        owners = np.array(self.leaves)[self.owners][:, None]
        return owners, self.words(begin), jnp.zeros((), jnp.uint32)

    def parts(self, noise: Any) -> list[Any]:
        """The part of each leaf that this device has."""
        return super().unpacked(noise)

    def unpacked(self, packed: Any) -> list[Any]:
        """Whole leaves of an array (..., *shape); on the host where they are spread."""
        if self.sharding is None:
            return super().unpacked(packed)
        leaves = [np.zeros((*packed.shape[:-2], *whole), packed.dtype) for whole in self.whole]
        devices = np.split(np.asarray(packed), self.sharding.mesh.size, axis=-2)
        for part, places in zip(devices, self._places(), strict=True):
            for leaf, block, index in zip(leaves, self.parts(part), places, strict=True):
                leaf[index] = block
        return leaves

    def packed(self, leaves: list[np.ndarray]) -> jax.Array:
        """The inverse of :meth:`unpacked`, laid out over the devices."""
        if self.sharding is None:
            return jnp.asarray(super().packed(leaves))
        parts = [
            super().packed([leaf[index] for leaf, index in zip(leaves, places, strict=True)])
            for places in self._places()
        ]
        return jax.device_put(np.concatenate(parts, axis=-2), buffer_sharding(self.sharding))

    def _places(self) -> list[list[Any]]:
        """The part of each leaf that a device has, for every device in the order of the rows."""
        maps = [
            sharding.devices_indices_map(whole)
            for sharding, whole in zip(self.shardings, self.whole, strict=True)
            if sharding is not None
        ]
        assert self.sharding is not None
        return [[(..., *m[d]) for m in maps] for d in self.sharding.mesh.devices.flat]


@dataclasses.dataclass(frozen=True)
class SingleLeaf:
    """Number ``leaf`` of the pytree, streamed by itself, with the methods of a :class:`LeafGroup`.

    ``shape``: of the whole leaf; ``sharding``: its layout over devices, None on one device.
    """

    leaf: int
    shape: tuple[int, ...]
    sharding: NamedSharding | None

    @property
    def leaves(self) -> tuple[int]:
        return (self.leaf,)

    @property
    def shardings(self) -> tuple[NamedSharding | None]:
        return (self.sharding,)

    @property
    def _block(self) -> tuple[int, ...]:
        return self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)

    def begin(self) -> tuple[Step, ...]:
        return offsets(self.sharding, self._block)

    def elements(self, begin: PyTree) -> tuple[np.uint32, jax.Array, jax.Array]:
        return np.uint32(self.leaf), *_draws.counters(self.shape, self._block, begin)

    def draw(self, key: Array, step: Step, dtype: np.dtype, begin: tuple[Step, ...]) -> jax.Array:
        subkeys, offset = _draws.seeds(key, step, np.array([self.leaf]))
        words = _draws.counters(self.shape, self._block, begin)
        return _draws.normal(subkeys[:, 0], *words, offset[0], dtype=np.dtype(dtype))

    def parts(self, noise: jax.Array) -> list[jax.Array]:
        return [noise]

    def unpacked(self, packed: Array) -> Sequence[Array]:
        return [packed]

    def packed(self, leaves: list[np.ndarray]) -> jax.Array:
        (leaf,) = leaves
        if self.sharding is None:
            return jnp.asarray(leaf)
        return jax.device_put(leaf, buffer_sharding(self.sharding))


@functools.lru_cache(maxsize=64)
def grouped(
    shapes: tuple[tuple[int, ...], ...], shardings: tuple[NamedSharding | None, ...]
) -> tuple[LeafGroup | SingleLeaf, ...]:
    """The leaves in groups that are streamed together, and behind these the others.

    Leaves beyond 2³² elements are streamed one by one, and those of which a device has short runs.
    """
    members: dict[Any, list[int]] = {}
    for i, (shape, sharding) in enumerate(zip(shapes, shardings, strict=True)):
        width = 0 if sharding is None else _run(shape, sharding.shard_shape(shape))
        if math.prod(shape) <= _WORD and not 0 < width < _NARROWEST:
            members.setdefault((sharding and sharding.mesh, width), []).append(i)
    groups: list[LeafGroup | SingleLeaf] = []
    for (_, width), leaves in members.items():
        layouts = tuple(shardings[i] for i in leaves)
        whole = tuple(shapes[i] for i in leaves)
        blocks = tuple(s.shard_shape(x) if s else x for x, s in zip(whole, layouts, strict=True))
        groups.append(LeafGroup(tuple(leaves), blocks, width, whole=whole, shardings=layouts))
    together = {i for group in groups for i in group.leaves}
    single = (i for i in range(len(shapes)) if i not in together)
    return *groups, *(SingleLeaf(i, shapes[i], shardings[i]) for i in single)


def _run(shape: tuple[int, ...], block: tuple[int, ...]) -> int:
    """Width that cuts a block into rows of neighbours in the leaf; 0 where any width does."""
    cut = max((axis for axis in range(len(shape)) if block[axis] < shape[axis]), default=0)
    if math.prod(block[:cut]) <= 1:
        return 0
    return math.gcd(math.prod(block[cut:]), _WIDTH)


def offsets(sharding: NamedSharding | None, block: tuple[int, ...]) -> tuple[Step, ...]:
    """Start of this device's block of a leaf; inside a ``shard_map`` of the mesh."""
    spec = () if sharding is None else sharding.spec
    axes = (*spec, *[None] * (len(block) - len(spec)))
    return tuple(
        0 if axis is None else jax.lax.axis_index(axis) * size
        for axis, size in zip(axes, block, strict=True)
    )


def share(size: int, part: tuple[int, int]) -> tuple[int, int]:
    """(first, behind the last) of the elements that a part of several has."""
    length = -(-size // part[1])
    return min(part[0] * length, size), min((part[0] + 1) * length, size)
