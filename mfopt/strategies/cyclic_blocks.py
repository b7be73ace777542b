"""Nearly b-banded C from cleared buffers, at the memory of a few model copies.

At a large ε the best C is cut at lag b, one epoch: two participations of a unit must not overlap.
A sum of exponentials cannot be cut, and keeping a band costs b - 1 arrays. Here the steps of an
epoch fall into K blocks. Each block has one buffer, which is cleared when the same block begins
again, so that nothing in it grows older than b, and at least b (1 - 1/K) of the past is kept.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from mfopt._runtime import _check
from mfopt._runtime._float64 import compiled, float64
from mfopt.strategies import series
from mfopt.strategies.buffered import Buffered, ages
from mfopt.strategies.fields import Array, parameter


class CyclicBlocks(Buffered):
    """C[t, s] = g·(1[t = s] + Σ_i ω_i λ_i^(t-s-1) + feed[u]·read[v] where v < period), for any n.

    Step s lies u steps behind the beginning of its block, and t lies v behind that same beginning;
    blocks of len(feed) steps fill a period of len(read) steps, the last one as far as it goes.
    The exponentials carry what is near. Noise generation keeps one array a block and one a λ.

    Attributes:
      feed: weight with which a step enters its block's buffer, shape (block,).
      read: weight with which the buffer is read, shape (period,); read[0] is never used.
      scale, decay: ω >= 0 and λ in [0, 1], shape (exponentials,).
      gain: g > 0, shape (): the diagonal of C.
    """

    feed: Array = parameter(dimensions=1)
    read: Array = parameter(dimensions=1)
    scale: Array = parameter(dimensions=1)
    decay: Array = parameter(dimensions=1)
    gain: Array = parameter(dimensions=0, default=1.0)
    kind: ClassVar[str] = "cyclic-blocks"

    @property
    def blocks(self) -> int:
        """Number of blocks K."""
        return -(-len(self.read) // len(self.feed))

    def check_parameters(self) -> None:
        if len(self.feed) > len(self.read):
            raise _check.reject("feed", len(self.feed), "a block is longer than the period")
        super().check_parameters()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "blocks": self.blocks, "period": len(self.read)}

    def column_bands(self, n: int) -> int:
        return self.check_size(n)

    @compiled("n")
    def materialize(self, n: int) -> Array:
        step = jnp.arange(self.check_size(n))
        inside = step % len(self.read) % len(self.feed)
        lag = step[:, None] - step[None, :]
        behind = lag + inside[None, :]
        kept = (lag > 0) & (behind < len(self.read))
        read = jnp.asarray(self.read)[jnp.clip(behind, 0, len(self.read) - 1)]
        blocks = jnp.where(kept, read * jnp.asarray(self.feed)[inside][None, :], 0)
        tail = jnp.concatenate([jnp.ones(1), series.geometric(self.scale, self.decay, n - 1)])
        near = jnp.where(lag >= 0, tail[jnp.clip(lag, 0)], 0)
        return jnp.asarray(self.gain) * (near + blocks)

    @float64
    def tables(self, n: int) -> tuple[Array, Array, Array]:
        """(read, decay, feed) as :class:`Buffered` says: blocks first, exponentials after them."""
        period, length = len(self.read), len(self.feed)
        behind, taken = ages(self.check_size(n), period, length)
        begins = behind == 0
        shape = (n, len(self.scale))
        tables = (
            (jnp.where(begins, 0, jnp.asarray(self.read)[behind]), self.scale),
            (jnp.where(begins, 0.0, 1.0), self.decay),
            (jnp.where(taken, jnp.asarray(self.feed)[behind % length], 0), jnp.ones(shape[1])),
        )
        read, decay, feed = (
            jnp.concatenate([blocks, jnp.broadcast_to(jnp.asarray(each), shape)], axis=1)
            for blocks, each in tables
        )
        return read, decay, feed
