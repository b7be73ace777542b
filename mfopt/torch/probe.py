"""A black-box probe of sensitivity: what a private pass keeps, and what moves a contribution.

Probed are a run's first two batches and about one in 250 later ones, drawn by the run's
secret. The state of model and loss after the pass must be that before it, and an example's
contribution must depend neither on its companions nor on earlier batches.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import re
import types
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch.utils import data

from mfopt._runtime import _check
from mfopt.noise.for_torch import fingerprint
from mfopt.torch import checks

RATE = 250  # steps of which one is probed, on average
_TOLERANCE = 1e-3  # of the clip norm, or of an output: what rounding may change
_VALUES = (int, float, complex, str, bytes, bytearray, np.generic, torch.dtype, torch.device)
_OUTSIDE = (type, types.ModuleType, data.Dataset, data.DataLoader)
_TRAINERS = ("lightning", "lightning_fabric", "pytorch_lightning")

Contents = dict[str, object]


def contents(ignored: object, **roots: object) -> Contents:
    """Value, or a fingerprint of it, of all that can be reached from ``roots``, by its path.

    Attributes, containers, tensors, arrays, and of functions what they enclose and the globals they
    name. Left out are the ``ignored`` object, data sets, loaders and modules of Python.
    """
    # alive: no number comes twice
    remaining, visited = deque(roots.items()), {id(ignored): ignored}
    state: Contents = {}
    while remaining:
        path, value = remaining.popleft()
        if isinstance(value, _VALUES):
            state[path] = repr(value)
            continue
        package = type(value).__module__.partition(".")[0]
        # what a framework keeps of a run: loops, loggers, progress bars, no model
        is_trainer = package in _TRAINERS and not isinstance(value, torch.nn.Module)
        if id(value) in visited or isinstance(value, _OUTSIDE) or is_trainer:
            continue
        visited[id(value)] = value
        if isinstance(value, torch.Tensor):
            state[path] = _content(value)
        elif isinstance(value, np.ndarray):
            state[path] = (value.shape, hash(value.tobytes()))
        elif isinstance(value, Mapping):
            remaining.extend((f"{path}[{key!r:.40}]", part) for key, part in list(value.items()))
        elif isinstance(value, list | tuple | deque | set | frozenset):
            state[path] = len(value)
            if all(isinstance(part, _VALUES) for part in value):
                state[path] = repr(value)
            else:
                remaining.extend((f"{path}[{i}]", part) for i, part in enumerate(value))
        else:
            remaining.extend((f"{path}.{name}", part) for name, part in _parts(value).items())
    return state


def _parts(value: object) -> Contents:
    """Parts of an object, by name."""
    home = getattr(value, "__globals__", {}).get("__name__", type(value).__module__)
    if home.startswith("torch._dynamo"):  # compiled; the compiler has a state too
        return {"func": getattr(value, "_torchdynamo_orig_callable", None)}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "func": value.__func__}
    if isinstance(value, types.FunctionType):
        globals_used = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        return {**globals_used, **_held(value)}
    forward = getattr(type(value), "forward", None)
    held = {"forward": _held(forward)} if isinstance(forward, types.FunctionType) else {}
    names: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]
    slots = {name: getattr(value, name, None) for name in names}
    return {**held, **slots, **getattr(value, "__dict__", {})}


def _held(function: types.FunctionType) -> Contents:
    """What a function holds itself: what it encloses, its attributes and default arguments."""
    parts = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            parts[name] = cell.cell_contents
    defaults = function.__defaults__, function.__kwdefaults__
    return {**parts, **vars(function), "defaults": defaults}


def _content(tensor: torch.Tensor) -> object:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # kept beyond a pass of vmap
        return id(tensor)
    part = checks.local(tensor.detach())
    # without numbers of its own, as a whole parameter that fully_shard has freed
    if part.layout != torch.strided or part.is_meta or not part.untyped_storage().size():
        return id(tensor), tensor._version
    return tuple(part.shape), fingerprint([part])


def refuse_changes(before: Contents, after: Contents, *, made: bool = False) -> None:
    """Raise :class:`UsageError` where a pass changed what can be reached.

    Args:
      before, after: :func:`contents` at two moments.
      made: whether new entries are allowed: a first pass may fill a table of positions.
    """
    changed = sorted(x for x in before | after if before.get(x, ...) != after.get(x, ...))
    if made:  # a "False" may say that it was not made yet
        changed = [x for x in changed if x in after and before.get(x, "False") != "False"]
    if changed:
        rule = "was changed by a private pass: it may hold what a batch has, without noise"
        way_out = (
            "Freeze it, use GroupNorm, or keep it elsewhere; compute a weight by torch.nn.utils's "
            "parametrizations, or parametrize with a mask, not by hooks (prune, weight_norm, "
            "spectral_norm); and load the model again."
        )
        path = re.sub(r"\._(?:modules|buffers|parameters)\['([^']*)'\]", r".\1", changed[0])
        raise _check.reject(path, "state", rule, way_out)


def refuse_difference(
    reference: list[torch.Tensor], repeated: list[torch.Tensor], bound: float
) -> None:
    """Raise :class:`UsageError` unless two contributions of an example are equal to rounding.

    Args:
      reference, repeated: before and after its batch, or in other company, before they are
        clipped.
      bound: that rounding is measured by, or by the norm of ``reference`` where that is larger.
    """
    if all(map(torch.equal, reference, repeated)):  # as a rule, and cheaper than a norm
        return
    before, after = (
        torch.cat([x.detach().ravel() for x in tensors]).nan_to_num()
        for tensors in (reference, repeated)
    )
    difference, norm = (x.norm(dtype=torch.double) for x in (before - after, before))
    distance = float(difference / norm.clamp(min=bound))
    if not distance <= _TOLERANCE:
        rule = f"moved by {distance:.3g} of its bound: model or loss remember or mix examples"
        way_out = "Keep nothing from pass to pass in model and loss, and examples apart."
        raise _check.reject("contribution of an example", "not its own", rule, way_out)
