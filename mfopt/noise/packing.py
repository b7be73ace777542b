"""Packing of many parameters into one array, so that one compiled loop makes all their noise.

A draw is compiled once for every shape, at a tenth of a CPU-second each: a model of 148 arrays took
23. A leaf's draws depend on the number of each element in it and on nothing of its shape, so leaves
can be laid end to end, in rows of one width, without changing a number.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.noise import _draws

_WIDTH = 1024  # elements of a row: each has subkeys to read, and each leaf half a row to spare
_WORD = 2**32


@dataclasses.dataclass(frozen=True)
class Packing:
    """Some leaves of a pytree as rows of one matrix; a leaf's last row is filled up.

    Leaves of equal size have a row each and nothing to fill.

    Attributes:
      leaves: their numbers in the pytree.
      shapes: their shapes.
    """

    leaves: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, shapes: tuple[tuple[int, ...], ...], leaves: tuple[int, ...] | None = None
    ) -> Packing | None:
        """The packing of ``leaves`` (all if left out), without those beyond 2³² elements."""
        chosen = range(len(shapes)) if leaves is None else leaves
        small = tuple(i for i in chosen if math.prod(shapes[i]) <= _WORD)
        return cls(small, tuple(shapes[i] for i in small)) if small else None

    @property
    def sizes(self) -> list[int]:
        """Elements of each leaf."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def width(self) -> int:
        """Elements of a row."""
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

    def draw(self, key: Any, step: Any, dtype: Any) -> jax.Array:
        """White noise N(0, 1) of all leaves, shape :attr:`shape`; what fills up is noise too."""
        rows, width = self.shape
        of_leaves = _draws.seeds(key, step, np.array(self.leaves))
        if np.all(np.diff(self.starts) == 1):  # a row each
            row_of_leaf = np.zeros((rows, 1), np.uint32)
            of_rows = of_leaves
        else:
            owner = np.repeat(np.arange(len(self.leaves)), np.diff(self.starts))
            row_of_leaf = (np.arange(rows) - self.starts[owner]).astype(np.uint32)[:, None]
            of_rows = _draws.Seeds(of_leaves.subkeys[:, owner], of_leaves.offset[owner])
        column = jax.lax.broadcasted_iota(jnp.uint32, (rows, width), 1)
        low = row_of_leaf * np.uint32(width) + column
        white: jax.Array = _draws.normal(
            of_rows.subkeys[:, :, None],
            low,
            jnp.zeros((), jnp.uint32),
            of_rows.offset[:, None],
            dtype=np.dtype(dtype),
        )
        return white

    def unpacked(self, packed: Any) -> list[Any]:
        """The leaves of an array of shape (..., rows, width): each (..., *shape of the leaf)."""
        before = packed.shape[:-2]
        flat = packed.reshape((*before, -1))
        first = self.starts * self.width
        return [
            flat[..., int(start) : int(start) + size].reshape((*before, *shape))
            for start, size, shape in zip(first, self.sizes, self.shapes, strict=False)
        ]

    def cut(self, packed: jax.Array, step: Any) -> list[jax.Array]:
        """:meth:`unpacked` in compiled code, where ``packed`` has two axes.

        Where a leaf starts is hidden from XLA's CPU compiler: it would compile a loop for every
        leaf, 15 CPU-milliseconds each, and so compiles one for every shape.
        """
        if len(self.leaves) < 8:
            return self.unpacked(packed)
        rows = [np.int32(start) for start in self.starts[:-1]]

        def hidden() -> tuple[Any, ...]:
            nothing = tuple(jnp.int32(0) for _ in rows)
            found: tuple[Any, ...] = jax.lax.cond(
                step >= 0, lambda: tuple(map(jnp.int32, rows)), lambda: nothing
            )
            return found

        starts = jax.lax.platform_dependent(cpu=hidden, default=lambda: tuple(map(jnp.int32, rows)))
        made = []
        for start, count, size, shape in zip(
            starts, np.diff(self.starts), self.sizes, self.shapes, strict=True
        ):
            block = jax.lax.dynamic_slice(packed, (start, 0), (int(count), self.width))
            made.append(block.reshape(-1)[:size].reshape(shape))
        return made

    def packed(self, leaves: list[np.ndarray]) -> np.ndarray:
        """The inverse of :meth:`unpacked`, filled up with 0; on the host."""
        before = leaves[0].shape[: leaves[0].ndim - len(self.shapes[0])]
        made = np.zeros((*before, *self.shape), leaves[0].dtype)
        flat = made.reshape(*before, -1)
        for start, size, leaf in zip(self.starts * self.width, self.sizes, leaves, strict=False):
            flat[..., start : start + size] = leaf.reshape(*before, size)
        return made
