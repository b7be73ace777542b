"""What a training run takes, memory and time: told before it starts, not found out in it.

Counted in float32 numbers and operations on them; what these cost was measured on two CPU cores
(``mfopt bench train``, ``mfopt bench draws``), so the time is for a CPU, and a rough one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from mfopt import _check, _sizes
from mfopt.progress import Report
from mfopt.training import ghost
from mfopt.training.config import TrainConfig
from mfopt.training.gradients import taps_of
from mfopt.training.initial_model import made_elsewhere
from mfopt.training.loop import Execution
from mfopt.training.models import Model

_BASE = 2**29  # bytes: Python, JAX, Flax and what is compiled
_COMPILING = 20.0  # seconds: of a step, an evaluation and the account
_FASTER = 2.2  # operations on floats for one on doubles
# nanoseconds for a number of: the clipped gradient of a unit, a white draw, a buffer of noise, what
# the optimizer and the update read and write
_GRADIENT, _DRAW, _BUFFER, _UPDATE = 4.0, 7.0, 1.0, 4.0
_MOMENTS = {"sgd": 0, "momentum": 1}  # arrays of an optimizer's state; 2 of all others
_SPARE = 0.9  # of a device's memory
_SLACK = 1.1  # of what a microbatch holds at once, over its largest arrays


class Work(NamedTuple):
    """A model as a run sees it, in numbers.

    Attributes:
      trained: parameters that are trained.
      frozen: other parameters.
      record: numbers that the backward pass of one record holds; 0 where nobody knows.
      layers: blocks, each with a product over all pairs of tokens.
      width: of the residual stream.
      products: (size, positions in a record) of each parameter that meets activations in products
        only.
    """

    trained: float
    frozen: float = 0.0
    record: float = 0.0
    layers: int = 0
    width: int = 0
    products: tuple[tuple[int, int], ...] = ()

    def formed(self, records: int) -> float:
        """Parameters whose gradients are formed for each of several units of so many records."""
        return self.trained - sum(
            size for size, positions in self.products if ghost.pays(records * positions, size)
        )


def work(config: TrainConfig, vocab_size: int, model: Model | None = None) -> Work:
    """The model of a run; of the settings alone where it was not made yet.

    Args:
        config: settings of the run.
        vocab_size: of the data.
        model: once it is there. Without it the size of one that a function makes is not known.
    """
    from mfopt.training.models.gpt2 import LINEAR_LAYERS, GPT2Config
    from mfopt.training.models.huggingface import read_config

    trained = 0.0 if model is None else float(model.num_params)
    frozen = (
        0.0 if model is None else float(sum(leaf.size for leaf in jax.tree.leaves(model.frozen)))
    )
    if made_elsewhere(config.model):
        return Work(trained, frozen, products=_products(model, config.length))
    if config.model:
        shape = read_config(config.model)
    else:
        sizes = (vocab_size, config.length, config.width, config.layers, config.heads)
        shape = GPT2Config(*sizes)
    d, inner = shape.n_embd, shape.inner
    products = [(size, config.length) for size in (3 * d**2, d**2, d * inner, d * inner)]
    products = [*products * shape.n_layer, (shape.vocab_size * d, 2 * config.length)]
    if config.remat:
        products = products[-1:]
    if model is None:
        trained = float(shape.num_params)
        if config.lora_rank:
            both = ((d, 3 * d), (d, d), (d, inner), (inner, d))
            ends = dict(zip(LINEAR_LAYERS, both, strict=True))
            adapted = [name.strip() for name in config.lora_layers.split(",")]
            frozen = trained
            adapters = sum(sum(ends.get(name, (0,))) for name in adapted)
            trained = float(shape.n_layer * config.lora_rank * adapters)
            products = [
                (config.lora_rank * size, config.length)
                for name in adapted
                for size in ends.get(name, ())
            ] * shape.n_layer
    block = config.length * (8 * shape.n_embd + 4 * shape.inner)
    block += 3 * shape.n_head * config.length**2
    kept = shape.n_layer * block
    if config.remat:
        kept = 2 * block + shape.n_layer * config.length * shape.n_embd
    record = kept + 3 * config.length * shape.vocab_size  # logits, their softmax, its gradient
    found = tuple(products) if model is None else _products(model, config.length)
    return Work(trained, frozen, record, shape.n_layer, shape.n_embd, found)


def _products(model: Model | None, length: int) -> tuple[tuple[int, int], ...]:
    if model is None:
        return ()
    taps = taps_of(model, model.params, model.frozen, length)
    leaves = jax.tree.leaves(model.params)
    return tuple(
        (leaves[i].size, sum(use.positions for use in taps.uses if use.leaf == i))
        for i in taps.leaves
    )


def memory(found: Work, execution: Execution, config: TrainConfig, microbatch: int) -> float:
    """Bytes at the peak of training, on all devices together.

    The model and its initial copy, the sum of gradients, one draw of noise and the update; the
    state that is kept (parameters, moments, buffers of noise) and its copy while a checkpoint is
    written; and for each unit of a microbatch its gradient and its records. What a microbatch holds
    is 0.9 to 1.6 of XLA's own account of it, at five shapes.

    Args:
      found: the model.
      execution: what runs.
      config: settings of the run.
      microbatch: units whose gradients are held at once.
    """
    slots = 0 if execution.noise is None else execution.noise.recursion.slots
    moments = _MOMENTS.get(config.optimizer, 2) + bool(config.average)
    state = found.trained * (1 + moments + slots)
    step = found.trained * 4 + found.frozen * 2
    private = execution.noise is not None
    rows = execution.units.records
    formed = found.trained if microbatch == 1 else found.formed(rows)
    unit = formed * private + rows * found.record
    return _BASE + 4 * (2 * state + step + _SLACK * microbatch * unit)


def seconds(found: Work, execution: Execution, config: TrainConfig, steps: int) -> float:
    """About how long ``steps`` steps take here, on a CPU, with pretraining before them.

    Args:
      found: the model.
      execution: what runs.
      config: settings of the run.
      steps: still to do.
    """
    length, whole = config.length, found.trained + found.frozen
    # an operation is a product or a sum: two for each weight forward, and twice that backward; half
    # of the latter is the gradient of the weight itself, which a frozen one does not have
    token = (6 if not found.frozen else 4) * whole + 12 * found.layers * found.width * length
    token *= 4 / 3 if config.remat else 1
    units = execution.sampler.expected_batch
    operations = units * execution.units.records * length * token
    traffic = _UPDATE * found.trained
    if execution.noise is not None:
        recursion, n = execution.noise.recursion, execution.iterations
        alone = execution.sampler.microbatch == 1
        formed = found.trained if alone else found.formed(execution.units.records)
        traffic += _GRADIENT * units * formed
        traffic += found.trained * (_DRAW * recursion.draws(n) + _BUFFER * recursion.slots)
    pretraining = config.pretrain_steps * config.pretrain_batch * length * 6 * whole
    done = (steps * operations + pretraining) / (_FASTER * _sizes.SPEED * 1e9)
    return _COMPILING + _sizes.here(done + steps * traffic * 1e-9)


def fitting(found: Work, execution: Execution, config: TrainConfig) -> int:
    """The microbatch to take: what was asked for, or the usual one, halved until it fits.

    Args:
      found: the model.
      execution: with the usual microbatch.
      config: settings of the run.
    """
    sampler, devices = execution.sampler, jax.local_device_count()
    free = _device_memory()
    microbatch = sampler.microbatch
    if config.microbatch or jax.process_count() > 1:
        return microbatch
    while microbatch % (2 * devices) == 0:
        # every device holds all that is not of the microbatch
        if memory(found, execution, config, microbatch // devices) <= free:
            break
        microbatch //= 2
    return microbatch


def _device_memory() -> float:
    if jax.default_backend() == "cpu":
        return _sizes.usable_memory() / jax.local_device_count()
    stats = jax.local_devices()[0].memory_stats() or {}
    return _SPARE * float(stats.get("bytes_limit", float("inf")))


def require(found: Work, execution: Execution, config: TrainConfig) -> None:
    """Refuse a run that does not fit into the memory that is free.

    Raises:
      UsageError: with the microbatch that would fit, where a smaller one would.
    """
    if jax.default_backend() != "cpu" or jax.process_count() > 1:
        return  # the devices' memory is not the machine's

    def need(microbatch: int) -> float:
        return memory(found, execution, config, max(microbatch, 1))

    if need(1) <= _sizes.usable_memory():
        _sizes.require("microbatch", execution.sampler.microbatch, need)
        return
    raise _check.reject(
        "model" if config.model else "width",
        config.model or config.width,
        f"needs about {need(1) / _sizes.GIB:,.1f} GiB of memory to be trained, and "
        f"{_sizes.usable_memory() / _sizes.GIB:,.1f} GiB are free",
        "Take a smaller model, adapters (`lora_rank`), shorter records (`length`), or a mechanism "
        "with fewer arrays of noise.",
    )


def announce(found: Work, execution: Execution, config: TrainConfig, report: Report) -> None:
    """Tell how long the run will take, where that is long and there is no accelerator.

    Args:
      found: what a step takes.
      execution: how the run is carried out.
      config: its settings.
      report: told.
    """
    if jax.default_backend() != "cpu":
        return
    steps = min(config.steps or execution.iterations, execution.iterations)
    note = "Ctrl-C ends it at a checkpoint, --resume goes on"
    expected = seconds(found, execution, config, steps)
    _sizes.announce(expected, report, of=f"{steps} steps", note=note)
