"""Attacker of the audit: a score of a canary's released sequence, by sampling scheme.

Two tables, by scheme: :func:`attack_on`, the (near) likelihood ratio of a sequence with and without
a unit, and :func:`participations` of a unit, to simulate with. A third party adds a scheme by
registering both::

    @attack.attack_on.register
    def _(scheme: MyScheme, strategy, group_size): ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from scipy import special, stats

from mfopt import sampling
from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.sampling import Scheme
from mfopt.strategies import Strategy

_MOST_MULTISETS = 512
# schemes that resample in each iteration; give a unit one bin for the run; have a pair of their own
_Coins = sampling.Poisson | sampling.CyclicPoisson | sampling.RandomPartition | sampling.FixedBatch
_OneBin = sampling.BallsInBins | sampling.FixedOrder
_Pairs = sampling.FreshBins | sampling.BMinSep


@dataclasses.dataclass(frozen=True)
class _Attack:
    """Linear statistics of a canary's sequence, and a score from them.

    Attributes:
        rows: (d, n); ``rows @ white`` are the statistics, where ``white`` (n, m) is C times the
            released sums in units of the bound, column i for canary i.
        score: ``score(statistics (d, m), σ, first) -> (m,)``, log P(present) / P(absent) of the
            canaries ``first``, ``first`` + 1, ..., up to a constant, or what comes near it.
    """

    rows: np.ndarray
    score: Callable[[np.ndarray, float, int], np.ndarray]

    def __call__(self, white: np.ndarray, noise_multiplier: float) -> np.ndarray:
        """The score of each column of ``white`` (n, m)."""
        return self.score(self.rows @ white, noise_multiplier, 0)


@functools.singledispatch
def attack_on(scheme: Scheme, strategy: Strategy, group_size: int = 1) -> _Attack:
    """The attack on the presence of ``group_size`` units with one common axis.

    The likelihood ratio for balls-in-bins and fresh bins with one unit and for fixed order; with
    groups, the same over a sample of the multisets of bins, for fresh bins that of one unit. For
    schemes that resample in each iteration, the likelihood ratio where the columns of C that one
    unit can use are orthogonal. With anything less than the likelihood ratio the audit stays valid,
    and finds less. Refused are schemes for which nothing is registered.
    """
    raise _unknown(scheme)


@functools.singledispatch
def participations(scheme: Scheme, units: int, rng: np.random.Generator) -> np.ndarray:
    """Participations of simulated units, shape (units, n) of bool; unit i alike in both tables."""
    raise _unknown(scheme)


def _unknown(scheme: Scheme) -> Exception:
    classes = [cls for cls in attack_on.registry if issubclass(cls, Scheme) and cls != Scheme]
    kinds = ", ".join(sorted(cls.kind for cls in classes))
    rule = f"no attack is known on this scheme, so a run of it cannot be audited (known: {kinds})"
    return _check.reject("sampling", scheme, rule, "Register one with mfopt.training.attack.")


def _modes(strategy: Strategy, scheme: _OneBin) -> tuple[np.ndarray, np.ndarray]:
    """(columns of C of each bin, summed (n, bins); their products)."""
    modes = np.asarray(strategy.modes(sampling.BallsInBins(scheme.bins, scheme.epochs)))
    return modes, modes.T @ modes


@attack_on.register
def _(scheme: sampling.BallsInBins, strategy: Strategy, group_size: int = 1) -> _Attack:
    (modes, gram) = _modes(strategy, scheme)
    bins = scheme.bins
    if group_size == 1:
        places = np.eye(bins)
    else:
        rng = np.random.default_rng(0)
        thrown = rng.integers(0, bins, (_MOST_MULTISETS, group_size))
        places = np.sum(thrown[:, :, None] == np.arange(bins), axis=1, dtype=np.float64)
    halves = 0.5 * np.einsum("ib,bc,ic->i", places, gram, places)

    def score(statistics: np.ndarray, sigma: float, start: int) -> np.ndarray:
        each = (places @ statistics - halves[:, None]) / sigma**2
        return special.logsumexp(each, axis=0) - np.log(len(places))

    return _Attack(modes.T, score)


@attack_on.register
def _(scheme: _Pairs, strategy: Strategy, group_size: int = 1) -> _Attack:
    # the likelihood ratio of one unit; of a group it is less than that, and finds less
    accounted: Any = law(scheme)
    likelihood = accounted.exact(strategy)
    columns = np.asarray(strategy.materialize(scheme.iterations))
    if isinstance(scheme, sampling.FreshBins):  # those that a unit takes together
        columns = columns.reshape(-1, scheme.throws, scheme.rethrow, scheme.bins).sum(axis=2)
        columns = columns.reshape(scheme.iterations, -1)

    @float64
    def score(statistics: np.ndarray, sigma: float, start: int) -> np.ndarray:
        return np.asarray(likelihood.scaled(sigma).log_ratio(jnp.asarray(statistics.T / sigma**2)))

    return _Attack(columns.T, score)


@attack_on.register
def _(scheme: sampling.FixedOrder, strategy: Strategy, group_size: int = 1) -> _Attack:
    (modes, gram) = _modes(strategy, scheme)
    bins = scheme.bins

    def score(statistics: np.ndarray, sigma: float, start: int) -> np.ndarray:
        canaries = np.arange(statistics.shape[1])
        members = ((start + canaries)[:, None] * group_size + np.arange(group_size)) % bins
        signal = statistics[members, canaries[:, None]].sum(axis=1)
        size = gram[members[:, :, None], members[:, None, :]].sum(axis=(1, 2))
        return (signal - 0.5 * size) / sigma**2

    return _Attack(modes.T, score)


@participations.register
def _(scheme: _OneBin, units: int, rng: np.random.Generator) -> np.ndarray:
    # every bin equally often: balls-in-bins without the noise of throwing
    return np.arange(scheme.iterations) % scheme.bins == (np.arange(units) % scheme.bins)[:, None]


@participations.register
def _(scheme: sampling.FreshBins, units: int, rng: np.random.Generator) -> np.ndarray:
    places = rng.integers(0, scheme.bins, (units, scheme.throws)).repeat(scheme.rethrow, axis=1)
    hot = places[:, :, None] == np.arange(scheme.bins)
    return hot.reshape(units, scheme.iterations)


@participations.register
def _(scheme: sampling.BMinSep, units: int, rng: np.random.Generator) -> np.ndarray:
    result = np.zeros((units, scheme.iterations), bool)
    step = scheme.first_steps(units, rng)
    while (alive := np.flatnonzero(step < scheme.iterations)).size:
        result[alive, step[alive]] = True
        step[alive] += scheme.separation + scheme.waits(len(alive), rng)
    return result


def _coins(scheme: _Coins) -> tuple[float, int]:
    """Chance of a unit in an iteration of its group, and the number of groups."""
    if isinstance(scheme, sampling.FixedBatch):
        return scheme.batch_size / scheme.population, 1
    if isinstance(scheme, sampling.RandomPartition):
        scheme = scheme.cyclic
    return scheme.probability, scheme.bands if isinstance(scheme, sampling.CyclicPoisson) else 1


@attack_on.register
def _(scheme: _Coins, strategy: Strategy, group_size: int = 1) -> _Attack:
    chance, groups = _coins(scheme)
    columns = np.asarray(strategy.materialize(scheme.length))
    halves = 0.5 * np.sum(columns**2, axis=0)
    if group_size > 1:  # each unit of a canary has a group of its own: mixed over, step by step
        chance = chance / groups
        groups = 1
    members = np.arange(group_size + 1)
    weights = stats.binom.logpmf(members, group_size, chance)

    def score(statistics: np.ndarray, sigma: float, start: int) -> np.ndarray:
        steps = np.full(statistics.shape, -np.inf)
        for k, weight in zip(members.tolist(), weights.tolist(), strict=True):
            each = (k * statistics - k**2 * halves[:, None]) / sigma**2
            steps = np.logaddexp(steps, weight + each)
        by_group = np.stack([steps[group::groups].sum(axis=0) for group in range(groups)])
        return special.logsumexp(by_group, axis=0) - np.log(groups)

    return _Attack(columns.T, score)


@participations.register
def _(scheme: _Coins, units: int, rng: np.random.Generator) -> np.ndarray:
    (chance, groups) = _coins(scheme)
    n = scheme.iterations
    chosen = rng.random((units, n)) < chance
    return chosen & (np.arange(n) % groups == (np.arange(units) % groups)[:, None])
