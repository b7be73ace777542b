"""One mesh, of one axis, for any number of devices and processes.

Units are split over the devices. Of everything else (parameters, frozen arrays, sums of gradients,
optimizer state, noise) a device holds its share (:func:`spread`); a step gathers the parameters.
Up to the rounding of sums results do not depend on the mesh. Every process builds the same
microbatch and hands over the rows of its own devices: hosts exchange no data, and all devices get
equally many units, of equally many records each.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from mfopt._runtime import _check, _float64
from mfopt.training.models import PyTree

DATA = "data"  # name of the axis


def devices() -> list[jax.Device]:
    """Devices to train on: JAX's ``jax_default_device`` if it is set, else all of all processes."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined] # not in its stubs
    if chosen is None:
        return jax.devices()
    if jax.process_count() > 1:
        rule = f"is one device, and {jax.process_count()} processes train together on all of theirs"
        raise _check.reject("jax_default_device", str(chosen), rule, "Leave it unset.")
    return [*_float64.devices()]


def on_cpu() -> bool:
    """True if training is on CPUs."""
    return devices()[0].platform == "cpu"


def make_mesh() -> Mesh:
    """Mesh of the :func:`devices`."""
    return Mesh(np.asarray(devices()), (DATA,))


def one_device() -> Mesh:
    """Mesh of one device of this process."""
    return Mesh(np.asarray(_float64.devices()[:1]), (DATA,))


def is_lead() -> bool:
    """True on the first process, which alone writes files."""
    return jax.process_index() == 0


def wait_for_lead(event: str) -> None:
    """Barrier of all processes, after which files written by the first are there for all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(event)


def check_microbatch(mesh: Mesh, microbatch: int) -> None:
    """Refuse a microbatch that the devices cannot share evenly."""
    if microbatch % mesh.size:
        rule = f"must be a multiple of the number of devices, {mesh.size}"
        raise _check.reject("microbatch", microbatch, rule)


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding with the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def layout_of(mesh: Mesh, tree: PyTree) -> PyTree:
    """A ``NamedSharding`` per leaf of ``tree``: as it lies on ``mesh``, or replicated."""

    def layout(leaf: Any) -> NamedSharding:
        sharding = getattr(leaf, "sharding", None)
        # a compiled function may hand out an equal layout under another name
        if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
            return NamedSharding(mesh, sharding.spec)
        return replicated(mesh)

    return jax.tree.map(layout, tree)


def spread(mesh: Mesh, tree: PyTree) -> PyTree:
    """A ``NamedSharding`` per leaf of ``tree`` that cuts it over all devices.

    The first axis that the number of devices divides is cut; a leaf without one is replicated.
    """

    def layout(leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        for axis, length in enumerate(shape if mesh.size > 1 else ()):
            if length and length % mesh.size == 0:
                return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
        return replicated(mesh)

    return jax.tree.map(layout, tree)


def gathered(mesh: Mesh, arrays: PyTree) -> PyTree:
    """Arrays in a program, whole on every device, as losses need them."""
    return jax.lax.with_sharding_constraint(arrays, replicated(mesh))


def place(tree: PyTree, sharding: PyTree) -> PyTree:
    """``tree`` on the devices of ``sharding`` (a pytree of shardings); all hosts hold all of it."""

    def put(leaf: ArrayLike, layout: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == layout:
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, layout, lambda index: host[index])

    return jax.tree.map(put, tree, sharding)


def distribute(mesh: Mesh, tree: PyTree) -> PyTree:
    """``tree`` on the devices of ``mesh``, cut as :func:`spread` says."""
    return place(tree, spread(mesh, tree))


def place_rows(mesh: Mesh, rows: np.ndarray, axis: int = 0) -> PyTree:
    """A microbatch with its ``axis`` split over the devices."""
    layout = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
    return place(rows, layout)


def gather(tree: PyTree) -> PyTree:
    """Host copies of arrays that are split over devices, on every process."""

    def whole(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return np.asarray(leaf)

    return jax.tree.map(whole, tree)


def digest_of(tree: PyTree) -> str:
    """SHA-256 of the arrays of a pytree, their types, shapes and paths; the same on every mesh."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.ascontiguousarray(gather(leaf))
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
