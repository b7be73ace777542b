"""Bounding what one privacy unit adds to the sum of a step.

A clipping maps one unit's gradient to a pytree whose l2 norm over all leaves together is at most
``sensitivity``, whatever the gradient was: all of the data that the noise is calibrated to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject, PyTree

# The float32 norm of a leaf is itself rounded. Contributions aim this much below the bound, so
# that the true norm of what is added stays below it.
_MARGIN = 1.0 - 2.0**-18
# Squares of entries below 1e-19 are 0 in float32: of 10^10 entries together less than the margin.
_LEAST = 1e-10


Sums = tuple[jax.Array, jax.Array]
UnitLoss = Callable[[PyTree, jax.Array, jax.Array], tuple[jax.Array, Sums]]


class Clipped(NamedTuple):
    """A bounded contribution: ``gradient`` (float32 pytree), its former ``norm``, ``active``.

    ``active`` is True where the bound changed something.
    """

    gradient: PyTree
    norm: jax.Array
    active: jax.Array


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Scale a unit's gradient down to norm ``clip_norm``; smaller ones pass.

    Args:
        clip_norm: the bound on the l2 norm over the whole pytree.
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
    normalized: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", _check.positive("clip_norm", self.clip_norm))
        if self.clip_norm < _LEAST:
            rule = f"must be at least {_LEAST:g}: float32 loses the squares of smaller gradients"
            way_out = "Scale the loss, and the clip norm with it."
            raise _check.reject("clip_norm", self.clip_norm, rule, way_out)

    @property
    def sensitivity(self) -> float:
        """Largest change of a step's sum by one unit: what a noise multiplier is relative to."""
        return 1.0 if self.normalized else self.clip_norm

    def describe(self) -> JsonObject:
        """JSON-compatible description."""
        return dataclasses.asdict(self)

    def __call__(self, gradient: PyTree) -> Clipped:
        """The bounded contribution of one unit with this ``gradient``."""
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        leaves = jax.tree.leaves(jax.tree.map(sum_of_squares, gradient))
        norm = jnp.sqrt(sum(leaves, start=jnp.float32(0)))
        factor = self.factor(norm)
        # where, not a product alone: 0 times infinity is no number
        bounded = jax.tree.map(lambda leaf: jnp.where(factor > 0, leaf * factor, 0.0), gradient)
        return Clipped(bounded, norm, (norm > self.clip_norm) | ~jnp.isfinite(norm))

    def factor(self, norm: jax.Array) -> jax.Array:
        """Factor of a unit's gradient of this norm; 0 where the norm is not finite."""
        # max in the denominator: no division by zero
        factor = _MARGIN * self.sensitivity / jnp.maximum(norm, self.clip_norm)
        return jnp.where(jnp.isfinite(norm), factor, 0.0)

    def contribution(
        self, loss: UnitLoss, params: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> tuple[Clipped, Sums]:
        """(What one unit adds to a step's sum, the sums over its records that ``loss`` reports).

        Args:
          loss: (mean over a unit's records, sums over them) of parameters, tokens and mask.
          params: parameters of the step.
          tokens, mask: records of the unit, (G, L).
        """
        gradient, sums = jax.grad(loss, has_aux=True)(params, tokens, mask)
        return self(gradient), sums


@dataclasses.dataclass(frozen=True)
class NoClipping:
    """Leave gradients as they are: the non-private baseline. No guarantee of any kind."""

    sensitivity = float("inf")

    def contribution(self, loss: UnitLoss, *arguments: PyTree) -> tuple[Clipped, Sums]:
        """The gradient of ``loss``, whose norm is not computed, and the sums that it reports."""
        gradient, sums = jax.grad(loss, has_aux=True)(*arguments)
        return Clipped(gradient, jnp.float32(0), jnp.bool_(False)), sums


def sum_of_squares(leaf: jax.Array) -> jax.Array:
    """Sum of squares of a float32 array's entries."""
    # row by row first: one running float32 sum over millions of entries would drift
    rows = jnp.sum(jnp.square(jnp.atleast_1d(leaf)), axis=-1)
    return jnp.sum(rows)
