"""Groups of K units, any C >= 0, few bins: the mixture over multisets of bins, as patterns.

The units of a group fall into bins independently, so a group's pattern is in each assignment a
multiset of K bins. With n its counts, (n_1, …, n_b), the law is multinomial, and the mode is
Σ_g M_g n_g in the notation of :mod:`.patterns` (M the modes of the one assignment where bins are
kept): entries are those of one unit, and a pattern picks K of each assignment. There are
binom(b + K − 1, K) multisets; where they are few, each is a pattern, and nothing is given away.

**That P dominates.** Bins are independent of all else, so other units may be taken to contribute
nothing. Row r of C x then moves by at most (Σ_g M_g n_g)_r (triangle inequality; C >= 0,
contributions of norm <= 1, chosen adaptively), and the mixture of Gaussians with these movements
dominates (Choquette-Choo et al. 2024, proof of Lemma 3.2, which holds for any mixture).

Consecutive assignments overlap in the last and the first c = bands − 1 bins alone: the forward pass
goes over the counts there, "late" and "early" classes of multisets.

**Ceilings.** As m_k has one part for each assignment, R_l of :mod:`.importance` is a maximum of

    Π_g φ_g(k'_{g−1}, k'_g, k'_{g+1}),
    φ_g(p, c, q) = E_n exp(l <M_g n, M_{g−1} p + M_g c + M_{g+1} q>),

which takes p by its late class and q by its early one; one pass over the assignments finds it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import patterns
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.kept_bins import KeptBins
from mfopt.accounting.monte_carlo.likelihood import (
    Ceilings,
    Drawn,
    PatternChain,
    SharedGaussianComponent,
    require_range,
    summed,
)
from mfopt.accounting.monte_carlo.losses import LikelihoodLoss
from mfopt.accounting.monte_carlo.patterns import COUPLING, Patterns
from mfopt.strategies.fields import Array

_MOST = 1024  # multisets, each of which is a pattern
_MOST_WORK = 2**25  # products of a ceiling's sums, for one order
_FAINT = 1e-300  # what a sum of exponentials, scaled by their largest, may lose of each


class _Multisets(NamedTuple):
    """The likelihood ratio of a group; arrays only.

    Attributes:
      whole: of one unit, in noise units.
      counts: n of each multiset, shape (multisets, bins).
      log_weights: log of their probabilities in one assignment, (multisets,).
      late, early: class of each, (multisets,).
      late_counts, early_counts: in the last or first c bins, (classes, c), ascending.
    """

    whole: KeptBins | Patterns
    counts: Array
    log_weights: Array
    late: Array
    early: Array
    late_counts: Array
    early_counts: Array

    @classmethod
    def of(cls, whole: KeptBins | Patterns, group_size: int) -> _Multisets:
        """Likelihood ratio over all multisets of ``group_size`` bins."""
        bins, reach = whole.bins, whole.reach
        falls = itertools.combinations_with_replacement(range(bins), group_size)
        counts = np.array([np.bincount(fall, minlength=bins) for fall in falls], float)
        log_ways = math.lgamma(group_size + 1) - scipy.special.gammaln(counts + 1).sum(axis=1)
        late, late_of = np.unique(counts[:, bins - reach :], axis=0, return_inverse=True)
        early, early_of = np.unique(counts[:, :reach], axis=0, return_inverse=True)
        log_weights = log_ways - group_size * math.log(bins)
        return cls(whole, counts, log_weights, late_of.ravel(), early_of.ravel(), late, early)

    @property
    def bins(self) -> int:
        return int(self.whole.bins)

    @property
    def dimension(self) -> int:
        return int(self.whole.dimension)

    @property
    def work(self) -> int:
        # chunks of one size, whatever is asked for, share their compiled code
        return max(int(self.whole.throws * len(self.counts)), 128)

    def scaled(self, noise_multiplier: Scalar) -> _Multisets:
        return self._replace(whole=self.whole.scaled(noise_multiplier))

    def noise(self, normal: jax.Array) -> jax.Array:
        return self.whole.noise(normal)

    def average(self, exponents: jax.Array) -> jax.Array:
        return jnp.sum(self.counts[0]) * self.whole.average(exponents)

    def mean(self) -> tuple[jax.Array, jax.Array]:
        (products, square), size = self.whole.mean(), jnp.sum(self.counts[0])
        return size * products, size**2 * square

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        within, corner = self.whole.overlaps()
        counts, (rounds, bins) = jnp.asarray(self.counts), within.shape[:2]
        norms = jnp.einsum("ni,gij,nj->gn", counts, within, counts)
        logs = power * exponents.reshape(-1, rounds, bins) @ counts.T
        logs = logs - power**2 * norms / 2 + self.log_weights
        peak = jnp.max(logs, axis=2)
        weights = jnp.moveaxis(jnp.exp(logs - peak[:, :, None]), 1, 0)
        coupled = jnp.asarray(self.late_counts) @ corner @ jnp.asarray(self.early_counts).T
        passing = jnp.exp(-(power**2) * coupled)  # (rounds − 1, late, early)
        classes = jax.nn.one_hot(self.late, len(self.late_counts), dtype=float)

        def step(previous: jax.Array, of_round: tuple[jax.Array, jax.Array]) -> PyTree:
            of_bin, passed = of_round
            mass = of_bin * (previous @ passed)[:, jnp.asarray(self.early)]
            total = jnp.sum(mass, axis=1)
            return (mass / total[:, None]) @ classes, jnp.log(total)

        # nothing comes before the first assignment
        start = jnp.zeros((len(exponents), classes.shape[1])).at[:, 0].set(1.0)
        passing = jnp.concatenate([jnp.ones((1, *coupled.shape[1:])), passing])
        logs = jax.lax.scan(step, start, (weights, passing))[1]
        return jnp.sum(logs, axis=0) + jnp.sum(peak, axis=1)

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        overlaps = patterns.Overlaps(*self.whole.overlaps())
        units = jnp.sum(jnp.asarray(self.counts)[0]).astype(int)

        def extend(l: jax.Array, previous: Drawn) -> Drawn:
            key = jax.random.fold_in(keys[1], l)

            # e^<m, V> is a product over the units: they fall independently
            def fall(j: jax.Array, state: Drawn) -> Drawn:
                round_key = jax.random.fold_in(key, j)
                pattern, logs = patterns.picked(previous.products, self.whole.throws, round_key)
                return patterns.added(overlaps.overlaps_of(pattern), pattern, state, noise, logs)

            return jax.lax.fori_loop(0, units, fall, previous)

        # of the first, drawn by its law, normalizers are 1
        steps = order.astype(int) + 1
        nothing = Drawn.nothing(noise)
        return jax.lax.fori_loop(0, steps, extend, nothing)


# --- ceilings ------------------------------------------------------------------------------------


@_quick.jit
def _parts(group: _Multisets) -> tuple[jax.Array, ...]:
    """One program: operation by operation, each would be compiled for each shape."""
    return (*group.whole.overlaps(), group.mean()[1])


@float64
def ceilings(of: _Multisets) -> Ceilings:
    """The ceilings at one σ, of multisets in noise units.

    Raises:
      FailureError: assignments overlap by more than the likelihood is known for.
    """
    within, corner, square = map(np.asarray, _parts(of))
    counts, weights = of.counts, np.exp(of.log_weights)
    # of consecutive rounds, from class to class; nothing comes before the first or after the last
    between = of.late_counts @ corner @ of.early_counts.T
    coupling = float(np.max(between, initial=0.0))
    require_range("two assignments of a group overlap by", coupling, COUPLING)
    none = np.zeros((1, *between.shape[1:]))
    before, after = np.concatenate([none, between]), np.concatenate([between, none])
    overlaps = counts @ within @ counts.T  # (rounds, n, c)
    ends = before[:, :, of.early], after[:, of.late]  # (rounds, p, n), (rounds, n, q)

    def log_largest(order: int) -> float:
        @functools.cache
        def sums(part: tuple[bytes, ...]) -> np.ndarray:
            squares, back, ahead = (np.frombuffer(x).reshape(len(counts), -1) for x in part)
            logs = of.log_weights[:, None, None] + order * (back[:, :, None] + ahead[:, None])
            logs, top = logs.reshape(len(counts), -1), (logs.shape[1], logs.shape[2])
            shifts = np.max(logs, axis=0), np.max(order * squares, axis=0)
            total = np.exp(logs - shifts[0]).T @ np.exp(order * squares - shifts[1])
            log_total = np.log(total + len(counts) * _FAINT) + shifts[0][:, None] + shifts[1]
            return np.moveaxis(log_total.reshape(*top, -1), 1, 2)  # (p, c, q)

        rounds = zip(overlaps, np.swapaxes(ends[0], 1, 2), ends[1], strict=True)
        return _heaviest([sums(tuple(x.tobytes() for x in part)) for part in rounds], of)

    norms = np.diagonal(overlaps, axis1=1, axis2=2)
    largest = _heaviest(list(norms[:, None, :, None] + 2 * after[:, None, of.late]), of)
    mean = weights @ counts
    mean_square = np.sum(norms @ weights) + 2 * np.sum(corner) * mean[0] ** 2
    chains = {"chain": PatternChain(summed(log_largest), MAX_ORDER)}
    return Ceilings(chains, largest, float(mean_square), float(square))


def _heaviest(values: Sequence[np.ndarray], of: _Multisets) -> float:
    """max over patterns of Σ_g values_g[late class before, multiset, early class after]."""
    best = values[0][0]  # (c, q): class 0 has no counts
    for values_of_round in values[1:]:
        reached = np.full((len(of.late_counts), best.shape[1]), -np.inf)
        np.maximum.at(reached, of.late, best)
        best = np.max(reached[:, of.early, None] + values_of_round, axis=0)
    return float(np.max(best[:, 0]))


def few(bins: int, group_size: int) -> bool:
    """True if each multiset may be a pattern: there are few, and more than one."""
    return bins > 1 and math.comb(bins + group_size - 1, group_size) <= _MOST


# --- the loss ------------------------------------------------------------------------------------


class MultisetLoss(LikelihoodLoss):
    """A group of K units by the multisets of their bins.

    Args:
      group: the likelihood ratio at σ = 1.
      one: what the modes of one unit share, likewise.
      name: of the scheme.
    """

    estimator = "groups by their bin counts, importance sampling"
    least_samples = 2**14

    def __init__(self, group: _Multisets, one: SharedGaussianComponent | None, name: str) -> None:
        self.likelihood, self.name = group, name  # type: ignore[misc]
        if one is not None:
            size = float(np.sum(group.counts[0]))  # of entries that each pattern picks
            self.shared = one._replace(length=size * one.length)

    @property
    def most_work(self) -> int:
        """Samples times work, at most: a few CPU seconds, and a test of 2^14 whatever it costs."""
        return max(2**28, 3 * 2**13 * self.work)

    @classmethod
    def of(cls, one: LikelihoodLoss, group_size: int) -> MultisetLoss | None:
        """The loss of a group by that of a unit; None where there are too many multisets."""
        unit = one.likelihood
        bins, reach, rounds = unit.bins, unit.reach, unit.throws
        multisets = math.comb(bins + group_size - 1, group_size)
        classes = math.comb(reach + group_size, group_size) if rounds > 1 else 1
        if not few(bins, group_size) or rounds * (multisets * classes) ** 2 > _MOST_WORK:
            return None
        return cls(_Multisets.of(unit, group_size), one.shared, one.name)

    def ceilings(self, scaled: _Multisets, common: float) -> Ceilings:
        return ceilings(scaled)

    @functools.cached_property
    def sensitivity(self) -> float:
        return math.sqrt(ceilings(self.likelihood).largest_square)
