"""Losses of held-out users, released with noise: evaluation and early stopping under the guarantee.

After some steps, fixed in advance, the loss of each held-out user (the mean over up to G of their
records, at most ``bound``) is summed, noise of deviation σ · ``bound`` is added, and the sum is
divided by their public number. One user moves a sum by at most ``bound``, so that T releases are T
steps of a Gaussian mechanism with full batches. Its σ is solved for the (ε, δ) of the run: no user
is both held out and trained on, so that the statement of the run holds for users of either part.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.accounting import account as account_of
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.sampling import Adjacency, FixedOrder
from mfopt.strategies import Identity
from mfopt.training.config import TrainConfig
from mfopt.training.data import TokenStore
from mfopt.training.data.store import map_array
from mfopt.training.metrics import Evaluator
from mfopt.training.models import PyTree
from mfopt.training.secrets import RunSecret
from mfopt.training.units import select

PART = "held-out-users"  # whose losses are released


def _mechanism(releases: int, adjacency: Adjacency) -> Mechanism:
    """So many sums over all held-out users, each with noise of its own."""
    return Mechanism(
        FixedOrder(bins=1, epochs=releases), Identity(), privacy_unit="user", adjacency=adjacency
    )


@dataclasses.dataclass(frozen=True)
class Validation:
    """Noised losses of held-out users.

    Attributes:
      steps: numbers of finished steps after which there is one.
      bound: on a user's loss, in nats per token.
      noise_multiplier: σ relative to ``bound``.
      store, records: the held-out part, and its users' records (users, G), -1 for none.
      secret: of the run; each release has a key of its own.
    """

    steps: tuple[int, ...]
    bound: float
    noise_multiplier: float
    store: TokenStore
    records: np.ndarray
    secret: RunSecret

    @functools.cached_property
    def _stream(self) -> NoiseStream:
        """Noise of one release."""
        return NoiseStream(
            Identity(), iterations=1, noise_multiplier=self.noise_multiplier, clip_norm=self.bound
        )

    def describe(self) -> JsonObject:
        """JSON-able: the public numbers."""
        return {
            "steps": list(self.steps),
            "bound": self.bound,
            "noise_multiplier": self.noise_multiplier,
            "users": len(self.records),
        }

    def loss(self, evaluator: Evaluator, params: PyTree, step: int) -> float:
        """The release after ``step`` steps: nats per token."""
        losses, targets = evaluator.record_losses(params, self.store, self.records.ravel())
        weights = targets.reshape(self.records.shape)
        sums = np.sum(losses.astype(np.float64).reshape(weights.shape) * weights, axis=1)
        means = sums / np.maximum(1, weights.sum(axis=1))
        # a loss that is no number counts as the largest one
        total = np.clip(np.nan_to_num(means, nan=self.bound), 0.0, self.bound).sum()
        # a key for each release, so that one that is repeated after a crash is the same
        key = self.secret.key(f"validation {step}")
        noise, _ = self._stream.next(self._stream.init(np.zeros(1, np.float32), key=key))
        return float(total + float(noise[0])) / len(self.records)


def validation_of(
    config: TrainConfig,
    parts: dict[str, TokenStore],
    guarantee: Guarantee | None,
    iterations: int,
    secret: RunSecret,
) -> Validation | None:
    """The validation of a run; None where its settings ask for none.

    Args:
      config, parts, secret: of the run.
      guarantee: its statement about users that are trained on.
      iterations: n, all steps that it covers.

    Raises:
      UsageError: there are no held-out users, or some are trained on too.
    """
    if not config.validation_bound or guarantee is None:
        return None
    if PART not in parts:
        way_out = "Build it with held-out users."
        raise _check.reject("validation_bound", PART, "is no part of the data", way_out)
    store = parts[PART]
    if both := _names(store) & _names(parts["train"]):
        rule = f"{len(both)} of its users are trained on too: they would pay twice"
        raise _check.reject("validation_bound", PART, rule)
    steps = (*range(0, iterations, config.evaluate_every or iterations), iterations)
    accounted = _mechanism(len(steps), guarantee.adjacency)
    solved = account_of(accounted, epsilon=guarantee.epsilon, delta=guarantee.delta)
    return Validation(
        steps,
        config.validation_bound,
        solved.noise_multiplier,
        store,
        select(
            store,
            np.arange(store.num_users),
            config.records_per_user,
            key=(secret.seed("validation"), 0),
        ),
        secret,
    )


def _names(store: TokenStore) -> set[bytes]:
    """Names of a store's users."""
    assert store.path is not None
    arrays = (map_array(store.path / f"{name}.npy") for name in ("user_names", "name_offsets"))
    names, offsets = (np.asarray(array) for array in arrays)
    text = names.tobytes()
    return {text[begin:end] for begin, end in itertools.pairwise(offsets.tolist())}


def proved(facts: JsonObject, stated: Guarantee, iterations: int) -> float:
    """ε of the validation in a report, at the δ of its statement.

    Args:
      facts: as :meth:`Validation.describe` gives them.
      stated: the statement about the run.
      iterations: n of the run.

    Raises:
      UsageError: the facts are none.
    """
    numbers = [_check.integer("report validation.steps", x, at_least=0) for x in facts["steps"]]
    if not numbers or numbers != sorted({*numbers}) or numbers[-1] > iterations:
        raise _check.reject("report validation.steps", numbers, f"must rise to {iterations}")
    accounted = _mechanism(len(numbers), stated.adjacency)
    multiplier = facts["noise_multiplier"]
    return account_of(accounted, noise_multiplier=multiplier, delta=stated.delta).epsilon
