"""User-wise descent with a concentration filter (Asi and Liu), run for real: it may halt.

Algorithm 3 of Chua et al. 2024 (appendix A, after Asi and Liu 2024) on the mean estimation task of
:mod:`~mfopt.experiments.runs.means`. Every step takes all N users, each with a gradient
averaged over G examples resampled. The concentration score, the share of pairs of users within
τ times N, is held against 4N/5 by AboveThreshold at ε/2; below it the run halts, and its last
iterate is its result. Otherwise users with fewer than half of the others within 2τ are left out,
those with two thirds are kept, and in between a coin decides; the noise is that of
:func:`mfopt.experiments.concentration_filter.filter_noise`. That the whole is (ε, δ)-DP is its
authors' result.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from mfopt.experiments.cache import Result
from mfopt.experiments.concentration_filter import filter_noise
from mfopt.experiments.runs.means import MeansCell, subsets

# one user more changes Σ 1(pair within τ) by at most 2N - 1, and the score by less than 2
SCORE_SENSITIVITY = 2.0
SHARE = 0.8  # of N, that the score must reach
_STEPS = 2**22  # users times steps of one chunk of trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilteredDescent(MeansCell):
    """Squared errors (thresholds, rates, trials) and steps taken (thresholds, trials).

    Attributes:
      thresholds: τ of the sweep.
      rates: learning rates of the sweep.
    """

    name = "study-filter"
    thresholds: tuple[float, ...]
    rates: tuple[float, ...]

    def bytes(self, users: int) -> float:
        # of one trial: data, batches and coins, distances of all pairs
        data = 16.0 * users * self.examples * self.dimension
        batches = self.steps * (users * (8.0 * self.group + 24) + 12 * self.dimension)
        return data + batches + 8.0 * users**2 * (1 + len(self.thresholds))

    def run(self, *needed: Result) -> Result:
        unit = filter_noise(self.epsilon, self.delta, self.steps, self.users, 1.0)  # of τ = 1
        errors, steps, kept = outcomes(self, unit)
        arrays = {"errors": errors, "steps": steps, "kept": kept}
        return Result({"noise_per_threshold": unit}, arrays)


def outcomes(
    descent: FilteredDescent, noise_per_threshold: float, *, budget: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(errors, steps taken before it halted, mean share of users kept).

    Args:
      descent: what is run.
      noise_per_threshold: standard deviation of the noise on the mean gradient, over τ.
      budget: ε of AboveThreshold; half of the descent's where None.
    """
    d, n, steps = descent.dimension, descent.users, descent.steps
    budget = descent.epsilon / 2 if budget is None else budget
    found: list[tuple[Any, ...]] = []
    together = max(1, _STEPS // (n * steps))
    for first in range(0, descent.trials, together):
        trials = min(together, descent.trials - first)
        make = np.random.default_rng([descent.seed, 5, first])
        means = make.standard_normal((trials, d))
        users = means[:, None] + descent.across * make.standard_normal((trials, n, d))
        data = users[:, :, None] + descent.within * make.standard_normal(
            (trials, n, descent.examples, d)
        )
        everybody = np.tile(np.arange(n), trials * steps)
        places = subsets(make, everybody, descent.examples, descent.group)
        bar = SHARE * n + make.laplace(scale=2 * SCORE_SENSITIVITY / budget, size=trials)
        heard = make.laplace(scale=4 * SCORE_SENSITIVITY / budget, size=(trials, steps))
        found.append(
            _program()(
                np.float32(data.reshape(trials, -1, d)),
                places.reshape(trials, steps, n, -1),
                np.float32(make.standard_normal((trials, steps, d))),
                make.random((trials, steps, n), dtype=np.float32),
                np.float32(heard - bar[:, None]),
                np.float32(means),
                np.asarray(descent.thresholds, np.float32),
                np.asarray(descent.rates, np.float32),
                np.float32(noise_per_threshold),
            )
        )
    errors, taken, kept = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return np.moveaxis(errors, 0, -1), taken.T, kept.T


@functools.cache
def _program() -> Any:
    import jax
    import jax.numpy as jnp

    def trial(
        pool: Any,
        places: Any,
        noise: Any,
        coins: Any,
        heard: Any,
        mean: Any,
        thresholds: Any,
        rates: Any,
        scale: Any,
    ) -> Any:
        def step(state: Any, now: Any) -> Any:
            theta, alive = state  # (thresholds, rates, d), (thresholds,)
            place, white, coin, noised = now
            average = pool[place].mean(1)  # (users, d): a user's gradient is θ less this
            n = average.shape[0]
            # the iterate is in every gradient, so distances between them do not see it
            centred = average - average.mean(0)
            square = jnp.sum(centred**2, axis=1)
            apart = jnp.maximum(square[:, None] + square - 2 * centred @ centred.T, 0.0)
            near = (apart <= thresholds[:, None, None] ** 2).sum((1, 2)) / n
            friends = (apart <= (2 * thresholds[:, None, None]) ** 2).sum(2)
            chance = jnp.clip((friends - n / 2) / (n / 6), 0.0, 1.0)
            keep = coin < chance  # (thresholds, users)
            count = keep.sum(1)
            target = (keep @ average) / jnp.maximum(count, 1)[:, None]
            gradient = jnp.where((count > 0)[:, None, None], theta - target[:, None], 0.0)
            gradient = gradient + (scale * thresholds)[:, None, None] * white
            alive = alive & (near + noised >= 0)
            moved = theta - rates[:, None] * gradient
            share = jnp.where(alive, count / n, jnp.nan)
            return (jnp.where(alive[:, None, None], moved, theta), alive), (alive, share)

        shape = (thresholds.shape[0], rates.shape[0], pool.shape[-1])
        start = (jnp.zeros(shape, jnp.float32), jnp.ones(shape[0], bool))
        (theta, _), (alive, share) = jax.lax.scan(step, start, (places, noise, coins, heard))
        return jnp.sum((theta - mean) ** 2, axis=-1), alive.sum(0), jnp.nanmean(share, axis=0)

    return jax.jit(jax.vmap(trial, in_axes=(0,) * 6 + (None,) * 3))
