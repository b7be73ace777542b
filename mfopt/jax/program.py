"""The gradient of one example as JAX traced it: what it does, and its matrices as products.

A traced gradient is a function of parameters and example alone, and ``jax.vmap`` keeps examples
apart, unless it calls the host or brings a batching rule of its own: such programs are refused.

Where the gradient of a matrix is the last product of a program, Σ_t u_tᵀ v_t, that product is left
out, and the clipped sum over all examples is one product of all u with all v: the gradient of a
single example is never formed (Bu et al. 2023, "book-keeping").
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from mfopt._runtime import _check
from mfopt._runtime._pytree import STATIC, pytree
from mfopt._runtime._types import PyTree
from mfopt.noise import uses
from mfopt.training.clipping import sum_of_squares

_HOST = {"pure_callback", "io_callback", "infeed", "outfeed", "ffi_call", "custom_vmap_call"}
# products in full float32: what is summed has to have the norm that was computed
_EXACT = jax.lax.Precision.HIGHEST
_SIGMAS, _LARGE = 6.0, 2**28  # of a bound for rounding; parameters


@pytree
@dataclasses.dataclass(frozen=True)
class Product:
    """The gradient of one leaf of one example, Σ_t u_tᵀ v_t, which is not formed.

    Attributes:
      u, v: (positions, rows) and (positions, columns), float32; v has entries of at most 1.
      shape: of the product's axes, those of the rows first.
      order: of these axes in the leaf.
    """

    u: jax.Array
    v: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    order: tuple[int, ...] = dataclasses.field(metadata=STATIC)

    def square(self) -> jax.Array:
        """Squared norm of the gradient, not below its true value for rounding; scalar float32.

        It is Σ_{s,t} (u_s·u_t)(v_s·v_t) (Goodfellow 2015; Li et al. 2022, section 4), whose terms
        can cancel. A product of n numbers in float32 is off by more than λ √n 2⁻²⁴ times its terms'
        size with probability 2 exp(-λ²/2) each (Higham and Mary 2019, thm. 3.1, for independent
        rounding); λ = 6 times the root of the sum of the squared errors is added.
        """
        u, v = self.u, self.v
        if len(u) == 1:
            return sum_of_squares(u) * sum_of_squares(v)
        grams = [jnp.matmul(side, side.T, precision=_EXACT) for side in (u, v)]
        lengths = [jnp.sum(jnp.square(side), axis=-1) for side in (u, v)]
        slack = 2 * _SIGMAS * math.sqrt(u.shape[1] + v.shape[1] + 2 * len(u)) * 2.0**-24
        squared = jnp.sum(jnp.sum(grams[0] * grams[1], axis=-1))
        return jnp.maximum(squared, 0.0) + slack * jnp.sum(lengths[0] * lengths[1])

    def total(self, factors: jax.Array) -> jax.Array:
        """Σ of the gradients of all examples, each times its factor; of leaves with these in front.

        An example of factor 0 adds 0 whatever it holds.
        """
        factors = factors[:, None, None]
        u = jnp.where(factors > 0, self.u, 0.0)
        v = jnp.where(factors > 0, self.v * factors, 0.0)
        u, v = (side.reshape(-1, side.shape[-1]) for side in (u, v))
        summed = jnp.matmul(u.T, v, precision=_EXACT)
        return summed.reshape(self.shape).transpose(self.order)


@dataclasses.dataclass(frozen=True)
class _Late:
    """A product that is computed where something other than a leaf of the gradient needs it.

    Attributes:
      form: gives it in a list, once.
      inputs: the two sides.
      contracted: axes of each that are summed over.
      order: of the product's axes, after transpositions.
    """

    form: Callable[[], list[jax.Array]]
    inputs: tuple[jax.Array, jax.Array]
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    order: tuple[int, ...]

    def transposed(self, permutation: Sequence[int]) -> _Late:
        """The same with its axes permuted."""
        return dataclasses.replace(self, order=tuple(self.order[axis] for axis in permutation))

    def formed(self) -> jax.Array:
        """The product as an array."""
        (product,) = self.form()
        return product.transpose(self.order)

    def leaf(self, trained: int) -> Product | jax.Array:
        """A leaf of the gradient: a product where that is cheaper; ``trained``: numbers of all."""
        sides: list[jax.Array] = []
        shape: list[int] = []
        for side, axes in zip(self.inputs, self.contracted, strict=True):
            free = [axis for axis in range(side.ndim) if axis not in axes]
            positions = math.prod(side.shape[axis] for axis in axes)
            sides.append(side.transpose((*axes, *free)).reshape(positions, -1))
            shape += [side.shape[axis] for axis in free]
        # those of several must be in full float32, which is slow on an accelerator: a gradient of
        # up to a gibibyte is formed there
        is_wanted = trained > _LARGE or jax.default_backend() == "cpu"
        is_smaller = 2 * positions**2 <= math.prod(shape)  # Bu et al. 2022, section 4
        if positions > 1 and not (is_wanted and is_smaller):
            return self.formed()
        u, v = (side.astype(jnp.float32) for side in sides)
        # what is lost below the smallest float32 is lost of the product's entries, as in those of
        # a gradient that is formed, and not of a factor whose partner is large
        scale = jnp.max(jnp.abs(v), axis=1, keepdims=True, initial=0.0)
        scale += scale == 0
        return Product(u * scale, v / scale, tuple(shape), self.order)


@dataclasses.dataclass(frozen=True)
class GradientProgram:
    """``function(params, example)``, a pytree of gradients, as it was traced.

    Attributes:
      program: of the leaves of all arguments.
      gradients: the pytree of what comes out, shapes and types.
      held: arrays of ``params`` that are not trained.
    """

    program: ClosedJaxpr
    gradients: PyTree
    held: list[jax.Array]

    @classmethod
    def of(
        cls, function: Callable[..., PyTree], params: PyTree, *constants: PyTree
    ) -> GradientProgram:
        """Trace ``function(params, *rest)``, where ``constants`` is an example and what is public.

        Raises:
          UsageError: it calls the host, has batching rules of its own, or changes what it is given
            or uses.
        """
        leaves, structure = jax.tree.flatten(params)
        rule = "changes parameters, a module or a stream of keys, of one example: that is lost"
        way_out = "Use no batch norm; give dropout a key for each example, in the data."
        changing = _check.reject("function", function, rule, way_out)

        def gradient(arrays: list[jax.Array], *constants: PyTree) -> PyTree:
            traced = iter(arrays)
            params = jax.tree.unflatten(
                structure, [next(traced) if _is_array(leaf) else leaf for leaf in leaves]
            )
            values = jax.tree.leaves(params)
            gradients = function(params, *constants)
            if list(map(id, values)) != list(map(id, jax.tree.leaves(params))):
                raise changing
            return gradients

        try:
            program, gradients = jax.make_jaxpr(gradient, return_shape=True)(
                list(filter(_is_array, leaves)), *constants
            )
        except Exception as error:
            if type(error).__name__ != "TraceContextError":  # of NNX
                raise
            raise changing from error
        for name in sorted(_HOST.intersection(_primitives(program.jaxpr))):
            rule = f"uses {name}, in which examples can meet: no gradient is surely its own"
            way_out = "Use operations of JAX alone, or make the gradients yourself (run.mean)."
            raise _check.reject("function", function, rule, way_out)
        nnx: Any = sys.modules.get("flax.nnx")
        is_module = nnx is not None and isinstance(params, nnx.Module)
        held_arrays = jax.tree.leaves(nnx.state(params, nnx.Not(nnx.Param))) if is_module else []
        return cls(program, gradients, held_arrays)

    @property
    def constants(self) -> jax.Array:
        """A digest of the arrays that gradients depend on beside the arguments: uint32 (3,).

        Not of single numbers and keys: a rate, a step and random bits may change.
        """
        arrays = [jnp.asarray(x) for x in (*self.program.consts, *self.held)]
        kinds = jnp.floating, jnp.signedinteger, jnp.bool_  # a key is of unsigned numbers
        arrays = [
            x for x in arrays if x.size > 1 and any(jnp.issubdtype(x.dtype, k) for k in kinds)
        ]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            return uses.fingerprint(arrays)
        with jax.ensure_compile_time_eval():  # what is compiled in is read once
            return uses.fingerprint(arrays)

    def __call__(self, *arguments: PyTree) -> list[Product | jax.Array]:
        """The gradient of one example, leaf by leaf; under ``jax.vmap`` over examples."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(arguments) if _is_array(leaf)]
        trained = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.gradients))
        outs = _run(self.program.jaxpr, self.program.consts, leaves)
        return [leaf.leaf(trained) if isinstance(leaf, _Late) else leaf for leaf in outs]


