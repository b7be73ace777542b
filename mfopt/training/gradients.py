"""The sum of clipped per-unit gradients, one fixed-size microbatch at a time.

A *unit* is what is sampled and clipped: a user with up to G records (ULS), or one record (ELS,
group privacy; then G = 1). A step's batch of any size is a sequence of microbatches of ``m``
units, each of one compiled shape; only ``m`` gradients are ever held at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt.training import ghost
from mfopt.training.clipping import Clipping, NoClipping, sum_of_squares
from mfopt.training.models import Model, PyTree, num_targets
from mfopt.training.taps import Taps, find

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


def mean_loss(losses: jax.Array, mask: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Mean loss over one unit's records, and (Σ loss·targets, Σ targets) for reporting.

    A row of ``mask`` (G, L) without a real token is padding and does not count in the mean.
    Source: Charles et al. 2024, Algorithm 2, line "g_u^t".
    """
    losses = losses.astype(jnp.float32)
    present = jnp.any(mask, axis=-1)
    mean = jnp.sum(jnp.where(present, losses, 0.0)) / jnp.maximum(jnp.sum(present), 1)
    targets = num_targets(mask).astype(jnp.float32)
    return mean, (jnp.sum(losses * targets), jnp.sum(targets))


def microbatch_adder(
    model: Model, clipping: Clipping | NoClipping, *, per_unit: bool = False
) -> Adder:
    """``add(totals, params, frozen, tokens (m, G, L), mask (m, G, L)) -> totals``, to be jitted.

    Each of the m units' gradients is clipped on its own, and only then summed in float32
    (``docs/training/algorithms.md``). Units without any token (padding, or users without records)
    add exactly 0. Where nothing is clipped, the m gradients are never separated: one backward pass
    of the summed loss gives their sum, as in any non-private training.

    ``per_unit``: form every unit's whole gradient, the definition itself.
    """
    if isinstance(clipping, NoClipping):
        return _summed_adder(model)

    def add(
        totals: Totals, params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> Totals:
        taps = taps_of(model, tokens.shape[-1])
        if per_unit or len(tokens) == 1:  # the gradient of a unit that is alone is the microbatch's
            taps = taps.keep([])
        gradient, statistics = _clipped_sum(taps, clipping, params, frozen, tokens, mask)
        statistics = jax.tree.map(lambda leaf: jnp.sum(leaf.astype(jnp.float32)), statistics)
        return jax.tree.map(jnp.add, totals, Totals(gradient, statistics))

    return add


def taps_of(model: Model, length: int) -> Taps:
    """Taps of the loss of ``length`` tokens, from shapes alone: nothing is computed."""
    row = [jax.ShapeDtypeStruct((length,), dtype) for dtype in (jnp.int32, bool)]
    return find(model.loss, model.params, model.frozen, *row)


def _clipped_sum(
    taps: Taps, clipping: Clipping, params: PyTree, frozen: PyTree, *rows: jax.Array
) -> tuple[PyTree, Statistics]:
    """Σ clip(gradient) over the units, and each unit's statistics."""
    leaves, structure = jax.tree.flatten(params)
    ghosts = ghost.chosen(taps, leaves, rows[0].shape[1]).leaves
    untapped = [i for i in range(len(leaves)) if i not in taps.leaves]
    uses = {i: [k for k, use in enumerate(taps.uses) if use.leaf == i] for i in taps.leaves}

    def unit(tokens: jax.Array, mask: jax.Array) -> tuple[Any, Any, Statistics]:
        def loss(plain: list[jax.Array], zeros: list[jax.Array]) -> tuple[jax.Array, Any]:
            whole = list(leaves)
            for i, leaf in zip(untapped, plain, strict=True):
                whole[i] = leaf

            def record(tokens: jax.Array, mask: jax.Array, zeros: list[jax.Array]) -> PyTree:
                arguments = jax.tree.leaves((whole, frozen, tokens, mask))
                return taps(arguments, zeros)

            losses, inputs = jax.vmap(record)(tokens, mask, zeros)
            mean, sums = mean_loss(losses, mask)
            return mean, (inputs, sums)

        zeros = jax.tree.map(lambda x: jnp.zeros((len(tokens), *x.shape), x.dtype), taps.zeros())
        gradients, (inputs, sums) = jax.grad(loss, argnums=(0, 1), has_aux=True)(
            [leaves[i] for i in untapped], zeros
        )
        plain = {
            i: leaf.astype(jnp.float32) for i, leaf in zip(untapped, gradients[0], strict=True)
        }
        parts = {}
        for i, mine in uses.items():
            tapped = [(taps.uses[k], inputs[k], gradients[1][k]) for k in mine]
            parts[i] = ghost.parts(tapped, wide=i in ghosts)
            if i not in ghosts:  # one product a unit: no array is turned, as by differentiation
                plain[i] = ghost.total([use for use, *_ in tapped], parts.pop(i), leaves[i])
        squares = [
            ghost.square(parts[i]) if i in parts else sum_of_squares(plain[i])
            for i in range(len(leaves))
        ]
        factors = clipping.factors(jax.tree.unflatten(structure, squares))
        present = jnp.any(mask)
        # a loss that breaks its promise on padding must still not leak through an empty slot
        leaf_factors = [jnp.where(present, factor, 0.0) for factor in jax.tree.leaves(factors.each)]
        # where, not a product alone: 0 times infinity is no number
        bounded = {
            i: jnp.where(leaf_factors[i] > 0, leaf_factors[i] * leaf, 0.0)
            for i, leaf in plain.items()
        }
        statistics = Statistics(
            units=present,
            clipped=present & factors.active,
            norm=jnp.where(present & jnp.isfinite(factors.norm), factors.norm, 0.0),
            loss=sums[0],
            targets=sums[1],
            tokens=jnp.sum(mask),
        )
        weighted = {i: ghost.weighted(part, leaf_factors[i]) for i, part in parts.items()}
        return bounded, weighted, statistics

    bounded, weighted, statistics = jax.vmap(unit)(*rows)
    total = {i: jnp.sum(leaf, axis=0) for i, leaf in bounded.items()}
    for i, part in weighted.items():
        total[i] = ghost.total([taps.uses[k] for k in uses[i]], part, leaves[i])
    return jax.tree.unflatten(structure, [total[i] for i in range(len(leaves))]), statistics


def _summed_adder(model: Model) -> Adder:
    def summed_loss(
        params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        by_record = jax.vmap(model.loss, in_axes=(None, None, 0, 0))
        by_unit = jax.vmap(by_record, in_axes=(None, None, 0, 0))
        losses, (loss, targets) = jax.vmap(mean_loss)(by_unit(params, frozen, tokens, mask), mask)
        return jnp.sum(losses), Totals.zero(()).statistics._replace(
            units=jnp.sum(jnp.any(mask, axis=(1, 2)), dtype=jnp.float32),
            loss=jnp.sum(loss),
            targets=jnp.sum(targets),
            tokens=jnp.sum(mask, dtype=jnp.float32),
        )

    def add(
        totals: Totals, params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> Totals:
        gradient, statistics = jax.grad(summed_loss, has_aux=True)(params, frozen, tokens, mask)
        gradient = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradient)
        return jax.tree.map(jnp.add, totals, Totals(gradient, statistics))

    return add
