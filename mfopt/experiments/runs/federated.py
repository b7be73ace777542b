"""DP-FedAvg and DP-FedSGD: what one user's data does to the model, and a round over sampled users.

McMahan, Ramage, Talwar, Zhang 2018, Algorithm 1. A round samples users, asks each for an update
of norm at most S, and moves the model by an estimate of their weighted mean plus noise of scale z
times the estimate's sensitivity (:class:`mfopt.accounting.closed_form.moments.Estimator`). The
weights w_k = min(n_k/ŵ, 1) are at most 1, so that S bounds w_k Δ_k. W and W_min are *public*
numbers: were W summed over the data, adding a user would move the estimate of every round.

Noise is a :class:`~mfopt.noise.stream.NoiseStream` of unit sensitivity: with u the estimates over
their sensitivities, C u + σ z is released. So S and the noise may fall together from round to round
at the same z, and C may be any factorization (DP-FTRL on users' updates).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check
from mfopt.accounting.closed_form.moments import Estimator
from mfopt.noise.state import NoiseState
from mfopt.noise.stream import NoiseStream
from mfopt.sampling import UnitSampler
from mfopt.sampling.sampler import pad
from mfopt.training import fedavg
from mfopt.training.clipping import Clipped, Clipping

PyTree = Any
# loss(params, rows, mask): the mean over rows where mask is True, 0 where there is none
Loss = Callable[[PyTree, PyTree, jax.Array], jax.Array]
Layers = Literal["flat", "per-layer"]


class UserData(NamedTuple):
    """Users' rows, padded to equally many: ``rows`` a pytree of (K, R, ...), ``mask`` (K, R) bool.

    ``counts`` (K,) are the examples n_k (tokens, say) that weights are made from.
    """

    rows: PyTree
    mask: np.ndarray
    counts: np.ndarray

    @property
    def population(self) -> int:
        """Number of users K."""
        return len(self.mask)


@dataclasses.dataclass(frozen=True)
class UserUpdate:
    """Δ_k of one user, at most S long.

    Attributes:
      rate: η of the local steps.
      batch: B, rows of a local batch.
      epochs: E, passes over the user's rows; 0 is FedSGD: one gradient on ``batch`` random rows.
      layers: "flat" clips the whole update to S, "per-layer" each of m parameter vectors to S/√m.
      private: False leaves updates as they are: the baseline, without any bound.
    """

    rate: float
    batch: int
    epochs: int = 1
    layers: Layers = "flat"
    private: bool = True

    def __post_init__(self) -> None:
        _check.positive("rate", self.rate)
        _check.integer("batch", self.batch)
        _check.integer("epochs", self.epochs, at_least=0)
        if self.layers not in ("flat", "per-layer"):
            raise _check.reject("layers", self.layers, "must be 'flat' or 'per-layer'")

    def clip(self, update: PyTree, clip_norm: Any) -> Clipped:
        """``update`` at a norm of at most S = ``clip_norm``, which may be traced."""
        if not self.private:
            return Clipped(update, jnp.float32(jnp.inf), jnp.bool_(False))
        unit = Clipping(1.0, per_layer=self.layers == "per-layer")
        shorter = unit(jax.tree.map(lambda leaf: leaf / clip_norm, update))
        bounded = jax.tree.map(lambda leaf: leaf * clip_norm, shorter.gradient)
        return shorter._replace(gradient=bounded)

    def __call__(
        self,
        loss: Loss,
        params: PyTree,
        rows: PyTree,
        mask: jax.Array,
        clip_norm: Any,
        key: Any,
        *,
        rate: Any = None,
    ) -> PyTree:
        """Δ of one user with ``rows`` (R, ...), real where ``mask`` (R,) is, from the model θ⁰.

        ``key`` chooses FedSGD's rows; a ``rate`` in place of η may be traced.
        """
        rate, size = self.rate if rate is None else rate, self.batch
        if self.epochs == 0:
            # real rows first, in random order: the first are then a batch without repeats
            order = jnp.argsort(jax.random.uniform(key, mask.shape) + ~mask)[:size]
            rows, mask = jax.tree.map(lambda leaf: leaf[order], (rows, mask))
            size = len(mask)
        return fedavg.local_update(
            lambda params, batch: (jax.grad(loss)(params, *batch), None),
            lambda moved: self.clip(moved, clip_norm),
            params,
            fedavg.in_batches((rows, mask), size),
            rate=rate,
            epochs=max(self.epochs, 1),
        )[0]


def total(
    update: UserUpdate,
    loss: Loss,
    params: PyTree,
    rows: PyTree,
    mask: jax.Array,
    weight: jax.Array,
    clip_norm: Any,
    key: jax.Array,
    *,
    rate: Any = None,
) -> tuple[PyTree, jax.Array]:
    """(Σ w_k Δ_k, Σ w_k) over the users of a round, some at a time.

    Args:
      update: of one user.
      loss: of rows.
      params: the model.
      rows: (chunks, users, R, ...); users without a real row add 0.
      mask: (chunks, users, R).
      weight: w_k, (chunks, users); 0 in empty places.
      clip_norm: S.
      key: of the round.
      rate: as of :class:`UserUpdate`.
    """

    def chunk(sums: tuple[PyTree, jax.Array], part: Any) -> tuple[Any, None]:
        rows, mask, weight, keys = part

        def one(rows: PyTree, mask: jax.Array, key: jax.Array) -> PyTree:
            return update(loss, params, rows, mask, clip_norm, key, rate=rate)

        each = jax.vmap(one)(rows, mask, keys)
        weighted = fedavg.weighted_sum(weight, each)
        return (jax.tree.map(jnp.add, sums[0], weighted), sums[1] + jnp.sum(weight)), None

    keys = jax.random.split(key, mask.shape[:2])
    zero = jax.tree.map(jnp.zeros_like, params), jnp.float32(0)
    found: tuple[PyTree, jax.Array] = jax.lax.scan(chunk, zero, (rows, mask, weight, keys))[0]
    return found


def estimate(estimator: Estimator, summed: PyTree, weight: Any) -> PyTree:
    """The mean update: f̃_f divides by q W, f̃_c by max(q W_min, Σ w_k)."""
    least = estimator.probability * estimator.weight
    by = fedavg.denominator(estimator.kind, least, weight)
    mean: PyTree = jax.tree.map(lambda leaf: leaf / by, summed)
    return mean


@dataclasses.dataclass(frozen=True)
class Server:
    """The main loop of Algorithm 1.

    Attributes:
      update: of one user.
      loss: of rows.
      estimator: of the mean update, with the S of the first round.
      sampler: users of each round: the scheme that was accounted for.
      noise: C and z at unit sensitivity; None adds none (the baseline).
      clip_norms: S of each round, (T,): z is the same for all.
      chunk: users at work at once.
      seed: of FedSGD's rows and, where pinned, of the noise.
    """

    update: UserUpdate
    loss: Loss
    estimator: Estimator
    sampler: UnitSampler
    noise: NoiseStream | None
    clip_norms: np.ndarray
    chunk: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        rounds = len(self.sampler)
        if np.shape(self.clip_norms) != (rounds,) or not np.all(np.asarray(self.clip_norms) > 0):
            rule = f"must be one positive number for each of {rounds} rounds"
            raise _check.reject("clip_norms", np.shape(self.clip_norms), rule)
        if (self.noise is None) == self.update.private:
            rule = "private updates need noise, others must have none"
            raise _check.reject("noise", self.noise, rule)
        if self.noise is not None:
            if self.noise.sampling != self.sampler.scheme:
                said = getattr(self.noise.sampling, "words", lambda: "no scheme")()
                raise _check.reject(
                    "noise", said, f"is not for the sampling {self.sampler.scheme.words()}"
                )
            if self.noise.clip_norm != 1.0:
                rule = "must be 1: noise is scaled by the estimator's sensitivity"
                raise _check.reject("noise.clip_norm", self.noise.clip_norm, rule)

    def sensitivity(self, step: int) -> float:
        """Largest change of the estimate of round ``step`` by one user."""
        one = dataclasses.replace(self.estimator, clip_norm=float(self.clip_norms[step]))
        return one.sensitivity

    def run(
        self, params: PyTree, data: UserData, weight: np.ndarray
    ) -> Iterator[tuple[int, PyTree]]:
        """(rounds done, model) after each round.

        Args:
          params: where it begins.
          data: of all users.
          weight: w_k of all users, in [0, 1].

        Raises:
          UsageError: a weight above 1: S would no longer bound what a user adds.
        """
        if not (np.all(weight >= 0) and np.all(weight <= 1)):
            raise _check.reject("weight", float(np.max(weight)), "must lie in [0, 1]")
        state = None if self.noise is None else self.noise.init(params, seed=self.seed)
        of_any_rate = dataclasses.replace(self.update, rate=1.0)
        most = max(len(self.sampler[t]) for t in range(len(self.sampler)))
        for step in range(len(self.sampler)):
            units = pad(self.sampler[step], self.chunk, slots=most, fill=-1)
            there = units >= 0
            rows = jax.tree.map(lambda leaf, u=units: leaf[u], data.rows)
            params, state = _round(
                of_any_rate,
                self.loss,
                self.estimator,
                self.noise,
                params,
                state,
                (rows, data.mask[units] & there[..., None], np.where(there, weight[units], 0)),
                np.float32(self.clip_norms[step]),
                np.float32(self.sensitivity(step)),
                jax.random.fold_in(jax.random.key(self.seed), step),
                np.float32(self.update.rate),
            )
            yield step + 1, params


def _apply(
    update: UserUpdate,
    loss: Loss,
    estimator: Estimator,
    noise: NoiseStream | None,
    params: PyTree,
    state: NoiseState | None,
    users: tuple[PyTree, jax.Array, jax.Array],
    clip_norm: Any,
    sensitivity: Any,
    key: Any,
    rate: Any,
) -> tuple[PyTree, NoiseState | None]:
    """One round: θ + estimate + noise."""
    summed, weight = total(update, loss, params, *users, clip_norm, key, rate=rate)
    change = estimate(estimator, summed, weight)
    if noise is not None:
        assert state is not None
        drawn, state = noise.next(state)
        change = jax.tree.map(lambda c, z: c + sensitivity * z, change, drawn)
    return jax.tree.map(jnp.add, params, change), state


_round = jax.jit(_apply, static_argnums=(0, 1, 2, 3))
