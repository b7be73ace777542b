"""Strategy matrices as jax_privacy's streaming matrices.

For training, :func:`mfopt.noise.for_optax.add_noise` goes where a privatizer of jax_privacy goes:
an optax transformation of sums of clipped gradients, with draws of 64 bits. jax_privacy's own take
``jax.random.normal``, whose float32 draws keep 23 bits and end at |z| = 5.4: a unit that is spread
over P parameters moves some of them further with probability near P · steps · 6e-8, and is found.
That exceeds δ = 1e-5 from a few hundred draws on: there is no size at which they could be offered.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mfopt._runtime import _check, _extras
from mfopt.noise import _kernels
from mfopt.noise.recursions import Rows
from mfopt.noise.stream import NoiseStream

with _extras.required():
    from jax_privacy.matrix_factorization import streaming_matrix as streaming


def inverse_as_streaming_matrix(stream: NoiseStream) -> streaming.StreamingMatrix:
    """C⁻¹ (without σ or clip norm) as a ``jax_privacy`` ``StreamingMatrix``.

    White noise comes from outside, so past draws cannot be regenerated: Toeplitz and dense
    strategies store all n of them. A row past n is NaN, where a ``StreamingMatrix`` has no means
    to raise.
    """
    if stream.secure:
        raise _check.reject("stream", "secure", "its draws are no part of a streaming matrix")
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
