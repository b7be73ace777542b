"""Held-out users personalize a model: SGD on half of a user's records, judged by the other half."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.runs.means import by_halves
from mfopt.experiments.runs.training import REPORTED


@dataclasses.dataclass(frozen=True)
class PersonalizationCell(Cell):
    """Losses of held-out users on the second half of their records, (users,) and (rates, users).

    ``trained`` is the model to personalize, the pretrained one of ``base`` if None; users with
    fewer than two records are left out. The other fields are the study's options.
    """

    name = "study-personalization"
    base: Cell
    trained: Cell | None
    length: int
    records: int
    local_epochs: int
    local_batch: int
    local_rates: tuple[float, ...]

    def run(self, *needed: Result) -> Result:
        from mfopt.training.data import open_parts
        from mfopt.training.models.huggingface import load_pretrained

        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for result in needed:
                result.unpack(folder)
            model = load_pretrained(str(folder / ("model" if self.trained else "pretrained")))
            store = open_parts(folder / "corpus")[REPORTED]
            halves = [split(store.records_of(u), self.records) for u in range(store.num_users)]
            places = np.array([half for half in halves if half is not None])  # (users, 2, rows)
            if len(places) < 4:
                rule = "has fewer than 4 held-out users of two records: nothing to choose a rate by"
                raise _check.reject("data", store.num_users, rule, "Hold out more users.")
            tokens, mask = store.batch(places.reshape(-1), self.length)
        tokens, mask = (leaf.reshape(*places.shape, self.length) for leaf in (tokens, mask))
        before, after = personalized(
            model, tokens, mask, self.local_rates, epochs=self.local_epochs, batch=self.local_batch
        )
        judged = np.isfinite(before)  # users whose second half has something to predict
        return Result({}, {"before": before[judged], "after": after[:, judged]})


def split(mine: range, most: int) -> np.ndarray | None:
    """(2, most/2) records of a user, to personalize by and to judge by; -1 where there is none.

    >>> split(range(4, 9), 6).tolist()
    [[4, 6, 8], [5, 7, -1]]
    >>> split(range(1), 6)
    """
    if len(mine) < 2:
        return None
    places = np.full(most, -1)
    kept = list(mine)[:most]
    places[: len(kept)] = kept
    return np.stack([places[::2], places[1::2]])


def personalized(
    model: Any,
    tokens: np.ndarray,
    mask: np.ndarray,
    rates: tuple[float, ...],
    *,
    epochs: int,
    batch: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean loss per token of each user's second half: before, and after SGD on the first.

    Args:
      model: whose parameters every user begins with.
      tokens, mask: (users, 2, records, length).
      rates: of SGD.
      epochs: passes over the first half, in order.
      batch: records of a step; a step without a token changes nothing.

    Returns:
      ((users,), (rates, users)) float64; nan where the second half has nothing to predict.
    """
    import jax
    import jax.numpy as jnp

    from mfopt.training.models import num_targets

    def mean_loss(params: Any, frozen: Any, tokens: Any, mask: Any) -> Any:
        each = jax.vmap(model.loss, in_axes=(None, None, 0, 0))(params, frozen, tokens, mask)
        count = num_targets(mask)
        return jnp.sum(each * count) / jnp.maximum(jnp.sum(count), 1)

    def judged(params: Any, frozen: Any, tokens: Any, mask: Any) -> Any:
        loss = mean_loss(params, frozen, tokens, mask)
        return jnp.where(jnp.sum(num_targets(mask)) > 0, loss, jnp.nan)

    def users(params: Any, frozen: Any, rows: tuple[Any, Any]) -> Any:
        def user(mine: tuple[Any, Any]) -> tuple[Any, Any]:
            (first, other), (first_mask, other_mask) = mine
            steps = [leaf.reshape(-1, batch, leaf.shape[-1]) for leaf in (first, first_mask)]
            rows, masks = (jnp.tile(leaf, (epochs, 1, 1)) for leaf in steps)

            def at(rate: Any) -> Any:
                def step(local: Any, now: tuple[Any, Any]) -> tuple[Any, None]:
                    slope = jax.grad(mean_loss)(local, frozen, *now)
                    return jax.tree.map(lambda p, g: p - rate * g, local, slope), None

                local, _ = jax.lax.scan(step, params, (rows, masks))
                return judged(local, frozen, other, other_mask)

            return judged(params, frozen, other, other_mask), jax.lax.map(at, jnp.asarray(rates))

        return jax.lax.map(user, rows)

    before, after = jax.jit(users)(model.params, model.frozen, (tokens, mask))
    return np.asarray(before, np.float64), np.asarray(after, np.float64).T


def chosen(after: np.ndarray, rates: tuple[float, ...]) -> tuple[np.ndarray, list[float]]:
    """(losses (users,), rates): each half of the users at the rate that is best for the other.

    Args:
      after: (rates, users); what is not finite is worst.
      rates: one for each row.
    """
    after = np.where(np.isfinite(after), after, np.inf)
    judged, taken = by_halves(after)
    if not np.isfinite(judged).all():
        raise _check.FailureError("every local rate diverges: add smaller ones")
    return judged, [rates[best] for best in taken]
