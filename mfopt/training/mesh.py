"""One mesh for any number of devices and processes: axes ``data`` and ``model``.

Units are split over ``data``; parameters (and with them gradients, optimizer state and noise) over
``model`` where the model says how. Results do not depend on the mesh up to the rounding of sums.
Every process builds the same microbatch from the shared store and hands over only the rows of its
own devices, so the hosts need no exchange of data and all devices get equally many units, of
equally many records each.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfopt._runtime import _check

PyTree = Any
DATA, MODEL = "data", "model"


def make_mesh(model_parallel: int = 1) -> Mesh:
    """Mesh of all devices of all processes, (devices / model_parallel) × model_parallel.

    Raises:
        UsageError: ``model_parallel`` does not divide the number of devices.
    """
    model_parallel = _check.integer("model_parallel", model_parallel)
    devices = np.asarray(jax.devices())
    if len(devices) % model_parallel:
        raise _check.reject(
            "model_parallel", model_parallel, f"must divide the number of devices ({len(devices)})"
        )
    return Mesh(devices.reshape(-1, model_parallel), (DATA, MODEL))


def wait_for_lead(what: str) -> None:
    """Barrier of all processes, after which files written by the first are there for all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def data_parallel(mesh: Mesh) -> int:
    """Devices along the data axis: a microbatch must be a multiple of it."""
    return int(mesh.shape[DATA])


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding with the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place_all(mesh: Mesh, tree: PyTree) -> tuple[PyTree, PyTree]:
    """(``tree`` with every leaf laid out over ``mesh``, the shardings): as it is, or replicated."""

    def where(leaf: Any) -> NamedSharding:
        found = getattr(leaf, "sharding", None)
        # a compiled function may hand out an equal layout under another name
        if isinstance(found, NamedSharding) and found.mesh == mesh:
            return NamedSharding(mesh, found.spec)
        return replicated(mesh)

    layout = jax.tree.map(where, tree)
    return place(tree, layout), layout


def shardings(mesh: Mesh, tree: PyTree, partition: PyTree | None) -> PyTree:
    """A ``NamedSharding`` per leaf of ``tree``: replicated, or as ``partition`` says."""
    if partition is None:
        return jax.tree.map(lambda _: replicated(mesh), tree)
    specs = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return jax.tree.map(lambda _, sharding: sharding, tree, specs)


def place(tree: PyTree, sharding: PyTree) -> PyTree:
    """``tree`` on the devices of ``sharding`` (a pytree of shardings); all hosts hold all of it."""

    def put(leaf: Any, where: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == where:
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(put, tree, sharding)


def place_rows(mesh: Mesh, rows: np.ndarray, axis: int = 0) -> jax.Array:
    """A microbatch with its ``axis`` split over the data axis."""
    where = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
    return jax.make_array_from_callback(rows.shape, where, lambda index: rows[index])


def gather(mesh: Mesh, tree: PyTree) -> PyTree:
    """Host copies of arrays whose rows are split over the data axis, on every process."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    copied = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), copied)
