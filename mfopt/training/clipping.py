"""Bounding what one privacy unit adds to the sum of a step.

A clipping is a value that the training loop is given. It maps one unit's gradient to a pytree
whose l2 norm over all leaves together is at most ``sensitivity``, whatever the gradient was:
that bound, and nothing else about the data, is what the noise is calibrated to.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt import _check

PyTree = Any

# The float32 norm of a leaf is itself rounded. Contributions aim this much below the bound, so
# that the true norm of what is added stays below it.
_MARGIN = 1.0 - 2.0**-18


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip_norm", _check.positive("clip_norm", self.clip_norm))

    @property
    def sensitivity(self) -> float:
        """Most that one unit adds to a step's sum: what a noise multiplier is relative to."""
        return 1.0 if self.normalized else self.clip_norm

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return dataclasses.asdict(self)

    def __call__(self, gradient: PyTree) -> Clipped:
        """The bounded contribution of one unit with this ``gradient``."""
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        leaves, structure = jax.tree.flatten(gradient)
        squares = [_sum_of_squares(leaf) for leaf in leaves]
        norm = jnp.sqrt(sum(squares, start=jnp.float32(0)))
        layers = _layers(gradient) if self.per_layer else [0] * len(leaves)
        bound = self.clip_norm / max(1, len(set(layers))) ** 0.5
        target = _MARGIN * (bound / self.clip_norm if self.normalized else bound)
        usable = jnp.isfinite(norm)
        scaled, active = [], jnp.bool_(False)
        for layer in dict.fromkeys(layers):
            members = [i for i, name in enumerate(layers) if name == layer]
            length = jnp.sqrt(sum((squares[i] for i in members), start=jnp.float32(0)))
            active |= length > bound
            # max in the denominator: no division by zero, and a factor of at most target / bound
            factor = target / jnp.maximum(length, bound)
            scaled += [(i, jnp.where(usable, leaves[i] * factor, 0.0)) for i in members]
        ordered = [leaf for _, leaf in sorted(scaled, key=lambda pair: pair[0])]
        return Clipped(jax.tree.unflatten(structure, ordered), norm, active | ~usable)


@dataclasses.dataclass(frozen=True)
class NoClipping:
    """Leave gradients as they are: the non-private baseline. No guarantee of any kind."""

    @property
    def sensitivity(self) -> float:
        """Unbounded."""
        return float("inf")

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return {"clip_norm": None}


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    # row by row first: one running float32 sum over millions of entries would drift
    rows = jnp.sum(jnp.square(jnp.atleast_1d(leaf)), axis=-1)
    return jnp.sum(rows)


def _layers(tree: PyTree) -> list[str]:
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return [jax.tree_util.keystr(path[:-1]) if len(path) > 1 else str(path) for path in paths]
