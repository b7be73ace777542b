"""Secret keys: from the operating system unless a seed is pinned.

Whoever knows the key can compute the noise and subtract it, so the key protects the data as much
as the noise does.
"""

from __future__ import annotations

import hashlib
import os

import jax
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array
from mfopt.noise._draws import KEY_WORDS


def choose(seed: object, key: Array | None) -> np.ndarray:
    """The key of a pinned ``seed``, a ``key`` that the caller keeps, or a new one.

    Uint32 (8,). A new one, from the operating system, must be made by all JAX processes at once:
    they make parts of the same noise, and get the key of process 0. It is refused inside jit, where
    it would become a constant of the compiled function: every call would draw the same noise.
    """
    if seed is not None or key is not None:
        return on_host(seed, key)
    if tracing():
        rule = "init inside jit would compile one key into the function"
        way_out = "Call init outside of jit, where each call draws a new key."
        raise _check.reject("seed", None, rule, way_out)
    words = on_host(None, None)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        words = np.asarray(multihost_utils.broadcast_one_to_all(words), np.uint32)
    return words


def on_host(seed: object, key: Array | None) -> np.ndarray:
    """:func:`choose` for programs without JAX: no backend is started, no process asked."""
    if seed is not None and key is not None:
        raise _check.reject("seed", seed, "give a seed or a key, not both")
    if seed is not None:
        return pinned(seed)
    return _from_bytes(os.urandom(4 * KEY_WORDS)) if key is None else from_words(key)


def tracing() -> bool:
    """Return True inside jit, scan, grad or vmap."""
    return isinstance(jax.lax.add(np.float32(0), np.float32(0)), jax.core.Tracer)


def pinned(seed: object) -> np.ndarray:
    """The key of a public seed in [0, 2**64), for experiments and tests only."""
    seed = _check.pinned("seed", seed)
    return _from_bytes(hashlib.sha256(f"mfopt pinned noise {seed}".encode()).digest())


def from_words(key: object) -> np.ndarray:
    """A secret key that the caller keeps, as eight uint32 words."""
    words = np.asarray(key)
    if words.shape != (KEY_WORDS,) or words.dtype != np.uint32:
        # the value stays out of the message: it is a secret
        rule = f"must be a uint32 array of shape ({KEY_WORDS},)"
        way_out = "Take 32 bytes of secrets.token_bytes(32) "
        way_out += "as numpy.frombuffer(them, numpy.uint32)."
        raise _check.reject("key", f"{words.dtype}{words.shape}", rule, way_out)
    return words.copy()


def _from_bytes(secret: bytes) -> np.ndarray:
    """32 secret bytes as a key; the same words on machines of either byte order."""
    return np.frombuffer(secret, "<u4").astype(np.uint32)
