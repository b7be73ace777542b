"""Mean loss per token on a token store: for held-out users, held-out records, any text."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mfopt.training import mesh as meshes
from mfopt.training.data import TokenStore
from mfopt.training.models import Model, num_targets

PyTree = Any


class HeldOutLoss(NamedTuple):
    """``loss``: nats per predicted token; ``tokens``: how many were predicted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """e^loss."""
        return float(np.exp(min(self.loss, 700.0)))


class Evaluator:
    """The compiled loss of fixed-size blocks of records.

    Args:
        model: gives the loss; its parameters are not used.
        length: tokens per record that are read.
        block: records per compiled call and device.
        mesh: where to compute; None: one device of this process.
    """

    def __init__(
        self, model: Model, length: int, block: int = 32, mesh: Mesh | None = None
    ) -> None:
        self._length, self._mesh = length, mesh or meshes.one_device()
        self._block = block * meshes.data_parallel(self._mesh)
        model = meshes.whole(self._mesh, model)

        def losses(params: PyTree, frozen: PyTree, tokens: Any, mask: Any) -> Any:
            each = jax.vmap(model.loss, in_axes=(None, None, 0, 0))(params, frozen, tokens, mask)
            return each.astype(jnp.float32), num_targets(mask)

        self._losses = jax.jit(losses)

    def record_losses(
        self, params: PyTree, frozen: PyTree, store: TokenStore, records: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(mean loss per token (R,) float32, predicted tokens (R,)) of ``records``.

        Args:
          params, frozen: parameters, those trained and the others.
          store, records: where they are, and their numbers, shape (R,).
        """
        losses, targets = np.zeros(len(records), np.float32), np.zeros(len(records), np.int64)
        for begin in range(0, len(records), self._block):
            block = np.full(self._block, -1, dtype=np.int64)
            mine = records[begin : begin + self._block]
            block[: len(mine)] = mine
            rows = [meshes.place_rows(self._mesh, x) for x in store.batch(block, self._length)]
            loss, count = meshes.gather(self._mesh, self._losses(params, frozen, *rows))
            losses[begin : begin + len(mine)] = loss[: len(mine)]
            targets[begin : begin + len(mine)] = count[: len(mine)]
        return losses, targets

    def __call__(
        self, params: PyTree, frozen: PyTree, store: TokenStore, max_records: int | None = None
    ) -> HeldOutLoss:
        """Loss over the store, or over ``max_records`` of it, evenly spaced and always the same."""
        count = store.num_records
        chosen = np.arange(count)
        if max_records is not None and count > max_records:
            chosen = np.linspace(0, count - 1, max_records).astype(np.int64)
        losses, targets = self.record_losses(params, frozen, store, chosen)
        total = int(targets.sum())
        if not total:
            return HeldOutLoss(float("nan"), 0)
        return HeldOutLoss(float(np.sum(losses.astype(np.float64) * targets) / total), total)
