"""Secret keys: from the operating system unless a seed is pinned.

Whoever knows the key can compute the noise and subtract it, so the key protects the data as much
as the noise does.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from mfopt import _check
from mfopt.noise import _draws

# A pinned seed is not used as the key itself: jax.random.key(seed), which a program may use for
# its initial parameters, draws from the same generator and would give correlated numbers.
_DOMAIN = (np.uint32(0x6D666F70), np.uint32(0x74207A30))


def choose(seed: Any, key: Any) -> np.ndarray:
    """The key of a pinned ``seed``, a ``key`` that the caller keeps, or a new one.

    A new key is refused inside jit, where it would become a constant of the compiled function:
    every call of that function would draw the same noise.
    """
    if seed is not None and key is not None:
        raise _check.reject("seed", seed, "give a seed or a key, not both")
    if seed is not None:
        return pinned(seed)
    if key is not None:
        return given(key)
    if tracing():
        raise _check.reject(
            "seed", None, "init inside jit would compile one key into the function",
            "Call init outside of jit, where each call draws a new key.",
        )  # fmt: skip
    return fresh()


def tracing() -> bool:
    """Whether the caller is being traced by jit, scan, grad or vmap."""
    return isinstance(jax.lax.add(np.float32(0), np.float32(0)), jax.core.Tracer)


def fresh() -> np.ndarray:
    """A new 64-bit key from the operating system, shape (2,) uint32; the same on all processes.

    With several JAX processes, every process must call this, and the key of process 0 is sent to
    all: they make parts of the same noise.
    """
    words = np.frombuffer(os.urandom(8), np.uint32).copy()
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint32)
    return words


def pinned(seed: Any) -> np.ndarray:
    """The key of a public seed in [0, 2**64), for experiments and tests only."""
    seed = _check.integer("seed", seed, at_least=0)
    if seed >= 2**64:
        raise _check.reject("seed", seed, "must be less than 2**64")
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
    with np.errstate(over="ignore"):
        return np.array(_draws.threefry(words, *_DOMAIN), np.uint32)


def given(key: Any) -> np.ndarray:
    """A secret key that the caller keeps, as two uint32 words."""
    words = np.asarray(key)
    if words.shape != (2,) or words.dtype != np.uint32:
        # the value stays out of the message: it is a secret
        raise _check.reject(
            "key", f"{words.dtype}{words.shape}", "must be a uint32 array of shape (2,)"
        )
    return words.copy()
