"""Correlated noise as an optax gradient transformation."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import optax

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt._runtime._types import PyTree
from mfopt.noise import _keys, ledger
from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseStream

_SOMETIMES = {"conditionally_transform", "maybe_transform", "maybe_update"}


def add_noise(
    stream: NoiseStream, *, seed: int | None = None, key: Array | None = None
) -> optax.GradientTransformation:
    """Adds the noise of the step to the *sum* of clipped gradients.

    Put it first, before anything that scales or averages::

        optax.chain(add_noise(stream), optax.scale(1 / batch_size), optax.sgd(0.1))

    The sum is formed in the type of the noise and then cut to the type of the gradient. The state
    is a :class:`NoiseState`, as secret as any, and is consumed by ``update`` outside of jit. As
    :meth:`NoiseStream.init` does, ``init`` refuses to run inside jit without a seed or key.
    Past the last step ``update`` raises, or inside jit gives NaN. With a ``key`` one ``init`` may
    be made: a second one, of another group of parameters in ``optax.multi_transform`` for example,
    would give it the first one's noise.
    """
    _check.kind(
        "stream", stream, NoiseStream, "mfopt.noise.from_factorization makes that of a file."
    )
    used = False

    def init(params: PyTree) -> NoiseState:
        nonlocal used
        state = stream.init(params, seed=seed, key=key)
        if key is None:
            return state
        if not _keys.tracing():
            if used:
                rule = "was used by an init of this transformation already"
                way_out = "Make one add_noise for each, without a key or with keys of their own."
                raise _check.reject("key", "(not shown)", rule, way_out)
            used = True
        ledger.begin(_keys.from_words(key))
        return dataclasses.replace(state, counted=True)

    def update(
        updates: PyTree, state: NoiseState, params: PyTree = None
    ) -> tuple[PyTree, NoiseState]:
        del params
        if _sometimes_called():
            rule = "lets sums pass without noise where its condition is false"
            way_out = "Put it around what comes after add_noise."
            raise _check.reject("add_noise", "inside conditionally_transform", rule, way_out)
        return stream.release(updates, state)

    return optax.GradientTransformation(init, update)


def _sometimes_called() -> bool:
    """Return True inside optax's wrapper that lets sums pass as they are at times."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if _SOMETIMES & set(frame.f_code.co_qualname.split(".")):
            return str(frame.f_globals.get("__name__")).startswith("optax")
        frame = frame.f_back
    return False
