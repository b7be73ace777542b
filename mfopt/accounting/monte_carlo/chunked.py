"""Sums over many Monte Carlo samples in bounded memory, over local devices and processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _float64, _quick
from mfopt._runtime._types import PyTree, T
from mfopt.accounting.monte_carlo import processes, sharding
from mfopt.progress import Progress, Report

MEMORY_BUDGET = 2**28  # bytes of live sample arrays, over all local devices
_LIVE_ARRAYS = 8  # float64 arrays of shape (chunk, bins) alive at once in the kernels
_LARGEST = 4096  # samples in a chunk
_CALL = 64  # chunks per device in one call: how often progress is shown

_listener: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def counting(
    progress: Report, stage: str, total: int | None = None, note: str = ""
) -> Iterator[None]:
    """Report the number of samples evaluated, call by call, while the block lasts.

    By context and not by argument: whoever wants to know is far above whoever draws, and a sampled
    loss of a third party is between the two.

    Args:
      progress: callback.
      stage, total, note: of its reports. Whole chunks are drawn: of more samples than ``total``
        nothing is told.
    """
    examined = 0

    def tell(count: int) -> None:
        nonlocal examined
        examined += count
        shown = examined if total is None else min(examined, total)
        progress(Progress(stage, shown, total, "samples", note=note))

    tell(0)
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def _looked_at(samples: int) -> None:
    """Report ``samples`` evaluated samples to the listener of :func:`counting`, if any."""
    if (listener := _listener.get()) is not None:
        listener(samples)


def chunk_size(bins: int) -> int:
    """Samples per chunk, by the numbers that one takes alone.

    So results do not depend on the machine, and pilots and tests of any size share one program.
    """
    fitting = MEMORY_BUDGET // 16 // (8 * _LIVE_ARRAYS * bins)
    return int(max(64, min(fitting, _LARGEST)))


def total(
    kernel: Callable[..., T], key: jax.Array, samples: int, bins: int, *args: PyTree
) -> tuple[T, int]:
    """Sum of ``kernel(key_i, size, *args)`` over chunks i, and the number of samples used.

    Chunk i draws from ``fold_in(key, i)`` and has the same size on every machine; the chunk
    results are added on the host in order, so the figure is the same for any number of devices, and
    of processes inside :func:`~mfopt.accounting.monte_carlo.processes.over_processes`. At least
    ``samples`` samples are used: a part chunk is made whole.

    Args:
      kernel: a function that can be hashed: it is static in compiled code.
      key, samples: randomness, and at least how many.
      bins: numbers that one sample takes, which chunks are made by.
      args: further arguments of the kernel, pytrees of arrays.
    """
    size = chunk_size(bins)
    chunks = -(-samples // size)
    devices = _float64.devices()
    per_call = _CALL * len(devices)
    results = []
    begin, end = processes.share(chunks)
    for start in range(begin, max(end, begin + 1), per_call):  # without chunks, for the shapes
        count = min(per_call, end - start)
        per_device = -(-count // len(devices))
        part = _run(kernel, size, devices, key, (start, per_device), args)
        # device d holds its chunks at d·_CALL ..; the rest of its block is unused
        kept = np.concatenate([d * _CALL + np.arange(per_device) for d in range(len(devices))])
        results.append(jax.tree.map(lambda x, k=kept[:count]: np.asarray(x)[k], part))
        _looked_at(count * size)
    own_sums = jax.tree.map(lambda *leaves: np.concatenate(leaves), *results)
    all_sums = processes.joined(own_sums, chunks, (jax.random.key_data(key), samples, args))
    _looked_at((chunks - (end - begin)) * size)
    return jax.tree.map(lambda leaf: leaf.sum(axis=0), all_sums), chunks * size


@functools.partial(_quick.jit, static_argnums=(0, 1, 2))
def _run(
    kernel: Callable[..., PyTree],
    size: int,
    devices: _float64.Devices,
    key: jax.Array,
    numbers: tuple[jax.Array, jax.Array],
    args: tuple[PyTree, ...],
) -> PyTree:
    """Chunks ``start`` .. of every device, ``count`` each: one compilation for any count.

    ``numbers``: (start, count).
    """
    start, count = numbers
    traced = jax.jit(kernel, static_argnums=1)  # once, for its shapes and in the loop

    def block(begin: jax.Array) -> PyTree:
        def add_chunk(i: jax.Array, results: PyTree) -> PyTree:
            value = traced(jax.random.fold_in(key, begin[0] + i), size, *args)
            return jax.tree.map(lambda all_, new: all_.at[i].set(new), results, value)

        shapes = traced.eval_shape(key, size, *args)
        empty = jax.tree.map(lambda leaf: jnp.zeros((_CALL, *leaf.shape), leaf.dtype), shapes)
        return jax.lax.fori_loop(0, count, add_chunk, empty)

    firsts = start + count * jnp.arange(len(devices))
    return sharding.mapped(block, devices)(firsts)


def seed_key(seed: int | None) -> jax.Array:
    """A random key: from the operating system's entropy, or from a pinned ``seed``."""
    if seed is not None:
        seed = _check.seed("seed", seed)
    entropy = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    if seed is None:
        entropy = processes.agreed(entropy)
    return jax.random.wrap_key_data(jax.device_put(entropy), impl="threefry2x32")


def subkey(key: jax.Array, *path: int) -> jax.Array:
    """A key of its own for each ``path``."""
    for part in path:
        key = _folded(key, part)
    return key


_folded = _quick.jit(jax.random.fold_in)  # one program for paths of any length
