"""The sum of clipped per-unit gradients, one fixed-size microbatch at a time.

A *unit* is what is sampled and clipped: a user with up to G records (ULS), or one record (ELS,
group privacy; then G = 1). A step's batch of any size is a sequence of microbatches of ``m``
units, each of one compiled shape; only ``m`` gradients are ever held at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mfopt.training.clipping import Clipping, NoClipping, Sums, UnitLoss
from mfopt.training.models import Model, PyTree, num_targets

Adder = Callable[["Totals", PyTree, PyTree, jax.Array, jax.Array], "Totals"]


class Statistics(NamedTuple):
    """Sums over the units of a step. Computed from the data without noise: not private.

    ``loss`` and ``targets``: Σ loss·targets and Σ targets over records, so that their quotient is
    the mean loss per token. ``norm``: Σ of gradient norms before clipping.
    """

    units: jax.Array
    clipped: jax.Array
    norm: jax.Array
    loss: jax.Array
    targets: jax.Array
    tokens: jax.Array


class Totals(NamedTuple):
    """Accumulated sums of a step: the clipped ``gradient`` sum (float32 pytree) and statistics."""

    gradient: PyTree
    statistics: Statistics

    @classmethod
    def zero(cls, params: PyTree) -> Totals:
        """The sums over no unit."""
        gradient = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        return cls(gradient, Statistics(*(jnp.float32(0) for _ in Statistics._fields)))


def mean_loss(losses: jax.Array, mask: jax.Array) -> tuple[jax.Array, Sums]:
    """Mean loss over one unit's records, and (Σ loss·targets, Σ targets) for reporting.

    A row of ``mask`` (G, L) without a real token is padding and does not count in the mean.
    Source: Charles et al. 2024, Algorithm 2, line "g_u^t".
    """
    losses = losses.astype(jnp.float32)
    present = jnp.any(mask, axis=-1)
    mean = jnp.sum(jnp.where(present, losses, 0.0)) / jnp.maximum(jnp.sum(present), 1)
    targets = num_targets(mask).astype(jnp.float32)
    return mean, (jnp.sum(losses * targets), jnp.sum(targets))


def microbatch_adder(model: Model, clipping: Clipping | NoClipping) -> Adder:
    """``add(totals, params, frozen, tokens (m, G, L), mask (m, G, L)) -> totals``, to be jitted.

    Each of the m units' contributions is clipped on its own, and only then summed in float32
    (``docs/training/algorithms.md``). Units without any token (padding, or users without records)
    add exactly 0. Where nothing is clipped, the m gradients are never separated: one backward pass
    of the summed loss gives their sum, as in any non-private training.
    """

    def add(
        totals: Totals, params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> Totals:
        def loss(params: PyTree, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, Sums]:
            record = functools.partial(model.loss, params, frozen)
            return mean_loss(_mapped(record, tokens, mask), mask)

        def contribution(loss: UnitLoss, tokens: jax.Array, mask: jax.Array) -> Totals:
            clipped, (loss_sum, targets) = clipping.contribution(loss, params, tokens, mask)
            present = jnp.any(mask, axis=(-2, -1))
            # a loss that breaks its promise on padding must still not leak through an empty slot
            bounded = jax.tree.map(
                lambda leaf: jnp.where(jnp.any(present), leaf, 0.0), clipped.gradient
            )
            statistics = Statistics(
                units=jnp.sum(present),
                clipped=jnp.sum(present & clipped.active),
                norm=jnp.sum(jnp.where(present & jnp.isfinite(clipped.norm), clipped.norm, 0.0)),
                loss=loss_sum,
                targets=targets,
                tokens=jnp.sum(mask),
            )
            return jax.tree.map(lambda x: x.astype(jnp.float32), Totals(bounded, statistics))

        if isinstance(clipping, NoClipping):
            summed = contribution(
                lambda params, *rows: jax.tree.map(
                    jnp.sum, jax.vmap(functools.partial(loss, params))(*rows)
                ),
                tokens,
                mask,
            )
        else:
            by_unit = _mapped(functools.partial(contribution, loss), tokens, mask)
            summed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), by_unit)
        return jax.tree.map(jnp.add, totals, summed)

    return add


def _mapped(function: Callable[..., PyTree], *rows: jax.Array) -> PyTree:
    """``jax.vmap(function)(*rows)``, and for one row the same without an axis for it.

    A compiler folds the transposition of a gradient into the product that forms it only without
    that axis: steps of single records are a fifth shorter on a CPU.
    """
    if len(rows[0]) > 1:
        return jax.vmap(function)(*rows)
    return jax.tree.map(lambda leaf: leaf[None], function(*(row[0] for row in rows)))
