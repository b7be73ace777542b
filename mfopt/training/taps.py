"""Taps: where a loss multiplies parameters with activations, found in its traced program.

A matrix W that a loss uses only as x W (a linear layer, a head, an adapter), as rows picked by
number (an embedding) or as both (a tied one) has the gradient Σ uᵀ v over its uses and positions,
with u and v the activations that went in and the gradients that came out. A *tap* is a zero
that is added to what comes out; the gradient with respect to it is v. Nothing is asked of
the model: the program that JAX traces of its loss is read, and a parameter with any other use is
left to be differentiated as usual.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from mfopt._runtime._types import PyTree

CALLS = ("jit", "pjit", "closed_call", "core_call")
_MODES = ("FILL_OR_DROP", "PROMISE_IN_BOUNDS", "CLIP")


class _View(NamedTuple):
    """A value that is parameter number ``leaf`` with its axes in the order ``axes``, cast."""

    leaf: int
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a parameter meets an activation.

    Attributes:
        leaf: number of the parameter.
        rows: its axes that the activation meets; ``columns``: the others. The gradient as a
            matrix (rows, columns) is Σ uᵀ v over the use's ``positions``.
        picked: the activation is a number of a row, not a vector.
        shape, dtype: of the tap.
        order: axes of the tap in the order positions, columns.
    """

    leaf: int
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    picked: bool
    positions: int
    shape: tuple[int, ...]
    dtype: Any
    order: tuple[int, ...]

    def matrix(self, gradient: jax.Array) -> jax.Array:
        """The tap's gradient as (positions, columns)."""
        return gradient.transpose(self.order).reshape(self.positions, -1)


@dataclasses.dataclass(frozen=True)
class Taps:
    """A loss of one record whose tapped parameters have products as their only uses.

    ``program`` is the loss, flat; ``uses`` are in its order, of the tapped parameters only.
    """

    program: ClosedJaxpr
    uses: tuple[Use, ...]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Numbers of the tapped parameters."""
        return tuple(sorted({use.leaf for use in self.uses}))

    def keep(self, leaves: Sequence[int]) -> Taps:
        """The taps of these parameters only."""
        uses = tuple(use for use in self.uses if use.leaf in leaves)
        return dataclasses.replace(self, uses=uses)

    def zeros(self) -> list[jax.Array]:
        """Taps that change nothing, of one record."""
        return [jnp.zeros(use.shape, use.dtype) for use in self.uses]

    def __call__(
        self, arguments: Sequence[jax.Array], taps: Sequence[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        """(loss, u of each use): (positions, rows), or (positions,) numbers of rows."""
        inputs: list[jax.Array] = []
        waiting = iter(zip(self.uses, taps, strict=True))

        def meet(placed: Use, u: jax.Array, output: jax.Array) -> jax.Array:
            use, tap = next(waiting)
            assert use == placed  # the same program gives the same uses
            inputs.append(u)
            return output + tap

        walk = _Walk(meet, self.leaves)
        views = [_whole(i, x) if i in self.leaves else None for i, x in enumerate(arguments)]
        (loss,), _ = walk.run(self.program.jaxpr, self.program.consts, arguments, views)
        return loss, inputs


def find(loss: Callable[..., jax.Array], params: PyTree, *constants: PyTree) -> Taps:
    """The taps of ``loss(params, *rest)``; arrays or their shapes.

    A parameter is tapped if its only uses are products without batch axes and rows picked along
    its first axis, all with the same split of its axes.
    """
    program = jax.make_jaxpr(loss)(params, *constants)
    shapes = program.in_avals
    leaves = jax.tree.leaves(params)
    uses: list[Use] = []

    def meet(use: Use, u: jax.Array, output: jax.Array) -> jax.Array:
        uses.append(use)
        return output

    def trial(*arguments: jax.Array) -> PyTree:
        walk = _Walk(meet, range(len(leaves)))
        views = [_whole(i, x) if i < len(leaves) else None for i, x in enumerate(arguments)]
        outs, kept = walk.run(program.jaxpr, program.consts, arguments, views)
        walk.other |= {view.leaf for view in kept if view}
        unusable.update(walk.other)
        return outs

    unusable: set[int] = set()
    jax.eval_shape(trial, *(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in shapes))
    for leaf in {use.leaf for use in uses}:
        mine = [use for use in uses if use.leaf == leaf]
        halves = {frozenset((use.rows, use.columns)) for use in mine}
        if len(halves) > 1 or not mine[0].columns:
            unusable.add(leaf)
    return Taps(program, tuple(use for use in uses if use.leaf not in unusable))


def _whole(leaf: int, value: Any) -> _View | None:
    # a vector's or a number's gradient is as small as what it is made of
    return _View(leaf, tuple(range(value.ndim))) if value.ndim > 1 else None


class _Walk:
    """Evaluates a program, equation by equation, with an eye on some of its arguments.

    ``meet(use, u, out)`` is called at each use of the ``tapped`` and gives what stands in for
    ``out``; ``other`` collects the numbers of parameters that have another use.
    """

    def __init__(
        self,
        meet: Callable[[Use, jax.Array, jax.Array], jax.Array],
        tapped: Container[int],
    ) -> None:
        self._meet, self._tapped = meet, tapped
        self.other: set[int] = set()

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        arguments: Sequence[Any],
        views: Sequence[_View | None],
    ) -> tuple[list[Any], list[_View | None]]:
        """The results of ``jaxpr``, and which of them are views."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, arguments, strict=True))
        views_of = {v: view for v, view in zip(jaxpr.invars, views, strict=True) if view}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        def view_of(atom: Any) -> _View | None:
            return None if isinstance(atom, Literal) else views_of.get(atom)

        for eqn in jaxpr.eqns:
            inputs, views_in = [read(v) for v in eqn.invars], [view_of(v) for v in eqn.invars]
            outs, kept = self._equation(eqn, inputs, views_in, jaxpr.debug_info)
            for var, output, view in zip(eqn.outvars, outs, kept, strict=True):
                values[var] = output
                if view:
                    views_of[var] = view
        return [read(v) for v in jaxpr.outvars], [view_of(v) for v in jaxpr.outvars]

    def _equation(
        self, eqn: Any, inputs: list[Any], views_in: list[_View | None], about: Any
    ) -> tuple[list[Any], list[_View | None]]:
        views, name = [view for view in views_in if view], eqn.primitive.name
        if views and name in CALLS:
            inner = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
            return self.run(inner.jaxpr, inner.consts, inputs, views_in)
        if views and name == "convert_element_type":
            return evaluate(eqn, inputs, about), [views[0]]
        if views and name == "transpose":
            axes = tuple(views[0].axes[axis] for axis in eqn.params["permutation"])
            return evaluate(eqn, inputs, about), [_View(views[0].leaf, axes)]
        outputs = evaluate(eqn, inputs, about)
        kept: list[_View | None] = [None] * len(outputs)
        views_in = [view if view and view.leaf in self._tapped else None for view in views_in]
        views, met = [view for view in views_in if view], None
        if not views:
            return outputs, kept
        if len(views) == 1 and name == "dot_general":
            met = _product(eqn, inputs, views_in, outputs[0])
        if len(views) == 1 and name == "gather":
            met = _rows(eqn, inputs, views_in, outputs[0])
        if met is None:
            self.other |= {view.leaf for view in views}
        else:
            outputs = [self._meet(*met, outputs[0])]
        return outputs, kept


