"""One step of a recursion in JAX, for one array. Elementwise along the parameters throughout.

Shapes are static and the step is traced, so one compilation serves all steps. Where the new noise
also updates a buffer, :func:`once` keeps the compiler from making the draw again in every loop
that uses the noise, which would also keep it from updating the buffer in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Array, Step
from mfopt._runtime._types import T
from mfopt.noise.recursions import Modal, Recursion, Ring, Rows

Buffer: TypeAlias = jax.Array | None  # what a recursion keeps, of every slot
Draw = Callable[[Step], jax.Array]  # step -> white noise

_UNROLL = 16  # buffers summed in one fused loop: hardware reads ahead in few streams at a time
_WIDE = {"xla_cpu_prefer_vector_width": 512}
_TOGETHER = 4  # past draws summed in one fused loop


@functools.cache
def host_options() -> dict[str, int]:
    """Options that compile a step for the CPU with vectors as wide as it has.

    XLA stops at 256 bits. Draws are arithmetic and nothing else: with 512 they take two thirds of
    the time. Numbers are the same but for rounding. Nothing where this XLA has no such option.
    """
    return _WIDE if _quick.are_known(_WIDE) else {}


def advance(
    recursion: Recursion,
    coefficients: tuple[Array, ...],
    draw: Draw,
    step: Step,
    buffer: Buffer,
    dtype: np.dtype,
) -> tuple[jax.Array, Buffer]:
    """(noise of step, new buffer), from the ``coefficients`` of ``recursion.coefficients(step)``.

    ``draw`` gives white noise of any step <= ``step``, of the type ``dtype`` in which the noise is
    computed; ``buffer`` is of shape (slots, *that of a draw), or None without slots.
    """
    if isinstance(recursion, Ring):
        return _ring(recursion, coefficients[0], draw, step, buffer, dtype)
    if isinstance(recursion, Modal):
        return _modal(coefficients, draw, step, buffer, dtype)
    if not isinstance(recursion, Rows):
        raise TypeError(type(recursion))
    return _redrawn_rows(recursion, coefficients[0], draw, step, dtype), None


def _ring(
    recursion: Ring, row: Array, draw: Draw, step: Step, buffer: Buffer, dtype: np.dtype
) -> tuple[jax.Array, Buffer]:
    row = jnp.asarray(row, dtype)
    if buffer is None:
        return row[0] * draw(step), None
    if recursion.feedback:
        noise = once(lambda: row[0] * draw(step) + ring_sum(row, buffer, step), step)
        return noise, _replaced(buffer, noise, step)

    def both() -> tuple[jax.Array, jax.Array]:
        # what is kept is what is used now: a narrow buffer rounds the draw itself
        kept = once(lambda: draw(step).astype(buffer.dtype), step)
        return row[0] * kept.astype(dtype) + ring_sum(row, buffer, step), kept

    # together: the buffer is read before a slot of it is replaced, and need not be copied
    noise, kept = once(both, step)
    return noise, _replaced(buffer, kept, step)


def ring_sum(row: Array, buffer: jax.Array, step: Step) -> jax.Array:
    """Σ_{k>=1} row[k] x_{step-k}, of the outputs or draws x in a ring's buffer."""
    slots = buffer.shape[0]
    lag = 1 + (step - 1 - jnp.arange(slots)) % slots  # of what each slot holds
    return weighted_sum(row[lag], buffer, step)


def _replaced(buffer: jax.Array, value: jax.Array, step: Step) -> jax.Array:
    """The buffer with its oldest value replaced by that of this step."""
    slot = step % buffer.shape[0]
    return lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), slot, 0)


def _modal(
    coefficients: tuple[Array, ...],
    draw: Draw,
    step: Step,
    buffer: Buffer,
    dtype: np.dtype,
) -> tuple[jax.Array, Buffer]:
    gain, read, decay, feed = (jnp.asarray(c, dtype) for c in coefficients)
    if buffer is None:
        return gain * draw(step), None
    noise = once(lambda: gain * draw(step) - weighted_sum(read, buffer), step)
    # Fed by draws instead (BLT.inverse), buffers and noise could be one pass, of 40 bytes and not
    # 56. XLA on CPU makes two of it all the same, and was slower in every form that was tried.
    column = (-1,) + (1,) * noise.ndim
    kept = decay.reshape(column) * buffer.astype(dtype) + feed.reshape(column) * noise
    return noise, kept.astype(buffer.dtype)


def _redrawn_rows(
    recursion: Rows, weights: Array, draw: Draw, step: Step, dtype: np.dtype
) -> jax.Array:
    """By blocks of lags, then one at a time: a draw costs as much as a pass over ten buffers."""
    weights = jnp.asarray(weights, dtype)
    end = 1 + jnp.minimum(step, recursion.window - 1)
    blocks = (end - 1) // _TOGETHER

    def add(lag: Step, total: jax.Array) -> jax.Array:
        return total + weights[lag] * draw(step - lag)

    def add_block(index: Step, total: jax.Array) -> jax.Array:
        for k in range(_TOGETHER):
            total = add(1 + index * _TOGETHER + k, total)
        return total

    total = lax.fori_loop(0, blocks, add_block, weights[0] * draw(step))
    return lax.fori_loop(1 + blocks * _TOGETHER, end, add, total)


def once(compute: Callable[[], T], step: Step) -> T:
    """``compute()``, as arrays in memory that their users read and do not compute again.

    XLA on CPU drops optimization barriers before it fuses loops; what it cannot fuse into is a
    branch. Elsewhere a branch would make the host wait for its condition, and barriers last.
    """

    def branch() -> T:
        shapes = jax.eval_shape(compute)
        never = jax.tree.map(lambda array: jnp.full(array.shape, jnp.nan, array.dtype), shapes)
        return lax.cond(step >= 0, compute, lambda: never)

    def barrier() -> T:
        return lax.optimization_barrier(compute())

    return lax.platform_dependent(cpu=branch, default=barrier)


def weighted_sum(weights: Array, buffer: jax.Array, filled: Step | None = None) -> jax.Array:
    """Σ_k weights[k] buffer[k] without a temporary array of the size of ``buffer``.

    ``filled``: slots from this one on are 0, and need not be read; None where all may have values.
    """
    slots = buffer.shape[0]
    blocks = slots // _UNROLL if slots > _UNROLL else 0
    looped = blocks * _UNROLL

    def add(start: Step, count: int, total: jax.Array) -> jax.Array:
        for k in range(count):
            value = lax.dynamic_index_in_dim(buffer, start + k, 0, keepdims=False)
            total = total + weights[start + k] * value.astype(weights.dtype)
        return total

    total = jnp.zeros(buffer.shape[1:], weights.dtype)
    if looped:
        end = blocks if filled is None else jnp.minimum(blocks, -(-filled // _UNROLL))
        total = lax.fori_loop(0, end, lambda i, part: add(i * _UNROLL, _UNROLL, part), total)
    return add(looped, slots - looped, total)
