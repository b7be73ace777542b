"""Shared implementation of strategies whose noise is streamed from a few decaying buffers."""

from __future__ import annotations

import abc

import jax
import jax.numpy as jnp

from mfopt._runtime._float64 import compiled
from mfopt.sampling import BallsInBins
from mfopt.strategies.blt import Exponentials
from mfopt.strategies.fields import Array


class Buffered(Exponentials):
    """C of buffers whose weights depend on the step, g > 0 on the diagonal."""

    @abc.abstractmethod
    def tables(self, n: int) -> tuple[Array, Array, Array]:
        """(read, decay, feed) of every buffer at every step, each of shape (n, buffers).

        With s the buffers and w the outputs, C w = z is w_t = z_t/g - read_t·s_t and
        s_{t+1} = decay_t s_t + feed_t w_t.
        """

    @compiled()
    def multiply(self, x: Array) -> Array:
        x = jnp.asarray(x)
        return jnp.asarray(self.gain) * self._stream(x, forward=True)

    @compiled()
    def solve(self, y: Array) -> Array:
        return self._stream(jnp.asarray(y) / jnp.asarray(self.gain), forward=False)

    @compiled()
    def solve_transposed(self, y: Array) -> Array:
        # the transposed recursion runs back in time, and reads where the other feeds
        y = jnp.asarray(y) / jnp.asarray(self.gain)
        read, decay, feed = (jnp.asarray(table)[::-1] for table in self.tables(y.shape[0]))
        return _run((feed, decay, read), y[::-1], forward=False)[::-1]

    @compiled("scheme")
    def modes(self, scheme: BallsInBins) -> Array:
        return self.weighted_modes(jnp.ones(scheme.iterations), scheme)

    @compiled("scheme")
    def weighted_modes(self, columns: Array, scheme: BallsInBins) -> Array:
        """Weighted modes in O(n · bins · buffers): C times the indicator columns of each bin,
        streamed."""
        comb = jnp.arange(scheme.iterations)[:, None] % scheme.bins == jnp.arange(scheme.bins)
        return self.multiply(jnp.asarray(columns)[:, None] * comb)

    def _stream(self, x: jax.Array, *, forward: bool) -> jax.Array:
        """C/g times ``x``, or its inverse, step by step; shape (n, ...)."""
        tables = tuple(jnp.asarray(table) for table in self.tables(x.shape[0]))
        return _run(tables, x, forward=forward)


def _run(tables: tuple[jax.Array, ...], x: jax.Array, *, forward: bool) -> jax.Array:
    """The recursion of :meth:`Buffered.tables` without its gain, or its inverse; shape (n, ...)."""
    flat = x.reshape(x.shape[0], -1)

    def step(state: jax.Array, tables: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        read, decay, feed, entering = tables
        past = read @ state
        value = entering + past if forward else entering - past
        kept = entering if forward else value  # the buffers hold what C is applied to
        return decay[:, None] * state + feed[:, None] * kept[None, :], value

    empty = jnp.zeros((tables[0].shape[1], flat.shape[1]), flat.dtype)
    result: jax.Array = jax.lax.scan(step, empty, (*tables, flat))[1]
    return result.reshape(x.shape)
