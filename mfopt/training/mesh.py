"""One mesh for any number of devices and processes: axes ``data`` and ``model``.

Units are split over ``data``. Of everything else (parameters, frozen arrays, sums of gradients,
optimizer state, noise) a device holds its share (:func:`spread`); a step gathers the parameters,
over ``model`` as far as the model says how. Up to the rounding of sums results do not depend on it.
Every process builds the same microbatch and hands over the rows of its own devices: hosts exchange
no data, and all devices get equally many units, of equally many records each.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfopt._runtime import _check
from mfopt.training.models import Model, PyTree

DATA, MODEL = "data", "model"


def devices() -> list[jax.Device]:
    """Devices to train on: JAX's ``jax_default_device`` if it is set, else all of all processes."""
    chosen = getattr(jax.config, "jax_default_device")  # noqa: B009 - not in its stubs
    if chosen is None:
        return jax.devices()
    if jax.process_count() > 1:
        rule = f"is one device, and {jax.process_count()} processes train together on all of theirs"
        raise _check.reject("jax_default_device", str(chosen), rule, "Leave it unset.")
    return jax.devices(chosen)[:1] if isinstance(chosen, str) else [chosen]


def on_cpu() -> bool:
    """True if training is on CPUs."""
    return bool(devices()[0].platform == "cpu")


def make_mesh(model_parallel: int = 1) -> Mesh:
    """Mesh of the :func:`devices`, (devices / model_parallel) × model_parallel."""
    model_parallel = _check.integer("model_parallel", model_parallel)
    available = np.asarray(devices())
    if len(available) % model_parallel:
        rule = f"must divide the number of devices ({len(available)})"
        raise _check.reject("model_parallel", model_parallel, rule)
    return Mesh(available.reshape(-1, model_parallel), (DATA, MODEL))


def one_device() -> Mesh:
    """Mesh of one device of this process."""
    local = [device for device in devices() if device.process_index == jax.process_index()]
    return Mesh(np.asarray(local[:1]).reshape(1, 1), (DATA, MODEL))


def wait_for_lead(event: str) -> None:
    """Barrier of all processes, after which files written by the first are there for all."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(event)


def data_parallel(mesh: Mesh) -> int:
    """Devices along the data axis: a microbatch must be a multiple of it."""
    return int(mesh.shape[DATA])


def check_microbatch(mesh: Mesh, microbatch: int) -> None:
    """Refuse a microbatch that the devices along the data axis cannot share evenly."""
    if microbatch % data_parallel(mesh):
        rule = f"must be a multiple of the {data_parallel(mesh)} devices along the data axis"
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


def spread(mesh: Mesh, tree: PyTree, partition: PyTree | None = None) -> PyTree:
    """A ``NamedSharding`` per leaf of ``tree`` that cuts it over all devices.

    One axis is cut further than ``partition`` says: one that it cuts already, or the first that
    the number of devices divides. A leaf without such an axis is left as ``partition`` says.
    """

    def layout(leaf: Any, stated: NamedSharding) -> NamedSharding:
        shape, spec = np.shape(leaf), stated.spec
        axes = [(x,) if isinstance(x, str) else x for x in spec]
        axes += [None] * (len(shape) - len(axes))
        free_axes = tuple(
            name for name in mesh.axis_names if not any(name in (x or ()) for x in axes)
        )
        for i in sorted(range(len(shape)), key=lambda i: not axes[i]):
            cut = (*(axes[i] or ()), *free_axes)
            if shape[i] and shape[i] % math.prod(mesh.shape[name] for name in cut) == 0:
                return NamedSharding(mesh, PartitionSpec(*axes[:i], cut, *axes[i + 1 :]))
        return stated

    layouts = shardings(mesh, tree, partition)
    return layouts if mesh.size == 1 else jax.tree.map(layout, tree, layouts)


def gathered(mesh: Mesh, model: Model, params: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
    """Parameters and frozen arrays in a program, as losses need them: cut by the model alone.

    Args:
      mesh: devices that hold them.
      model: whose partition says how each array is cut.
      params: its trained parameters, cut over all devices.
      frozen: its frozen arrays, cut over all devices.
    """
    layouts = (
        shardings(mesh, model.params, model.partition),
        shardings(mesh, model.frozen, model.frozen_partition),
    )
    whole: tuple[PyTree, PyTree] = jax.lax.with_sharding_constraint((params, frozen), layouts)
    return whole


def shardings(mesh: Mesh, tree: PyTree, partition: PyTree | None) -> PyTree:
    """A ``NamedSharding`` per leaf of ``tree``: replicated, or as ``partition`` says."""
    if partition is None or mesh.size == 1:  # where names of axes would only compile steps again
        return jax.tree.map(lambda _: replicated(mesh), tree)
    return jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), tree, partition)


def place(tree: PyTree, sharding: PyTree) -> PyTree:
    """``tree`` on the devices of ``sharding`` (a pytree of shardings); all hosts hold all of it."""

    def put(leaf: Any, layout: NamedSharding) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == layout:
            return leaf
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, layout, lambda index: host[index])

    return jax.tree.map(put, tree, sharding)


def distribute(mesh: Mesh, tree: PyTree, partition: PyTree | None) -> PyTree:
    """``tree`` on the devices of ``mesh``, cut as :func:`spread` says."""
    return place(tree, spread(mesh, tree, partition))


def place_rows(mesh: Mesh, rows: np.ndarray, axis: int = 0) -> jax.Array:
    """A microbatch with its ``axis`` split over the data axis."""
    layout = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
    return jax.make_array_from_callback(rows.shape, layout, lambda index: rows[index])


def gather(mesh: Mesh, tree: PyTree) -> PyTree:
    """Host copies of arrays whose rows are split over the data axis, on every process."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    copied = jax.jit(lambda tree: tree, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), copied)
