"""Correlated noise as an optax gradient transformation."""

from __future__ import annotations

from typing import Any

import optax

from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseStream


def add_noise(
    stream: NoiseStream, *, seed: int | None = None, key: Any = None
) -> optax.GradientTransformation:
    """Adds the noise of the step to the *sum* of clipped gradients.

    Put it first, before anything that scales or averages::

        optax.chain(add_noise(stream), optax.scale(1 / batch_size), optax.sgd(0.1))

    The sum is formed in the type of the noise and then cut to the type of the gradient. The state
    is a :class:`NoiseState`, as secret as any, and is consumed by ``update`` outside of jit. As
    :meth:`NoiseStream.init` does, ``init`` refuses to run inside jit without a seed or key.
    Past the last step ``update`` raises, or inside jit gives NaN.
    """

    def init(params: Any) -> NoiseState:
        return stream.init(params, seed=seed, key=key)

    def update(updates: Any, state: NoiseState, params: Any = None) -> tuple[Any, NoiseState]:
        del params
        return stream.release(updates, state)

    return optax.GradientTransformation(init, update)
