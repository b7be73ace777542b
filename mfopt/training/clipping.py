"""Bounding what one privacy unit adds to the sum of a step.

A clipping maps one unit's gradient to a pytree whose l2 norm over all leaves together is at most
``sensitivity``, whatever the gradient was: all of the data that the noise is calibrated to.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject, PyTree

# The float32 norm of a leaf is itself rounded. Contributions aim this much below the bound, so
# that the true norm of what is added stays below it.
_MARGIN = 1.0 - 2.0**-18
# Squares of entries below 1e-19 are 0 in float32: of 10^10 entries together less than the margin.
_LEAST = 1e-10


class Clipped(NamedTuple):
    """A bounded contribution: ``gradient`` (float32 pytree), its former ``norm``, ``active``.

    ``active`` is True where the bound changed something.
    """

    gradient: PyTree
    norm: jax.Array
    active: jax.Array


class Factors(NamedTuple):
    """Factor of ``each`` leaf, 0 for a unit that contributes nothing; the rest as in Clipped."""

    each: PyTree
    norm: jax.Array
    active: jax.Array


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Scale a unit's gradient down to norm ``clip_norm``; smaller ones pass.

    Args:
        clip_norm: the bound on the l2 norm over the whole pytree.
        per_layer: bound every layer on its own, by ``clip_norm / sqrt(number of layers)``, so that
            the whole still stays within ``clip_norm`` (McMahan et al. 2018). A layer is
            the set of leaves with the same parent in the pytree (a kernel and its bias).
        normalized: divide the clipped gradient by ``clip_norm`` (De et al. 2022). The
            learning rate then no longer has to follow the clip norm.

    A gradient with a NaN or an infinity, or too long for its float32 norm, contributes nothing.

    >>> clipping = Clipping(clip_norm=1.0)
    >>> clipped = clipping({"w": jnp.array([3.0, 4.0])})
    >>> [round(float(x), 3) for x in clipped.gradient["w"]], float(clipped.norm)
    ([0.6, 0.8], 5.0)

    Formal guarantee: the result's l2 norm is at most :attr:`sensitivity` for every input.
    """

    clip_norm: float
    per_layer: bool = False
    normalized: bool = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__call__" in vars(cls):
            raise TypeError(f"{cls.__name__}: define factors(), which is what training applies")

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", _check.positive("clip_norm", self.clip_norm))
        if self.clip_norm < _LEAST:
            rule = f"must be at least {_LEAST:g}: float32 loses the squares of smaller gradients"
            way_out = "Scale the loss, and the clip norm with it."
            raise _check.reject("clip_norm", self.clip_norm, rule, way_out)

    @property
    def bound(self) -> float:
        """Most that one unit adds to a step's sum."""
        return 1.0 if self.normalized else self.clip_norm

    @property
    def sensitivity(self) -> float:
        """Largest change of a step's sum by one unit: what a noise multiplier is relative to."""
        return self.bound

    def describe(self) -> JsonObject:
        """JSON-compatible description."""
        return dataclasses.asdict(self)

    def __call__(self, gradient: PyTree) -> Clipped:
        """The bounded contribution of one unit with this ``gradient``."""
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        factors = self.factors(jax.tree.map(sum_of_squares, gradient))
        # where, not a product alone: 0 times infinity is no number
        bounded = jax.tree.map(
            lambda leaf, factor: jnp.where(factor > 0, leaf * factor, 0.0), gradient, factors.each
        )
        return Clipped(bounded, factors.norm, factors.active)

    def factors(self, squares: PyTree) -> Factors:
        """Factors to multiply one unit's gradient with, from the squared norms of its leaves.

        ``squares``: a pytree like the parameters, of float32 scalars no less than the true values.
        """
        by_path, structure = jax.tree.flatten_with_path(squares)
        leaves = [leaf for _, leaf in by_path]
        norm = jnp.sqrt(sum(leaves, start=jnp.float32(0)))
        # a leaf at the top is a layer of its own
        layers = [path[:-1] or path if self.per_layer else () for path, _ in by_path]
        bound = self.clip_norm / max(1, len(set(layers))) ** 0.5
        target = _MARGIN * (bound / self.clip_norm if self.normalized else bound)
        usable = jnp.isfinite(norm)
        factor, active = {}, jnp.bool_(False)
        for layer in dict.fromkeys(layers):
            members = [leaf for leaf, name in zip(leaves, layers, strict=True) if name == layer]
            length = jnp.sqrt(sum(members, start=jnp.float32(0)))
            active |= length > bound
            # max in the denominator: no division by zero, and a factor of at most target / bound
            factor[layer] = jnp.where(usable, target / jnp.maximum(length, bound), 0.0)
        of_leaves = jax.tree.unflatten(structure, [factor[layer] for layer in layers])
        return Factors(of_leaves, norm, active | ~usable)


@dataclasses.dataclass(frozen=True)
class NoClipping:
    """Leave gradients as they are: the non-private baseline. No guarantee of any kind."""

    sensitivity = float("inf")


def sum_of_squares(leaf: jax.Array) -> jax.Array:
    """Sum of squares of a float32 array's entries."""
    # row by row first: one running float32 sum over millions of entries would drift
    rows = jnp.sum(jnp.square(jnp.atleast_1d(leaf)), axis=-1)
    return jnp.sum(rows)
