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

import jax
import jax.numpy as jnp

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject, PyTree
from mfopt.training.clipping import Clipped, Clipping, Sums, UnitLoss


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
        return {"algorithm": "fedavg", **super().describe()}

    def contribution(
        self, loss: UnitLoss, params: PyTree, tokens: jax.Array, mask: jax.Array
    ) -> tuple[Clipped, Sums]:
        """The weighted local update of a user, with the sign of a gradient.

        The sums are of the first local epoch, each batch before its step.

        Args:
          loss: as for :meth:`Clipping.contribution`.
          params: where local training begins.
          tokens, mask: records of the user, (G, L); they are cut into local batches.
        """
        clip = dataclasses.replace(self, normalized=False)

        # The update is what is kept, not θ: θ⁰ + Δ - θ⁰ would be rounded beyond the bound.
        def step(update: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            moved = jax.tree.map(lambda leaf, u: leaf + u.astype(leaf.dtype), params, update)
            slope, sums = jax.grad(loss, has_aux=True)(moved, *batch)
            clipped = clip(jax.tree.map(lambda u, g: u - self.local_rate * g, update, slope))
            return clipped.gradient, (sums, clipped.norm, clipped.active)

        size = self.local_batch or len(tokens)
        padding = [(0, -len(tokens) % size), (0, 0)]  # rows of zeros behind the last one
        batches = tuple(jnp.pad(x, padding).reshape(-1, size, x.shape[-1]) for x in (tokens, mask))
        # Δ, and what is said of each local step (epochs, batches)
        update, (sums, norm, active) = jax.lax.scan(
            lambda update, _: jax.lax.scan(step, update, batches),
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
            None,
            length=self.local_epochs,
        )
        # at most 1 whatever the records
        weight = jnp.minimum(jnp.sum(jnp.any(mask, axis=-1)) / (self.weight_cap or 1), 1.0)
        if self.normalized:
            update = jax.tree.map(lambda leaf: leaf / self.clip_norm, update)
        gradient = jax.tree.map(lambda leaf: -weight * leaf, update)
        loss_sum, targets = (jnp.sum(x[0]) for x in sums)
        return Clipped(gradient, norm[-1, -1], jnp.any(active)), (loss_sum, targets)


def clipping_of(description: JsonObject) -> Clipping:
    """Clipping with this :meth:`~mfopt.training.clipping.Clipping.describe`."""
    facts = dict(description)
    if facts.pop("algorithm", None) != "fedavg":
        return Clipping(**description)
    return FedAvg(**facts)
