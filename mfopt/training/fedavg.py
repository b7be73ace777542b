"""DP-FedAvg: a user contributes what some local steps on their records do to the model.

McMahan, Ramage, Talwar, Zhang 2018, Algorithm 1 (``docs/training/algorithms.md``). A step's sum is
Σ w_k Δ_k, of updates Δ_k = θ - θ⁰ clipped to norm S after each local step, and with weights
w_k = min(n_k / ŵ, 1) for the n_k records that the user reads. It is divided by a public N
(``normalizer``): one user moves it by S / N, as ‖w_k Δ_k‖ <= S.

A user without records has weight 0 and adds nothing, so the bounds hold for adding, removing and
emptying a user alike. The optimizer is given -Δ in place of a gradient (Reddi et al. 2021).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.clipping import Clipping
from mfopt.training.gradients import Adder, Statistics, Totals, mean_loss
from mfopt.training.models import Model, PyTree


@dataclasses.dataclass(frozen=True)
class FedAvg(Clipping):
    """Clipping of users' local updates, which it makes; fields as in the settings of a run."""

    local_epochs: int = 1
    local_batch: int = 1
    local_rate: float = 0.1
    weight_cap: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check.integer("local_epochs", self.local_epochs)
        _check.integer("local_batch", self.local_batch, at_least=0)
        _check.positive("local_rate", self.local_rate)
        _check.integer("weight_cap", self.weight_cap, at_least=0)

    def describe(self) -> JsonObject:
        return {"algorithm": "fedavg", **super().describe(), "sensitivity": self.sensitivity}


def clipping_of(description: JsonObject) -> Clipping:
    """Clipping with this :meth:`~mfopt.training.clipping.Clipping.describe`."""
    facts = dict(description)
    if facts.pop("algorithm", None) != "fedavg":
        return Clipping(**description)
    facts.pop("sensitivity")  # the report's is compared with the one that follows
    return FedAvg(**facts)


def weights(counts: ArrayLike, cap: float) -> np.ndarray:
    """w_k = min(n_k / ŵ, 1), float32 (K,): at most 1 whatever the counts."""
    share = np.asarray(counts, np.float64) / _check.positive("cap", cap)
    return np.minimum(share, 1.0).astype(np.float32)


def adder(model: Model, fedavg: FedAvg) -> Adder:
    """Add the weighted sum of a microbatch's local updates, with the sign of a gradient.

    Called as what :func:`~mfopt.training.gradients.microbatch_adder` returns. ``loss`` and
    ``targets`` of the statistics are of the first local epoch, each batch before its step.
    """
    cap, rate = fedavg.weight_cap or 1, fedavg.local_rate
    weight_of = jnp.asarray(weights(np.arange(cap + 1), cap), jnp.float32)
    clip = dataclasses.replace(fedavg, normalized=False)

    def add(
        totals: Totals, params: PyTree, frozen: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> Totals:
        # The update is what is kept, not θ: θ⁰ + Δ - θ⁰ would be rounded beyond the bound.
        def step(update: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            def loss(params: PyTree) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
                losses = jax.vmap(model.loss, (None, None, 0, 0))(params, frozen, *batch)
                return mean_loss(losses, batch[1])

            moved = jax.tree.map(lambda leaf, u: leaf + u.astype(leaf.dtype), params, update)
            slope, said = jax.grad(loss, has_aux=True)(moved)
            clipped = clip(jax.tree.map(lambda u, g: u - rate * g, update, slope))
            return clipped.gradient, (said, clipped.norm, clipped.active)

        def user(tokens: jax.Array, mask: jax.Array) -> tuple[PyTree, jax.Array, Statistics]:
            size = fedavg.local_batch or len(tokens)
            padding = [(0, -len(tokens) % size), (0, 0)]  # rows of zeros behind the last one
            batches = tuple(
                jnp.pad(x, padding).reshape(-1, size, x.shape[-1]) for x in (tokens, mask)
            )
            # Δ, and what is said of each local step (epochs, batches)
            update, (sums, norm, active) = jax.lax.scan(
                lambda update, _: jax.lax.scan(step, update, batches),
                Totals.zero(params).gradient,
                None,
                length=fedavg.local_epochs,
            )
            records = jnp.sum(jnp.any(mask, axis=-1))
            present = records > 0
            if fedavg.normalized:
                update = jax.tree.map(lambda leaf: leaf / fedavg.clip_norm, update)
            # a loss that breaks its promise on padding must still not leak through an empty slot
            update = jax.tree.map(lambda leaf: jnp.where(present, leaf, 0.0), update)
            statistics = Statistics(
                units=present,
                clipped=present & jnp.any(active),
                norm=jnp.where(present & jnp.isfinite(norm[-1, -1]), norm[-1, -1], 0.0),
                loss=jnp.sum(sums[0][0]),
                targets=jnp.sum(sums[1][0]),
                tokens=jnp.sum(mask),
            )
            return update, weight_of[jnp.minimum(records, cap)], statistics

        updates, weight, statistics = jax.vmap(user)(tokens, mask)
        statistics = jax.tree.map(lambda leaf: jnp.sum(leaf.astype(jnp.float32)), statistics)
        # an accelerator's usual products would round a contribution beyond its bound
        product = functools.partial(
            jnp.tensordot, -weight, axes=1, precision=jax.lax.Precision.HIGHEST
        )
        summed = Totals(jax.tree.map(product, updates), statistics)
        return jax.tree.map(jnp.add, totals, summed)

    return add
