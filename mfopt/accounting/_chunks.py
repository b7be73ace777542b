"""Sums over many Monte Carlo samples in bounded memory, spread over the local devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MEMORY_BUDGET = 2**28  # bytes of live sample arrays, over all local devices
_LIVE_ARRAYS = 6  # float64 arrays of shape (chunk, bins) alive at once in the kernels
_CALL = 64  # chunks per device in one compiled call


def chunk_size(samples: int, bins: int) -> int:
    """Samples per chunk: fixed by the problem alone, so results do not depend on the machine."""
    fitting = MEMORY_BUDGET // 16 // (8 * _LIVE_ARRAYS * bins)
    return int(min(samples, max(64, fitting)))


def total(
    kernel: Callable[..., Any],
    key: jax.Array,
    samples: int,
    bins: int,
    *args: Any,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Any, int]:
    """Sum of ``kernel(key_i, size, *args)`` over chunks i, and the number of samples used.

    Chunk i draws from ``fold_in(key, i)`` and has the same size on every machine; the chunk
    results are added on the host in order, so the figure is the same for any number of devices.
    At least ``samples`` samples are used: a part chunk is made whole.
    """
    size = chunk_size(samples, bins)
    chunks = -(-samples // size)
    devices = jax.local_devices()
    per_call = min(_CALL, -(-chunks // len(devices))) * len(devices)
    results = []
    for start in range(0, chunks, per_call):
        ids = jnp.arange(start, start + per_call)
        part = _run(kernel, size, tuple(devices), key, ids, args)
        used = min(per_call, chunks - start)
        results.append(jax.tree.map(lambda leaf, used=used: np.asarray(leaf)[:used], part))
        if progress is not None:
            progress(min(start + per_call, chunks) * size, chunks * size)
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves).sum(axis=0), *results)
    return joined, chunks * size


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    kernel: Callable[..., Any],
    size: int,
    devices: tuple[Any, ...],
    key: jax.Array,
    ids: jax.Array,
    args: tuple[Any, ...],
) -> Any:
    def one(index: jax.Array) -> Any:
        return kernel(jax.random.fold_in(key, index), size, *args)

    if len(devices) == 1:
        return jax.lax.map(one, ids)
    mesh = Mesh(np.array(devices), ("samples",))
    split = PartitionSpec("samples")
    sharded = jax.lax.with_sharding_constraint(ids, NamedSharding(mesh, split))
    mapped = jax.shard_map(
        lambda block: jax.lax.map(one, block), mesh=mesh, in_specs=split, out_specs=split
    )
    return mapped(sharded)


def seed_key(seed: int | None) -> jax.Array:
    """A random key: from the operating system's entropy, or from a pinned ``seed``."""
    entropy = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(entropy), impl="threefry2x32")
