"""Our matrices as jax_privacy's streaming matrices and privatizers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mfopt import _extras

try:
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import streaming_matrix as streaming
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt.noise import _kernels, _keys
from mfopt.noise.recursions import Rows
from mfopt.noise.stream import NoiseExhaustedError, NoiseStream


def inverse_as_streaming_matrix(stream: NoiseStream) -> streaming.StreamingMatrix:
    """C⁻¹ (without σ or clip norm) as a ``jax_privacy`` ``StreamingMatrix``.

    White noise comes from outside, so past draws cannot be made again: Toeplitz and dense
    strategies store all n of them. A row past n is NaN, where a ``StreamingMatrix`` has no means
    to raise.
    """
    recursion = stream.recursion
    if isinstance(recursion, Rows):
        recursion = dataclasses.replace(recursion, store=True)

    def init(value: Any) -> tuple[jax.Array, Any]:
        shape = _kernels.buffer_shape(recursion, value.shape)
        dtype = jnp.promote_types(value.dtype, stream.buffer_dtype)
        return jnp.int32(0), None if shape is None else jnp.zeros(shape, dtype)

    def multiply_next(value: Any, state: tuple[jax.Array, Any]) -> Any:
        step, buffer = state
        wide = value.astype(jnp.promote_types(value.dtype, stream.dtype))
        covered = jnp.where(step < stream.iterations, 1.0, jnp.nan).astype(wide.dtype)
        noise, buffer = _kernels.advance(
            recursion, recursion.at(step), lambda _: covered * wide, step, buffer, wide.dtype
        )
        return noise, (step + 1, buffer)

    return streaming.StreamingMatrix.from_array_implementation(init, multiply_next)


def privatizer(
    stream: NoiseStream, *, seed: int | None = None, key: Any = None
) -> optax.GradientTransformation:
    """jax_privacy's matrix-factorization privatizer for our C, σ and clip norm.

    jax_privacy draws the white noise, so its numbers are not those of ``stream.next``. Each
    ``init`` takes a new 64-bit key from the operating system, where jax_privacy keeps one key for
    all states of a privatizer, by default one of 2³¹ from numpy's global generator. ``seed`` pins
    it, for experiments; ``key`` is a secret uint32 pair, never used before.

    ``update`` raises :class:`NoiseExhaustedError` past the last step; inside jit the result is
    NaN.
    """
    inner = noise_addition.matrix_factorization_privatizer(
        inverse_as_streaming_matrix(stream),
        stddev=stream.stddev,
        prng_key=0,  # replaced in every state by init
        dtype=stream.dtype,
    )

    def init(params: Any) -> Any:
        words = jnp.asarray(_keys.choose(seed, key))
        _, rest = inner.init(params)
        return jax.random.wrap_key_data(words, impl="threefry2x32"), rest

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        step = jax.tree.leaves(state[1])[0]
        if not isinstance(step, jax.core.Tracer) and int(np.asarray(step)) >= stream.iterations:
            raise NoiseExhaustedError.after(stream.iterations)
        return inner.update(updates, state, params)

    return optax.GradientTransformation(init, update)