def _is_array(leaf: object) -> bool:
    """False of what a module holds beside arrays, such as its activation in equinox."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)


def _run(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results of a program; products are late."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs, name = [read(atom) for atom in eqn.invars], eqn.primitive.name
        if name == "jit":
            inner = eqn.params["jaxpr"]
            outs = _run(inner.jaxpr, inner.consts, inputs)
        elif name == "transpose" and isinstance(inputs[0], _Late):
            outs = [inputs[0].transposed(eqn.params["permutation"])]
        else:
            inputs = [x.formed() if isinstance(x, _Late) else x for x in inputs]
            form = functools.partial(_evaluate, eqn, inputs, jaxpr.debug_info)
            is_product = name == "dot_general" and not any(eqn.params["dimension_numbers"][1])
            if is_product:
                axes = tuple(range(eqn.outvars[0].aval.ndim))  # type: ignore[attr-defined]
                contracted, _ = eqn.params["dimension_numbers"]
                outs = [_Late(functools.cache(form), tuple(inputs), contracted, axes)]
            else:
                outs = form()
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _evaluate(eqn: Any, inputs: list[Any], about: Any) -> list[Any]:
    """The results of one equation, by JAX's own evaluation."""
    values = {v: x for v, x in zip(eqn.invars, inputs, strict=True) if not isinstance(v, Literal)}
    program = Jaxpr([], list(values), eqn.outvars, [eqn], eqn.effects, debug_info=about)
    return jaxpr_as_fun(ClosedJaxpr(program, ()))(*values.values())


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    """Names of all operations of a program and of those inside it."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for part in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner := getattr(part, "jaxpr", part), Jaxpr):
                yield from _primitives(inner)
