"""Samples over processes: each draws its share of the chunks, and all get all results."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import numpy as np

from mfopt._runtime._types import PyTree
from mfopt.errors import FailureError

_shared: ContextVar[bool] = ContextVar("shared", default=False)


@contextlib.contextmanager
def over_processes() -> Iterator[None]:
    """Draw the samples needed in this block by all processes together.

    Their number and addresses are those of ``jax.distributed.initialize``; each must have equally
    many devices and run the block alike, for they wait for one another. All get the same answer,
    which is that of one process with the same seed, to the last bit. Without a pinned seed they
    take the entropy of process 0. On one process nothing is different. A search is not divided:
    each process would make the same one.

    Raises:
      FailureError: at the first bound or estimate that processes were not asked for alike.
    """
    token = _shared.set(True)
    try:
        yield
    finally:
        _shared.reset(token)


def count() -> int:
    """Processes that samples are drawn by."""
    return jax.process_count() if _shared.get() else 1


def share(chunks: int) -> tuple[int, int]:
    """(first, end) of this process's chunks; all shares but the last ones are equally long."""
    if count() == 1:
        return 0, chunks
    per_process, index = -(-chunks // count()), jax.process_index()
    return min(index * per_process, chunks), min((index + 1) * per_process, chunks)


def joined(results: PyTree, chunks: int, question: PyTree) -> PyTree:
    """Results of all chunks, in order, from each process's own, chunks along the first axis.

    ``question`` is a pytree that must be the same for all processes.
    """
    if count() == 1:
        return results
    from jax.experimental import multihost_utils  # which one process can spare

    per_process = -(-chunks // count())

    def filled(leaf: np.ndarray) -> np.ndarray:
        return np.pad(leaf, [(0, per_process - len(leaf))] + [(0, 0)] * (leaf.ndim - 1))

    digests = multihost_utils.process_allgather(
        _digest(question)
    )  # of one shape, whatever was asked
    if not np.array_equal(digests, np.broadcast_to(digests[0], digests.shape)):
        raise FailureError(
            "the processes were asked for different things; start all of them with the same "
            "program, files, seed and versions, on machines of one kind"
        )
    gathered = multihost_utils.process_allgather(jax.tree.map(filled, results))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:chunks], gathered)


def agreed(entropy: np.ndarray) -> np.ndarray:
    """Entropy of process 0, on every process."""
    if count() == 1:
        return entropy
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(entropy))


def _digest(question: PyTree) -> np.ndarray:
    leaves, structure = jax.tree.flatten(question)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        array = np.asarray(leaf)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return np.frombuffer(digest.digest(), np.uint32)
