"""Checks that reject training without the stated privacy before anything is released."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils.weak import WeakTensorKeyDictionary

from mfopt._runtime import _check
from mfopt._runtime._types import T
from mfopt.torch.rows import UnitRows

_ADDING = ("DistributedDataParallel", "FullyShardedDataParallel")
_taken = WeakTensorKeyDictionary()  # the run of each attached parameter


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def gathered(value: T) -> list[T]:
    """``value`` of each process."""
    values = [value] * place()[1]
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def refuse_layers(module: torch.nn.Module) -> None:
    """Raise :class:`UsageError` for layers that add up gradients, or hold or take others' rows."""
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        held = (*layer.parameters(False), *layer.buffers(False))
        if kind in _ADDING:
            rule = "adds up gradients before they are clipped and noised"
            way_out = "Give its `module`: the run adds up sums over processes; or use fully_shard."
        # PyTorch's own words for a single row are a riddle
        elif isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) and layer.training:
            rule = "normalizes each example by the others of its batch"
            way_out = "Use GroupNorm or LayerNorm, or freeze it: `eval()`."
        elif kind := UnitRows.fault_of(*held, mark="written") or "a batch" * any(
            isinstance(x, UnitRows) for x in held
        ):
            rule = "wrote rows of a private batch to what the module holds, without noise"
            way_out = "Make the module again; change it by public or released numbers alone."
        else:
            continue
        raise _check.reject(f"module.{name}".rstrip("."), kind, rule, way_out)


def _following(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Parametrizations of a weight that have buffers, as of spectral norm, each after its list.

    They compute a weight from another one: what they keep follows from weights alone.
    """
    for layer in module.modules():
        is_list = isinstance(layer, parametrize.ParametrizationList)
        if is_list and layer.training and not any(map(is_shard, layer.parameters())):
            yield from ((layer, part) for part in layer.children() if [*part.buffers()])


def hold_weights(module: torch.nn.Module) -> None:
    """Keep passes from moving the buffers of parametrizations."""
    for _, part in _following(module):
        part.eval()


def follow_weights(module: torch.nn.Module) -> None:
    """One pass of parametrizations with buffers, as one of training has; after each step."""
    for layer, part in _following(module):
        part.train()
        with torch.no_grad():
            layer()
        part.eval()


def refuse_uncovered(module: torch.nn.Module, attached: Iterable[torch.Tensor]) -> None:
    """Raise :class:`UsageError` unless the module's trainable parameters are those ``attached``."""
    way_out = "Call backward(module, loss, batch), in this order."
    _check.kind("module", module, torch.nn.Module, way_out)
    for layer in module.modules():  # a pass with FSDP2 may have left whole parameters
        if callable(back := getattr(layer, "reshard", None)):
            back()
    optimized = {id(p): "optimizer" for p in attached if p.requires_grad}
    trained = {id(p): f"module.{k}" for k, p in module.named_parameters() if p.requires_grad}
    for number, name in {**trained, **optimized}.items():
        if number not in optimized or number not in trained:
            rule = (
                "is in the module or in the run's optimizer, not in both: no noise, or noise only"
            )
            way_out = "Give both all that is trained, or freeze it: requires_grad_(False)."
            raise _check.reject(name, "a parameter", rule, way_out)


def take(parameters: list[torch.Tensor], run: Any) -> None:
    """Note that ``run`` trains ``parameters``; each belongs to one run, once.

    Refused is one that comes twice, or belongs to another run that has steps left.
    """
    if len({id(p) for p in parameters}) < len(parameters):
        raise _check.reject("optimizer", "has a parameter twice", "must have each once")
    for p in parameters:
        other = _taken[p]() if p in _taken else None
        if other is not None and other is not run and other.step < other.stream.iterations:
            rule = "would release them a second time, beside that run"
            way_out = "Finish that run, or train a copy: copy.deepcopy(module)."
            raise _check.reject("optimizer", f"of parameters in {other!r}", rule, way_out)
    for p in parameters:
        _taken[p] = weakref.ref(run)


def is_shard(tensor: torch.Tensor) -> bool:
    """True if this process has a part of a ``DTensor``."""
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this process has."""
    return tensor.to_local() if is_shard(tensor) else tensor


def like(parameter: Any, whole: torch.Tensor) -> torch.Tensor:
    """``whole``, equal in all processes, spread over them as ``parameter`` is."""
    if not is_shard(parameter):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim)
    return everywhere.redistribute(placements=parameter.placements)


def refuse_scaler(optimizer: object) -> None:
    """Raise :class:`UsageError` inside a step that a ``GradScaler`` makes."""
    if [vars(optimizer).pop(name, None) for name in ("grad_scale", "found_inf")] != [None, None]:
        rule = "which would leave out steps and divide what is clipped and noised"
        way_out = "Use torch.autocast in bfloat16, or GradScaler(enabled=False)."
        raise _check.reject("optimizer", "stepped by a GradScaler", rule, way_out)
