"""Memory of a training run, estimated before it starts, in float32 numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mfopt._runtime import _check, _sizes
from mfopt._runtime._types import PyTree
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.fedavg import FedAvg
from mfopt.training.loop import Execution
from mfopt.training.models import Model

_BASE = 2**29  # bytes: Python, JAX, Flax and what is compiled
_MOMENTS = {"sgd": 0, "momentum": 1}  # arrays of an optimizer's state; 2 of all others
_SPARE = 0.9  # of a device's memory


class _Work(NamedTuple):
    """A model as a run sees it, in numbers.

    ``trained``, ``frozen``: parameters that are trained, and the others; ``record``: numbers that
    the backward pass of one record holds; ``largest``: numbers of the largest trained array.
    """

    trained: float
    frozen: float
    record: float
    largest: float


def work(model: Model, length: int) -> _Work:
    """The model of a run on rows of ``length`` tokens; it may hold shapes in place of values."""
    sizes, frozen = (
        [leaf.size for leaf in jax.tree.leaves(part)] for part in (model.params, model.frozen)
    )
    row = [jax.ShapeDtypeStruct((length,), dtype) for dtype in (jnp.int32, bool)]

    def backward(params: PyTree, *constants: PyTree) -> PyTree:
        return jax.vjp(lambda params: model.loss(params, *constants), params)[1]

    inputs = (model.params, model.frozen, *row)
    kept, arguments = (
        sum(leaf.size * leaf.dtype.itemsize / 4 for leaf in jax.tree.leaves(tree))
        for tree in (jax.eval_shape(backward, *inputs), inputs)
    )
    return _Work(sum(sizes), sum(frozen), max(0.0, kept - arguments), max(sizes, default=0))


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Memory of a run: of the model's ``work``, as ``execution`` does it."""

    work: _Work
    execution: Execution
    config: TrainConfig

    def memory(self, microbatch: int) -> float:
        """Bytes at the peak of training, on each device.

        The model and its initial copy, the sum of gradients, one draw of noise and the update; the
        state and its copy while a checkpoint is written; and the gradient and records of each unit
        of a microbatch, 1.1 to 1.5 of XLA's own account at six shapes. Devices share all of this;
        each has the parameters whole beside it, and the gradient of what is summed over them at
        once: an array, on a CPU all of them.
        """
        devices = len(meshes.devices())
        cpu = meshes.on_cpu()
        noise = self.execution.noise
        clipping = self.execution.clipping
        trained = self.work.trained
        frozen = self.work.frozen
        rows = self.execution.units.records
        slots = 0 if noise is None else noise.recursion.slots * noise.buffer_dtype.itemsize / 4
        moments = _MOMENTS.get(self.config.optimizer, 2)
        state = trained * (1 + moments + slots)
        formed = trained
        if isinstance(clipping, FedAvg):  # update, its model, gradient, and the next
            formed = 4 * trained
            rows = clipping.local_batch or rows
        units = microbatch * (formed * (noise is not None) + rows * self.work.record)
        if devices == 1:
            return _BASE + 4 * (2 * state + 4 * trained + 2 * frozen + units)
        shared = (1 + cpu) * state + 3 * trained + frozen + units
        summed = trained if cpu else self.work.largest
        return _BASE / (devices if cpu else 1) + 4 * (shared / devices + trained + frozen + summed)

    def fitting(self) -> int:
        """The microbatch to take: what was asked for, or the usual one, halved until it fits.

        On a CPU the usual one is the smallest: what is rounded depends on no other program's load.
        """
        microbatch = self.execution.microbatch
        devices = meshes.devices()
        if self.config.microbatch or jax.process_count() > 1:  # processes take the same one
            return microbatch
        free = _SPARE * (devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
        least = len(devices)  # one on each
        while microbatch > least and self.memory(microbatch) > free:
            microbatch = max(1, microbatch // least // 2) * least
        return microbatch

    def require(self) -> None:
        """Refuse a run that does not fit into free memory, with the microbatch that would."""
        if not meshes.on_cpu() or jax.process_count() > 1:
            return  # the devices' memory is not the machine's

        def need(microbatch: int) -> float:
            return len(meshes.devices()) * self.memory(max(microbatch, 1))  # of one machine

        if need(1) <= _sizes.usable_memory():
            _sizes.require("microbatch", self.execution.microbatch, need)
            return
        name = "model" if self.config.model else "layers, width"
        value = self.config.model or (self.config.layers, self.config.width)
        needed = need(1) / _sizes.GIB
        free = _sizes.usable_memory() / _sizes.GIB
        rule = (
            f"needs about {needed:,.1f} GiB of memory to be trained, and {free:,.1f} GiB are free"
        )
        way_out = "Take a smaller model, adapters (`lora_rank`), shorter records (`length`), or a "
        raise _check.reject(name, value, rule, f"{way_out}mechanism with fewer arrays of noise.")
