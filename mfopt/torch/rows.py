"""Rows that know their units: a loader's batch, a model's outputs, and what follows row by row.

An operation that selects rows selects their units. Others keep them if the result has as many rows,
and give a sum over units if it has another number. Units and sums together, or rows of other units,
are mixed: such a tensor is no batch, and no loss. Of two batches in 250, every operation is
computed again with another last row, which may change neither the other rows nor, of a sum, their
gradients; with other sums, which may change no gradient by them and decide nothing; and a sum
without its last row, which shows whether it is a sum or a mean.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from mfopt._runtime import _check

_SELECTIONS = {
    "__getitem__", "index_select", "narrow", "flip", "roll", "split", "tensor_split", "chunk",
    "unbind",
}  # fmt: skip
_RESHAPES = {"view", "reshape", "flatten"}
_TOLERANCE = 1e-3  # of the largest number: what rounding may change
_Operation = functools.partial[object]  # with its arguments
# of an operation on values that it does not take, or without anything to differentiate
_NOT_TAKEN = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


class Reduction(NamedTuple):
    """How the loss of a pass adds up its units.

    Attributes:
      declared: what it is said to be, "mean" or "sum".
      units: number of those of the pass.
      passes: divisors of the losses of passes before, by their number of units.
      terms: what sums over units are divided by in the loss of a probed pass, their units, and
        what they are divided by themselves, below 0: 1 or the number of rows. A divisor is an int
        if the loss multiplies by nothing.
    """

    declared: str
    units: int
    passes: dict[int, list[float]]
    terms: defaultdict[float, frozenset[int]]

    def add(self, divisor: int, members: frozenset[int], output: int, gradients: Any) -> None:
        """Note a sum over units, whose gradient is what the loss multiplies it by.

        Args:
          divisor: of the sum itself, 1 or its number of rows.
          members: the units.
          output: which one of its node in the graph the sum is.
          gradients: of the node's outputs; None of one that the loss does not use.
        """
        gradient = gradients[output]
        for factor in {*(() if gradient is None else gradient.ravel().tolist())} - {0.0}:
            # equal but for rounding is equal
            number = divisor if factor == 1.0 else float(f"{divisor / factor:.6g}")
            self.terms[number] |= {*members, -divisor}

    def refuse_another(self) -> None:
        """Raise :class:`UsageError` for a loss of other terms than it was declared to have.

        The divisor of a mean follows the number of units, and that of a sum does not. Where the
        loss was multiplied, that shows from the second number on, by a power of their ratio: what
        is as declared may have a weight of the step, and what is not must become so.
        """
        power = int(self.declared == "mean")
        wrong = [
            sum(x >= 0 for x in members) < self.units
            or (isinstance(number, int) and (number % self.units if power else number > 1))
            for number, members in self.terms.items()
        ]
        for units, before in self.passes.items():
            ratio = self.units / units
            if len(before) == len(self.terms):
                for a, (b, members) in zip(before, self.terms.items(), strict=True):
                    fitting = [k for k in range(3) if abs(abs(b / a) / ratio**k - 1) < 1e-2]
                    usual = [power] * ((-1 in members) != power)
                    wrong.append(power not in (fitting or usual))
        if any(wrong):
            actual = "sum" if power else "mean"
            rule = (
                f"was declared, and it is a {actual} over examples, or over some of them: their "
                "number enters each"
            )
            way_out = (
                f'Give loss_reduction="{actual}", or make the loss a {self.declared} over all.'
            )
            raise _check.reject("loss_reduction", self.declared, rule, way_out)
        if self.terms and self.units > 1:
            self.passes[self.units] = [*self.terms]


class UnitRows(torch.Tensor):
    """A tensor whose rows belong to units.

    Attributes:
      units: the unit of each row; None of a sum over units.
      members: the units that it is of.
      fault: the operation that mixed units; empty where none did. Memory that sums or mixed rows
        are written to has one too.
      is_probed: whether operations are computed again.
      reduction: of outputs of a private model, and of what a loss makes of them, how that is to
        add up units; None of a loader's rows.
    """

    units: tuple[int, ...] | None = None
    members: frozenset[int] = frozenset()
    fault = ""
    is_probed = False
    reduction: Reduction | None = None

    @classmethod
    def of(
        cls,
        tensor: Any,
        units: Iterable[int],
        *,
        is_probed: bool = False,
        reduction: Reduction | None = None,
    ) -> Any:
        """``tensor``, whose rows are of ``units``; mixed, where it has another number of rows.

        Args:
          tensor, units: rows, and the unit of each; what has no rows is given back.
          is_probed: whether operations are computed again.
          reduction: of outputs, what the loss is said to be, and the passes before.
        """
        if not is_array(tensor):
            return tensor
        rows, units = torch.Tensor.as_subclass(tensor, cls), tuple(units)
        is_whole = len(units) == tensor.shape[0]
        rows.units, rows.is_probed = units if is_whole else None, is_probed
        rows.reduction, rows.members = reduction, frozenset(units)
        rows.fault = "" if is_whole else f"collate_fn, {tensor.shape[0]} rows of {len(units)} units"
        return rows

    @classmethod
    def __torch_function__(
        cls, function: Any, kinds: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if (function is torch.Tensor.backward and not args[0].reduction) or (
            function is torch.autograd.grad
            and any(isinstance(x, torch.nn.Parameter) for x in pytree.tree_leaves((args, kwargs)))
        ):
            rule = "is computed from rows of a private batch, and nothing clips it or adds noise"
            way_out = "Call run.backward; for gradients of inputs, torch.autograd.grad(loss, x)."
            raise _check.reject("gradient", "of parameters", rule, way_out)
        if name in _SELECTIONS and not args:
            args = (kwargs.pop("tensor" if name == "split" else "input"),)
        result = super().__torch_function__(  # type: ignore[no-untyped-call]
            function, kinds, args, kwargs
        )
        if name.startswith("new_") or name.endswith("_like"):  # nothing of the values
            return pytree.tree_map(plain, result)
        is_in_place = name.startswith("__set") or name.endswith("_") != name.endswith("__")
        written = args[:1] if is_in_place else kwargs.get("out")
        leaves = pytree.tree_leaves((result, written))
        with torch._C.DisableTorchFunctionSubclass():
            if results := [x for x in leaves if isinstance(x, UnitRows)]:
                _name_units(name, functools.partial(function, *args, **kwargs), results)
            for x in pytree.tree_leaves(written):
                if isinstance(x, torch.Tensor):
                    storage: Any = x.untyped_storage()
                    storage.written = name
                    sharing = [y for y in results if y.untyped_storage() is storage]
                    if all(y.units is None for y in sharing):
                        storage.fault = name
                    # an item that is set may be a unit's own row or number, but not a sum
                    is_mixed = name == "__setitem__" and getattr(args[2], "units", 0) is None
                    if is_mixed and len(args[2].members) != 1:
                        storage.fault = "a sum"
        return result

    def as_subclass(self, cls: Any) -> Any:
        """The rows themselves, and not of another class, which would lose their units."""
        return self

    def __format__(self, specification: str) -> str:
        return format(plain(self), specification)  # PyTorch formats numbers of no subclass

    @staticmethod
    def fault_of(*tensors: torch.Tensor, mark: str = "fault") -> str:
        """What mixed units in one of ``tensors``, or in another one of the same memory.

        With the ``mark`` "written", what wrote rows to their memory, of one unit or of several.
        """
        # vmap's have no memory of their own
        with contextlib.suppress(RuntimeError), torch._C.DisableTorchFunctionSubclass():
            holders = (y for x in tensors for y in (x, x.untyped_storage()))
            return next(filter(None, (getattr(y, mark, "") for y in holders)), "")
        return ""


def is_array(x: object) -> bool:
    """True of a tensor that has rows."""
    return isinstance(x, torch.Tensor) and x.ndim > 0


def plain(x: Any) -> Any:
    """The tensor without its units; anything else as it is."""
    if not isinstance(x, UnitRows):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.as_subclass(x, torch.Tensor)


def units_of(tensors: Iterable[object]) -> tuple[int, ...]:
    """The unit of each row of a batch.

    Raises:
      UsageError: no tensor comes from a loader of a run, or rows of two belong to other units.
    """
    candidates = [x for x in tensors if isinstance(x, torch.Tensor)]
    rows = [x for x in candidates if isinstance(x, UnitRows)]
    every = {x.units for x in rows}
    fault = (
        UnitRows.fault_of(*rows)
        or "a sum" * (None in every)
        # memory of others that sums were written to; an item that was set may be a unit's own row
        or UnitRows.fault_of(*candidates).replace("__setitem__", "")
    )
    if fault or len(every) != 1:
        mixed = f"mixed by {fault}" if fault else "others"
        rule = "has rows that did not come from the run's loader, each of one unit"
        way_out = "Pass what `run.loader` gives (to evaluate: model.eval() first); change single "
        way_out += "records in the data set, or in collate_fn, one row for each."
        raise _check.reject("batch", mixed if rows else "not of the loader", rule, way_out)
    return every.pop() or ()


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Random numbers begin at seed 0 inside, and go on as before after it."""
    # a worker that was forked sees them, and cannot use them
    of_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(len(of_cuda))):
        for generator in (torch.default_generator, *of_cuda):
            generator.manual_seed(0)  # torch.manual_seed prints the stack to a text
        random.seed(0)
        np.random.seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _name_units(name: str, operation: _Operation, results: list[UnitRows]) -> None:
    """Set the attributes of the ``results`` of an operation."""
    arguments = pytree.tree_leaves((operation.args, operation.keywords))
    leaves = [x for x in arguments if isinstance(x, torch.Tensor)]
    sources = [x for x in leaves if isinstance(x, UnitRows)]
    fault = UnitRows.fault_of(*leaves)
    every = {x.units for x in sources}
    members = frozenset[int]().union(*(x.members for x in sources))
    units, is_probed = next(iter(every)), any(x.is_probed for x in sources)
    reduction = next(filter(None, (x.reduction for x in sources)), None)
    total = reduction.units if reduction else 0
    is_trained = reduction and any(
        x.requires_grad and not getattr(x, "reduction", None) for x in leaves
    )
    if not fault and (len(every) > 1 or is_trained):
        fault = f"{name} with " + (
            "other trainable tensors" if is_trained else "sums or other rows"
        )
    each: list[Any] = [units] * len(results)
    probe = functools.partial(_mixes, operation, sources[0], total)
    is_selection = units and name in _SELECTIONS and isinstance(operation.args[0], UnitRows)
    if fault:
        pass
    elif is_selection:
        with contextlib.suppress(IndexError, RuntimeError):  # along another axis
            each = _selected(operation, units or ())
    elif units and name in _RESHAPES and results[0].ndim:
        each = [[u for u in units for _ in range(len(results[0]) // len(units))]]
    elif is_probed and units != ():
        keeps_rows = units is not None and results[0].ndim and len(results[0]) == len(units)
        if not keeps_rows or probe(of_gradients=False):
            each = [None] * len(results)
            fault = name if probe(of_gradients=True) else ""
    divisor = None
    if is_probed and units and each[0] is None and not fault:
        # a number of one unit is a sum, which others are added to
        divisor = _divisor(operation, len(units)) if len({*units}) > 1 else 1
        # over rows that examples choose: how many these are enters each
        is_partial = divisor == len(units) > 1 and len(units) % len(members)
        fault = name if is_partial or divisor == 0 else ""
    for x, of_rows in zip(results, each, strict=False):
        is_whole = of_rows is not None and x.ndim and len(x) == len(of_rows) and not fault
        x.units, x.is_probed = tuple(of_rows) if is_whole else None, is_probed
        x.reduction, x.fault = reduction, fault
        # rows that numbers of examples choose are of all that they are chosen from
        x.members = frozenset(of_rows) if is_selection and not sources[1:] and of_rows else members
        if x.requires_grad and fault:
            x.register_hook(functools.partial(_refuse_mixed, fault))  # type: ignore[no-untyped-call]
        elif x.requires_grad and reduction and divisor:
            # not of x, which is a view: what is done to it in place drops its hooks
            node, output = x.grad_fn.next_functions[0]  # type: ignore[union-attr]
            note = functools.partial(reduction.add, divisor, members, output)
            node.register_prehook(note)  # type: ignore[union-attr]


def _refuse_mixed(fault: str, _: torch.Tensor) -> None:
    rule = f"mixes examples by {fault}, or divides by what depends on them"
    way_out = "Use a mean over losses of one example each; or PrivateRun.backward."
    raise _check.reject("loss", "not a mean over examples", rule, way_out)


def _selected(operation: _Operation, units: tuple[int, ...]) -> list[Any]:
    """The units of the rows that an operation selects; None of rows that are of several."""
    source, *rest = operation.args
    numbers = torch.tensor(units, device=source.device).view(-1, *[1] * (source.ndim - 1))
    moved = operation.func(numbers.expand(source.shape), *rest, **operation.keywords)
    each = [x.reshape(*x.shape or (1,), 1).flatten(1) for x in pytree.tree_leaves(moved)]
    return [x[:, 0].tolist() if x[:, 0].equal(x[:, -1]) else None for x in each]


def _mixes(operation: _Operation, source: UnitRows, total: int, *, of_gradients: bool) -> bool:
    """True if one row of what an operation is computed from moves what others get.

    Args:
      operation: with its arguments.
      source: the first tensor that it is computed from; its largest row is put in place of the
        smallest, and the other way round. Sums over units get other sizes, signs and order.
      total: units of the pass; 0 where it is not that of a private model.
      of_gradients: compare gradients of a sum of results by each row, and what sums decide, which
        has none; results otherwise.
    """
    count = 0 if source.units is None else len(source)
    order = plain(source).detach().double().reshape(max(1, count), -1).sum(1).argsort().tolist()

    def effects(row: int, other: int) -> list[torch.Tensor]:
        """Results or gradients, with ``row`` of the order in place of ``other``."""

        def change(x: torch.Tensor) -> torch.Tensor:
            if count:
                x[order[other]] = x[order[row]]
            elif x.is_floating_point():
                # rows along another axis may be compared, each with its own
                is_moved = total and 0 in [size % total for size in x.shape]
                x *= 1 + (row - other) * (0.5 if is_moved else 1e3 * torch.randn_like(x))
            return x

        results, gradients = _again(operation, change)
        decided = [x for x in results if not (count or x.is_floating_point())]
        compared = gradients + decided if of_gradients else results
        return [x.double().nan_to_num() for x in compared]

    try:
        reference = effects(0, 0)
        for row, other in ((0, -1), (-1, 0)):
            for a, b in zip(reference, effects(row, other), strict=True):
                difference = (a - b).abs()
                if count:
                    difference[order[other]] = 0.0
                if (difference > _TOLERANCE * a.abs().max()).any():
                    return True
    except _NOT_TAKEN:
        pass
    return False


def _divisor(operation: _Operation, count: int) -> int | None:
    """What a sum over ``count`` rows is divided by, as the gradients without the last one show.

    1 where those of the others stay, ``count`` where a share of its goes to all others, 0 where
    neither; None where that cannot be told.
    """

    def outcome(kept: int) -> tuple[list[torch.Size], torch.Tensor]:
        results, gradients = _again(operation, lambda x: x[:kept])
        each = torch.cat([x[: count - 1].ravel() for x in gradients])
        # an example whose loss is not finite adds nothing
        return [x.shape for x in results], each.nan_to_num(0.0, 0.0, 0.0)

    try:
        (shapes, whole), (others, without) = outcome(count), outcome(count - 1)
    except _NOT_TAKEN:
        return None
    near = _TOLERANCE / count * whole.abs().max()
    if shapes != others or not near:
        return 1  # of entries that are not added up
    weights = {1: 1.0, count: count / (count - 1)}
    fitting = [k for k, x in weights.items() if ((without - x * whole).abs() <= near).all()]
    return sum(fitting)  # at most one


def _again(
    operation: _Operation,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(results, gradients of a sum of them by each row) of an operation on changed rows.

    In float64, where one row in many shows.

    Args:
      operation: with its arguments.
      change: of a copy of each tensor of rows.
    """
    inputs: list[torch.Tensor] = []

    def changed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        copy = plain(x).detach().clone()
        copy = copy.double() if copy.is_floating_point() else copy
        if not isinstance(x, UnitRows):
            return copy
        copy = change(copy)
        if not copy.is_floating_point():
            return copy
        inputs.append(copy.requires_grad_())
        return copy * 1.0  # which may be changed in place

    with seeded(), torch.enable_grad():
        args, kwargs = pytree.tree_map(changed, (operation.args, operation.keywords))
        kwargs.pop("out", None)  # which autograd does not take
        made = operation.func(*args, **kwargs)
        results = [x for x in pytree.tree_leaves(made) if isinstance(x, torch.Tensor)]
        smooth = [(x * torch.randn_like(x)).sum() for x in results if x.requires_grad]
        grads = torch.autograd.grad(smooth, inputs, materialize_grads=True) if smooth else ()
        return [x.detach() for x in results], list(grads)
