"""Uses of a JAX state, counted by the ledger of its key also inside of compiled programs.

A value can be copied, and a compiled step called twice with it. So each step hands a digest of its
sum to the host, which answers whether the key may make this step's noise for that sum; if not, the
noise is NaN. To raise there would end a program on several devices by a deadlock.
"""

from __future__ import annotations

import logging
import secrets

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array, Step
from mfopt.noise import ledger

WORDS = 6  # of a use: a digest of the sum, and one of what its gradients depend on
_ODD = np.uint32(0x9E3779B9)


@jax.jit
def fingerprint(leaves: list[Array]) -> jax.Array:
    """A digest of the bits of arrays of numbers, as floating point: uint32 (3,), first word 1.

    It tells mistakes, not forgery: sums over all bits, weighted by their places, modulo 2³².
    """
    zero, totals = np.uint32(0), [np.uint32(0)] * 2
    for number, leaf in enumerate(leaves):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(wide), jnp.uint32)
        weights, stride = jnp.full(bits.shape, number, jnp.uint32) * _ODD, 1
        for axis in reversed(range(bits.ndim)):
            weights += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * np.uint32(stride)
            stride = stride * bits.shape[axis] % 2**32
        weighted = bits * (2 * weights + 1)
        # both sums in one reduction, a tenth of the time of two
        of_leaf = jax.lax.reduce(
            (weighted, (weighted >> 15) ^ bits),
            (zero, zero),
            lambda sums, terms: (sums[0] + terms[0], sums[1] + terms[1]),
            range(bits.ndim),
        )
        totals = [total + part for total, part in zip(totals, of_leaf, strict=True)]
    return jnp.stack([np.uint32(1), *totals])


def on_host(key: Array) -> np.ndarray:
    """The words of a key, of a copy: a view would keep a step from reusing the memory."""
    if isinstance(key, jax.Array) and not key.is_fully_addressable:
        key = key.addressable_data(0)  # all processes have the same
    return np.asarray(jnp.array(key, copy=True))


def record(key: np.ndarray, step: int, digest: np.ndarray) -> None:
    """Note a use of ``key`` in its ledger; raises :class:`UsageError` for a second, other one.

    Args:
      key: uint32 (8,).
      step: whose noise is made.
      digest: :func:`fingerprint` of the sum that it is for, and of the arrays that its gradients
        depend on; zeros where one is not known. A sum that is not known equals no other.
    """
    with ledger.LOCK:
        kept = ledger.resume(key)
        if digest[3]:
            kept.hold(digest[3:].tobytes().hex())
        words = digest[:3].astype("<u4").tobytes() if digest[0] else secrets.token_bytes(16)
        kept.release(step, words)


@custom_vmap
def permitted(key: Array, step: Step, digest: Array) -> jax.Array:
    """Answer of :func:`record` to a use, a bool of no dimension, from the host at each run."""
    answer = jax.ShapeDtypeStruct((), np.bool_)
    # as one array: the host takes each argument at a cost of its own
    use = jnp.concatenate([key, jnp.asarray(step, jnp.uint32)[None], digest])
    return jax.pure_callback(_answers, answer, use, vmap_method="expand_dims")


@permitted.def_vmap
def _(
    size: int, batched: list[bool], key: Array, step: Step, digest: Array
) -> tuple[jax.Array, bool]:
    if batched[2] and not batched[0]:
        rule = f"is one for {size} sums under vmap, which would all have the same noise"
        way_out = "Map over states too, each of its own init; or release one sum."
        raise _check.reject("state", "not mapped", rule, way_out)
    axes = [0 if mapped else None for mapped in batched]
    return jax.vmap(permitted.fun, axes)(key, step, digest), True


def _answers(uses: Array) -> np.ndarray:
    """Answers for uses in any number of leading axes; called from a compiled program."""
    words = np.asarray(uses)
    answers = np.zeros(words.shape[:-1], np.bool_)
    for index in np.ndindex(answers.shape):
        key, step, digest = np.split(words[index], (8, 9))
        try:
            record(key, int(step[0]), digest)
            answers[index] = True
        except _check.UsageError as error:
            logging.getLogger("mfopt").error("the noise of this step is NaN: %s", error)
    return answers
