"""Rows that know their units: a loader's batch, a model's outputs, and what follows row by row.

An operation that selects rows selects their units. Others keep them if the result has as many rows,
and give a sum over units if it has another number. Units and sums together, or rows of other units,
are mixed: such a tensor is no batch, and no loss. Of two batches and then one in two hundred, every
operation is computed again with another last row, which may change neither the other rows nor, of a
sum, their gradients; and a sum without its last row, which shows whether it is a sum or a mean.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mfopt._runtime import _check

_SELECTIONS = {"__getitem__", "index_select", "narrow", "flip", "roll"}
_SELECTIONS |= {"split", "tensor_split", "chunk"}
_RESHAPES = {"view", "reshape", "flatten"}
_TOLERANCE = 1e-3  # of the largest number: what rounding may change
_REDUCTIONS = {"sum", "mean"}


class UnitRows(torch.Tensor):
    """A tensor whose rows belong to units.

    Attributes:
      units: the unit of each row; None of a sum over units.
      fault: the operation that mixed units; empty where none did.
      is_probed: whether operations are computed again.
      reductions: of a sum over units, what it is: "sum", "mean", or both in parts.
      count: of units, of which it is a sum.
    """

    units: tuple[int, ...] | None = None
    fault = ""
    is_probed = False
    reductions: frozenset[str] = frozenset()
    count = 0

    @classmethod
    def of(cls, tensor: torch.Tensor, units: Iterable[int], *, is_probed: bool = False) -> UnitRows:
        """``tensor``, whose rows are of ``units``; mixed, where it has another number of rows."""
        rows, units = tensor.as_subclass(cls), tuple(units)
        is_whole = len(units) == tensor.shape[0]
        rows.units, rows.is_probed = units if is_whole else None, is_probed
        rows.fault = "" if is_whole else f"collate_fn, {tensor.shape[0]} rows of {len(units)} units"
        return rows

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        result = super().__torch_function__(  # type: ignore[no-untyped-call]
            function, kinds, args, kwargs
        )
        if name.startswith("new_") or name.endswith("_like"):  # nothing of the values
            return pytree.tree_map(plain, result)
        changed = args[0] if name.startswith("__set") else result
        if results := [x for x in pytree.tree_leaves(changed) if isinstance(x, UnitRows)]:
            with torch._C.DisableTorchFunctionSubclass():
                _name_units(name, function, args, kwargs, results)
        return result


class Outputs(UnitRows):
    """Outputs of a private model, and what a loss makes of them.

    Attributes:
      declared: what the loss is said to be, "mean" or "sum".
    """

    declared = "mean"

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.backward and args[0].fault:
            rule = f"mixes examples by {args[0].fault}, or divides by what depends on them"
            way_out = "Use a mean over examples of losses that depend on one example each; or "
            way_out += "PrivateRun.backward, which calls the loss for one example at a time."
            raise _check.reject("loss", "not a mean over examples", rule, way_out)
        if function is torch.Tensor.backward and args[0].reductions - {args[0].declared}:
            actual = "sum" if args[0].declared == "mean" else "mean"
            rule = f"is what the loss was said to be, and it is a {actual} over examples: their "
            rule += "gradients would depend on how many there are"
            way_out = f'Give loss_reduction="{actual}", or make the loss a {args[0].declared}.'
            raise _check.reject("loss_reduction", args[0].declared, rule, way_out)
        return super().__torch_function__(function, kinds, args, kwargs)


def plain(x: Any) -> Any:
    """The tensor without its units; anything else as it is."""
    if not isinstance(x, UnitRows):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor)


def units_of(tensors: Iterable[Any]) -> tuple[int, ...]:
    """The unit of each row of a batch.

    Raises:
      UsageError: no tensor comes from a loader of a run, or rows of two belong to other units.
    """
    rows = [x for x in tensors if isinstance(x, UnitRows)]
    every = {x.units for x in rows}
    if len(every) != 1 or None in every:
        mixed = next((f"mixed by {x.fault or 'a sum'}" for x in rows if x.units is None), "others")
        rule = "has rows that are not those of one unit of the run's batch each"
        way_out = "Pass what the loader gives (to evaluate: model.eval() first); change single "
        way_out += "records in the data set, or in collate_fn, one row for each."
        raise _check.reject("batch", mixed if rows else "not of the loader", rule, way_out)
    return every.pop() or ()


@contextlib.contextmanager
def seeded(tensors: Iterable[torch.Tensor], seed: int = 0) -> Iterator[None]:
    """Random numbers begin at ``seed`` inside, and go on as before after it."""
    devices = {x.device for x in tensors if x.device.type == "cuda"}
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=list(devices)):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed prints the stack to a text
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def _name_units(name: str, function: Any, args: Any, kwargs: Any, results: list[UnitRows]) -> None:
    """Set the attributes of the ``results`` of ``function``."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    sources = [x for x in leaves if isinstance(x, UnitRows)]
    fault = next((x.fault for x in sources if x.fault), "")
    every = {x.units for x in sources}
    units, is_probed = next(iter(every)), any(x.is_probed for x in sources)
    is_trained = any(isinstance(x, Outputs) for x in sources) and any(
        x.requires_grad for x in leaves if not isinstance(x, Outputs)
    )
    if not fault and (len(every) > 1 or is_trained):
        fault = f"{name} with " + (
            "other trainable tensors" if is_trained else "sums or other rows"
        )
    each: list[Any] = [units] * len(results)
    probe = functools.partial(_mixes, function, args, kwargs, sources[0])
    is_selection = name in _SELECTIONS and isinstance(args[0], UnitRows)
    if fault:
        pass
    elif units and is_selection:
        with contextlib.suppress(IndexError, RuntimeError):  # along another axis
            each = _selected(name, function, args, kwargs, units)
    elif units and name in _RESHAPES and results[0].ndim:
        each = [[u for u in units for _ in range(len(results[0]) // len(units))]]
    elif is_probed and units != ():
        keeps_rows = units is not None and results[0].ndim and len(results[0]) == len(units)
        if not keeps_rows or probe(of_gradients=False):
            each = [None] * len(results)
            fault = name if probe(of_gradients=True) else ""
    reductions = frozenset().union(*(x.reductions for x in sources))
    count = max(x.count for x in sources)
    if is_probed and units and each[0] is None and len(units) > 1 and not fault:
        count = len(set(units))
        reductions = _reductions(function, args, kwargs, len(units))
        fault = "" if reductions <= _REDUCTIONS else name
    elif count and _is_multiple(_divisor(name, args), count):
        reductions = frozenset(["mean"])
    declared = next((x.declared for x in sources if isinstance(x, Outputs)), "")
    for x, of_rows in zip(results, each, strict=False):
        is_whole = of_rows is not None and x.ndim and len(x) == len(of_rows) and not fault
        x.units, x.is_probed, x.fault = tuple(of_rows) if is_whole else None, is_probed, fault
        x.reductions, x.count = reductions, count
        if isinstance(x, Outputs):
            x.declared = declared


def _divisor(name: str, args: Any) -> float:
    """The number that an operation divides by; 0 of others."""
    number = args[1] if len(args) > 1 and isinstance(args[1], int | float) else 0
    if "div" in name and not name.startswith("__r"):
        return float(number)
    return 1 / number if "mul" in name and number else 0.0


def _is_multiple(number: float, count: int) -> bool:
    return number / count > 0.5 and abs(number / count - round(number / count)) < _TOLERANCE / count


def _reductions(function: Any, args: Any, kwargs: Any, count: int) -> frozenset[str]:
    """What a sum over ``count`` rows is, by the gradients of all but the last without that one.

    "sum" where they stay, "mean" where a share of each goes to all others, "mixed" where neither;
    nothing where that cannot be told.
    """

    def outcome(kept: int) -> tuple[torch.Size, torch.Tensor]:
        """Shape of the result, and gradients of its sum by all rows but the last."""
        inputs: list[torch.Tensor] = []

        def part(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            copy = plain(x).detach()[:kept] if isinstance(x, UnitRows) else plain(x).detach()
            if not copy.is_floating_point():
                return copy.clone()
            copy = copy.double()  # that one row in many shows
            if isinstance(x, UnitRows):
                inputs.append(copy.requires_grad_())
            return copy * 1.0  # which may be changed in place

        with seeded(inputs), torch.enable_grad():
            result = function(*pytree.tree_map(part, args), **pytree.tree_map(part, kwargs))
            gradients = torch.autograd.grad(result.sum(), inputs, materialize_grads=True)
        return result.shape, torch.cat([x[: count - 1].ravel() for x in gradients])

    try:
        (shape, whole), (other, without) = outcome(count), outcome(count - 1)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
        return frozenset()  # values that the operation does not take, or nothing to differentiate
    finite = whole.isfinite() & without.isfinite()  # an example whose loss is not adds nothing
    whole, without = whole[finite], without[finite]
    if shape != other or not whole.any():
        return frozenset()
    near = max(_TOLERANCE / count, 1e-6) * whole.abs().max()
    weights = {"sum": 1.0, "mean": count / (count - 1)}
    fitting = [k for k, x in weights.items() if ((without - x * whole).abs() <= near).all()]
    return frozenset() if len(fitting) == len(weights) else frozenset(fitting or ["mixed"])


def _selected(name: str, function: Any, args: Any, kwargs: Any, units: tuple[int, ...]) -> Any:
    """The units of the rows that an operation selects."""
    if name == "__getitem__":
        index = args[1][0] if isinstance(args[1], tuple) else args[1]
        args = args[0], slice(None) if index is ... else index
    on_host = [x.cpu() if isinstance(x, torch.Tensor) else x for x in args[1:]]
    moved = pytree.tree_leaves(function(torch.tensor(units), *on_host, **kwargs))
    return [x.tolist() if x.ndim == 1 else None for x in moved]


def _mixes(function: Any, args: Any, kwargs: Any, source: UnitRows, *, of_gradients: bool) -> bool:
    """True if one row of what an operation is computed from moves what others get.

    Args:
      function, args, kwargs: the operation.
      source: the first tensor that it is computed from; its largest row is put in place of the
        smallest, and the other way round. Sums over units are scaled.
      of_gradients: compare gradients of a sum of results by each row; results otherwise.
    """
    count = 0 if source.units is None else len(source)
    order = plain(source).detach().double().reshape(max(1, count), -1).sum(1).argsort().tolist()

    def effects(row: int, other: int) -> list[torch.Tensor]:
        """Results or gradients, with ``row`` of the order in place of ``other``."""
        inputs: list[torch.Tensor] = []

        def changed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            copy = plain(x).detach().clone()
            if not isinstance(x, UnitRows):
                return copy
            if count:
                copy[order[other]] = copy[order[row]].clone()
            if not copy.is_floating_point():
                return copy
            if not count:
                copy *= 1.5 + row - other
            inputs.append(copy.requires_grad_())
            return copy * 1.0  # which may be changed in place

        with seeded(inputs), torch.enable_grad():
            made = function(*pytree.tree_map(changed, args), **pytree.tree_map(changed, kwargs))
            results = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
            if not of_gradients:
                return [x.detach() for x in results]
            smooth = [(x * torch.randn_like(x)).sum() for x in results if x.requires_grad]
            grads = torch.autograd.grad(smooth, inputs, materialize_grads=True) if smooth else ()
            return list(grads)

    try:
        for row, other in ((0, -1), (-1, 0)):
            for a, b in zip(effects(0, 0), effects(row, other), strict=True):
                difference = (a.double() - b.double()).nan_to_num().abs()
                if count:
                    difference[order[other]] = 0.0
                if (difference > _TOLERANCE * a.double().nan_to_num().abs().max()).any():
                    return True
    except (RuntimeError, ValueError, TypeError, IndexError):
        pass  # values that the operation does not take
    return False
