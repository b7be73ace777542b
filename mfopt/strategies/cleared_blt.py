"""BLT with cleared buffers: a banded sum of exponentials in a few arrays.

Under fresh bins C may have at most as many bands as an epoch has steps, and keeping a band costs
bands - 1 arrays. A sum of exponentials costs one array each, but never ends. Here the steps fall
into blocks, each with a buffer of its own that is cleared when the block begins again: nothing is
older than a period, and most of a period is always kept. An exponential that decays fast needs a
short period only, and few blocks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._float64 import compiled
from mfopt._runtime._types import JsonObject
from mfopt.strategies.buffered import Buffered
from mfopt.strategies.fields import Array, parameter, setting


def _counts(name: str, value: object) -> tuple[int, ...]:
    """Whole numbers >= 1, one for each exponential."""
    if not isinstance(value, list | tuple) or not value:
        raise _check.reject(name, value, "must be a list of whole numbers")
    return tuple(_check.integer(name, count) for count in value)


class ClearedBLT(Buffered):
    """C[t, s] = g·(1[t = s] + Σ_i ω_i λ_i^(t-s-1) where s < t < end_i(s)), for any n.

    Exponential i has K_i blocks in a period of p_i steps, the last as long as it goes; end_i(s) is
    the step at which the block of s begins again. So it reaches back p_i - 1 steps at most, and
    at least p_i less the length of a block. Noise generation keeps one array a block.

    Attributes:
      scale: ω >= 0, shape (exponentials,).
      decay: λ in [0, 1], shape (exponentials,).
      gain: g > 0, shape (): the diagonal of C.
      periods: p, one for each exponential.
      blocks: K, one for each exponential.
    """

    scale: Array = parameter(dimensions=1)
    decay: Array = parameter(dimensions=1)
    periods: tuple[int, ...] = setting(check=_counts)
    blocks: tuple[int, ...] = setting(check=_counts)
    gain: Array = parameter(dimensions=0, default=1.0)
    kind = "cleared-blt"
    described = ("buffers",)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps of a block, by exponential."""
        return tuple(-(-p // k) for p, k in zip(self.periods, self.blocks, strict=True))

    @property
    def buffers(self) -> int:
        """Arrays that streaming its noise keeps."""
        return sum(-(-p // size) for p, size in zip(self.periods, self.lengths, strict=True))

    def check_parameters(self) -> None:
        shapes = *self.scale.shape, *self.decay.shape, len(self.periods), len(self.blocks)
        if len(set(shapes)) > 1:
            raise _check.reject(
                "scale, decay, periods, blocks", shapes, "must be equally long, one an exponential"
            )
        for period, blocks in zip(self.periods, self.blocks, strict=True):
            if blocks > period:
                raise _check.reject("blocks", blocks, f"must be at most its period, {period}")

    def describe(self) -> JsonObject:
        lists = {"periods": list(self.periods), "blocks": list(self.blocks)}
        return {**super().describe(), **lists}

    def column_bands(self, n: int) -> int:
        return min(max(self.periods), self.check_size(n))

    def most_bands(self, n: int) -> int:
        return self.column_bands(n)

    @compiled("n", "bands")
    def banded_columns(self, n: int, bands: int) -> Array:
        lag, column = np.arange(bands)[:, None], np.arange(self.check_size(n))[None, :]
        total = jnp.where(lag == 0, 1.0, jnp.zeros((bands, n)))
        for i, (period, length) in enumerate(zip(self.periods, self.lengths, strict=True)):
            kept = (lag > 0) & (lag < period - column % period % length)
            powers = jnp.asarray(self.decay)[i] ** jnp.maximum(jnp.arange(bands) - 1, 0)
            total += jnp.where(kept, jnp.asarray(self.scale)[i] * powers[:, None], 0)
        return jnp.asarray(self.gain) * jnp.where(lag + column < n, total, 0)

    @compiled("n")
    def materialize(self, n: int) -> Array:
        return self._of_diagonals(self.banded_columns(n, self.column_bands(n)))

    def tables(self, n: int) -> tuple[Array, Array, Array]:
        parts: list[tuple[jax.Array, ...]] = []
        for i, (period, length) in enumerate(zip(self.periods, self.lengths, strict=True)):
            age, indicator = _ages(self.check_size(n), period, length)
            weights = jnp.asarray(self.scale)[i], jnp.asarray(self.decay)[i]
            read, decay = (jnp.where(age == 0, 0, weight) for weight in weights)
            parts.append((read, decay, jnp.asarray(indicator, float)))
        read, decay, feed = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        return read, decay, feed


def _ages(n: int, period: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps since each block of a period last began, and whether it takes steps in; (n, blocks).

    Args:
      n: steps.
      period: steps after which a block begins again.
      length: steps of a block; the last one has what is left of the period.
    """
    begins = np.arange(0, period, length)
    age = (np.arange(n)[:, None] - begins[None, :]) % period
    return age, age < np.minimum(length, period - begins)[None, :]
