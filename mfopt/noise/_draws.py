"""White Gaussian noise that is a pure function of (key, step, element).

Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw 2011) is a bijection of 64-bit counters
for each key. Every (step, leaf, element) has a counter of its own, so within one run no draw can
occur twice, a past draw can be made again instead of being stored, and the numbers do not depend
on how the parameters are laid out over devices.

The rounds are written out instead of calling ``jax.random.normal``: XLA then fuses the draw into
one pass with the arithmetic that uses it, without a temporary array. ``jax.random`` runs the same
rounds in a loop on CPU, about three times slower there.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfopt import _check

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA  # added to the key schedule so that no key is its own schedule
_WORD = 2**32


def threefry(key: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Threefry-2x32-20 of the counter (low, high), elementwise; all words are uint32.

    ``key`` has shape (2,). Works on numpy and on JAX arrays. Not a cipher by proof: its quality
    is statistical, as for every generator in JAX and PyTorch.
    """
    schedule = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(_KEY_PARITY))
    low, high = low + schedule[0], high + schedule[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            low = low + high
            high = ((high << np.uint32(rotation)) | (high >> np.uint32(32 - rotation))) ^ low
        low = low + schedule[(i + 1) % 3]
        high = high + (schedule[(i + 2) % 3] + np.uint32(i + 1))
    return low, high


def standard_normal(low: jax.Array, high: jax.Array, dtype: Any) -> jax.Array:
    """N(0, 1) from two random words per element, by inversion; float32 or float64.

    The uniform lies on a grid symmetric about 0 that contains neither 0 nor ±1: odd multiples
    of 2⁻²⁴ (float32; |z| <= 5.42) or of 2⁻⁵³ (float64; |z| <= 8.2).
    """
    if dtype == jnp.float64:
        bits = 53
        words = (low.astype(jnp.uint64) << 21) | (high.astype(jnp.uint64) >> 11)
        uniform = (2 * words.astype(jnp.int64) + 1 - 2**bits).astype(dtype) * 2.0**-bits
    else:
        bits = 24
        uniform = (2 * (low >> 8).astype(jnp.int32) + 1 - 2**bits).astype(dtype)
        uniform = uniform * np.float32(2.0**-bits)
    return jnp.asarray(math.sqrt(2), dtype) * lax.erf_inv(uniform)


@dataclasses.dataclass(frozen=True)
class Counters:
    """Which counters one leaf uses: low word = element, high word = rows · step + row.

    Attributes:
      shape: global shape of the leaf.
      row: first row of this leaf. A leaf of 2³² elements or more has several.
      rows: number of rows of all leaves together.
    """

    shape: tuple[int, ...]
    row: int
    rows: int

    def words(self, step: Any, block: tuple[int, ...], offset: tuple[Any, ...]) -> Any:
        """(low, high) for the block of shape ``block`` that starts at index ``offset``."""
        high = jnp.asarray(step).astype(jnp.uint32) * np.uint32(self.rows) + np.uint32(self.row)
        low = jnp.zeros(block, jnp.uint32)
        stride = 1
        for axis in reversed(range(len(block))):
            index = lax.broadcasted_iota(jnp.uint32, block, axis)
            index = index + jnp.asarray(offset[axis]).astype(jnp.uint32)
            if axis == 0 and _rows_of(self.shape) > 1:
                group = index // np.uint32(_WORD // stride)
                high = high + group
                index = index - group * np.uint32(_WORD // stride)
            low = low + index * np.uint32(stride)
            stride *= self.shape[axis]
        return low, high


def _rows_of(shape: tuple[int, ...]) -> int:
    """Rows of 2³² counters that a leaf of this shape needs: whole slices of its first axis."""
    if math.prod(shape) <= _WORD:
        return 1
    slice_size = math.prod(shape[1:])
    if slice_size > _WORD:
        raise _check.reject(
            "parameter shape", shape, f"one slice of its first axis has {slice_size} elements",
            "Split the parameter: slices of more than 2**32 elements are not supported.",
        )  # fmt: skip
    return -(-shape[0] // (_WORD // slice_size))


def allocate(shapes: tuple[tuple[int, ...], ...], iterations: int) -> tuple[Counters, ...]:
    """Counters for every leaf, refused where ``iterations`` steps would run out of them."""
    sizes = [_rows_of(shape) for shape in shapes]
    rows = max(1, sum(sizes))
    if rows * iterations > _WORD:
        raise _check.reject(
            "iterations", iterations, f"{rows} counter rows times iterations exceeds 2**32",
            "Merge small parameters into fewer arrays.",
        )  # fmt: skip
    starts = np.cumsum([0, *sizes])
    return tuple(Counters(s, int(start), rows) for s, start in zip(shapes, starts, strict=False))
