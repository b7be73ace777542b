"""Sharding of samples over the local devices: each takes an equal part of the first axis.

Nothing of an answer follows from how many devices there are. Where parts are whole chunks
(:func:`each`) it is the same to the last bit; where one sum is cut (a search's frozen samples), up
to the rounding of its order. On one device everything is as if this module were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mfopt._runtime._float64 import Devices, devices
from mfopt._runtime._types import PyTree, T

_SPLIT, _SAME = PartitionSpec("samples"), PartitionSpec()


def dividing(tree: PyTree) -> Devices:
    """Largest set of devices that cuts the first axis of every array into equal parts."""
    lengths = {leaf.shape[0] if leaf.shape else 1 for leaf in jax.tree.leaves(tree)}
    usable = devices()
    whole = math.gcd(*lengths)
    count = next(k for k in range(len(usable), 0, -1) if whole % k == 0)
    return usable[:count]


def placed(tree: PyTree, over: Devices) -> PyTree:
    """``tree`` with the first axis of every array cut over these devices."""
    if len(over) == 1:
        return tree
    return jax.device_put(tree, NamedSharding(_mesh(over), _SPLIT))


def gathered(tree: PyTree, over: Devices) -> PyTree:
    """Results of a program over these devices where programs of one device take them."""
    return tree if len(over) == 1 else jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)


def mapped(function: Callable[..., T], over: Devices) -> Callable[..., T]:
    """``function`` of each device's part of its first argument; all others are the same for all.

    What it returns is joined along the first axis. To be called in compiled code.
    """
    if len(over) == 1:
        return function

    def call(parts: PyTree, *shared: PyTree) -> T:
        specs = (_SPLIT, *(_SAME for _ in shared))
        inner = jax.shard_map(
            function, mesh=_mesh(over), in_specs=specs, out_specs=_SPLIT, check_vma=False
        )
        return inner(parts, *shared)

    return call


def stacked(tree: PyTree) -> PyTree:
    """``tree`` with a leading axis of length 1, the layout of one device's part."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree)


def unstacked(tree: PyTree) -> PyTree:
    """Inverse of :func:`stacked`."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _mesh(over: Devices) -> Mesh:
    return Mesh(np.array(over), ("samples",))