def evaluate(eqn: Any, inputs: list[Any], about: Any) -> list[Any]:
    """The results of one equation, by JAX's own evaluation."""
    values = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if not isinstance(v, Literal)}
    program = Jaxpr([], list(values), list(eqn.outvars), [eqn], eqn.effects, debug_info=about)
    return list(jaxpr_as_fun(ClosedJaxpr(program, ()))(*values.values()))


def _product(
    eqn: Any, inputs: list[Any], views_in: list[_View | None], output: jax.Array
) -> tuple[Use, jax.Array] | None:
    """The use of a matrix in a product, and what it is multiplied with."""
    contracted, batched = eqn.params["dimension_numbers"]
    if any(map(len, batched)):
        return None
    side = 0 if views_in[0] else 1  # on which side the parameter stands
    view, x = views_in[side], inputs[1 - side]
    assert view is not None
    pairs = zip(contracted[side], contracted[1 - side], strict=True)
    met = {view.axes[ours]: theirs for ours, theirs in pairs}
    rows = tuple(sorted(met))
    columns = tuple(axis for axis in range(len(view.axes)) if axis not in met)
    free = [axis for axis in range(x.ndim) if axis not in contracted[1 - side]]
    positions = math.prod(x.shape[axis] for axis in free)
    u = x.transpose([*free, *(met[axis] for axis in rows)]).reshape(positions, -1)
    # what comes out has the free axes of the left side first
    remaining_axes = [
        axis for axis in view.axes if axis not in met
    ]  # of the parameter, in the view's order
    offset = 0 if side == 0 else len(free)
    position = {axis: offset + index for index, axis in enumerate(remaining_axes)}
    begin = len(remaining_axes) if side == 0 else 0
    order = (*range(begin, begin + len(free)), *(position[axis] for axis in columns))
    return Use(view.leaf, rows, columns, False, positions, output.shape, output.dtype, order), u


def _rows(
    eqn: Any, inputs: list[Any], views_in: list[_View | None], output: jax.Array
) -> tuple[Use, jax.Array] | None:
    """The use of a matrix as rows picked by number, and the numbers."""
    view, dimension_numbers = views_in[0], eqn.params["dimension_numbers"]
    if view is None or view.axes != tuple(range(len(view.axes))):
        return None
    table, numbers = inputs
    plain = (
        dimension_numbers.collapsed_slice_dims == (0,)
        and dimension_numbers.start_index_map == (0,)
        and not dimension_numbers.operand_batching_dims
        and dimension_numbers.offset_dims == tuple(range(numbers.ndim - 1, output.ndim))
        and tuple(eqn.params["slice_sizes"]) == (1, *table.shape[1:])
        and eqn.params["mode"].name in _MODES
    )
    if not plain:
        return None
    u, count = numbers.reshape(-1), table.shape[0]
    if eqn.params["mode"].name == "CLIP":
        u = jnp.clip(u, 0, count - 1)
    u = jnp.where((u >= 0) & (u < count), u, count)  # a row that is not there has no gradient
    columns = tuple(range(1, len(view.axes)))
    order = tuple(range(output.ndim))
    return Use(view.leaf, (0,), columns, True, u.size, output.shape, output.dtype, order), u
