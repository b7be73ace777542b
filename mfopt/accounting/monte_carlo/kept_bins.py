"""Bins assigned once: the likelihood ratio of b modes by their Gram matrix, and its ceilings.

A pattern is one bin k, uniform over b, and X ~ N(m_k, σ²I) enters through the b numbers <m_k, X>/σ²
alone, with covariance S = G/σ² under Q: white noise of b numbers and a factor L of G make them
(:mod:`.dominating_pair`). Entries are bins.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import clusters, importance, patterns
from mfopt.accounting.monte_carlo.clusters import Clusters
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair, coloured, privacy_loss
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import (
    Ceilings,
    Drawn,
    PatternChain,
    SharedGaussianComponent,
    shared_component,
)
from mfopt.accounting.monte_carlo.nested import Factor, HierarchicalLowRank
from mfopt.strategies.fields import Array

_ORDERS = clusters.MOST  # normalizers that one pass over S gives
_ROWS = 64  # of S, processed together
# of moments: places, matrix products and terms at most
_MOST_PLACES, _PRODUCTS, _TUPLES = 4, 512, 2**36


class KeptBins(NamedTuple):
    """The likelihood ratio of b modes; S is made as it is asked for, row by row.

    Attributes:
      gram, factor, sigma: G, shape (bins, bins), L with L Lᵀ = G, and σ.
    """

    gram: Array
    factor: Factor
    sigma: Scalar = 1.0

    @property
    def throws(self) -> int:
        return 1

    @property
    def reach(self) -> int:
        return 0  # no assignment is beside this one

    @property
    def bins(self) -> int:
        """b."""
        return int(self.gram.shape[0])

    @property
    def dimension(self) -> int:
        return self.bins

    @property
    def work(self) -> int:
        return self.bins

    def scaled(self, noise_multiplier: Scalar) -> KeptBins:
        return self._replace(sigma=self.sigma * noise_multiplier)

    def rows(self, chosen: jax.Array) -> jax.Array:
        """S[chosen]."""
        return jnp.asarray(self.gram)[chosen] / self.sigma**2

    def overlaps(self) -> tuple[jax.Array, jax.Array]:
        """Overlaps of the modes, in the form of :meth:`.patterns.Patterns.overlaps`."""
        return self.rows(jnp.arange(self.bins))[None], jnp.zeros((0, 0, 0))

    def diagonal(self, offset: int = 0) -> Any:
        """The diagonal of S, or that many beside it."""
        return self.gram.diagonal(offset) / self.sigma**2

    def noise(self, normal: jax.Array) -> jax.Array:
        return coloured(normal / self.sigma, self.factor)

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        return privacy_loss(power * exponents - power**2 * self.diagonal() / 2)

    def average(self, exponents: jax.Array) -> jax.Array:
        return jnp.mean(exponents, axis=-1)

    def mean(self) -> tuple[jax.Array, jax.Array]:
        products = jnp.mean(jnp.asarray(self.gram), axis=0) / self.sigma**2
        return products, jnp.mean(products)

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        if plan is not None:
            return self._draw_clusters(keys, noise, order, plan)
        first = jax.random.randint(keys[0], (len(noise), 1), 0, self.bins)
        return patterns.drawn(
            lambda pattern: self.rows(pattern[:, 0]), keys[1], noise, order, first
        )

    def _draw_clusters(
        self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: Clusters
    ) -> Drawn:
        size, positions = len(noise), jnp.arange(self.bins)
        kind = jnp.searchsorted(plan.ends, jax.random.uniform(keys[0], (size,)), side="right")
        sizes = plan.sizes[kind]

        # with n the counts of the bins drawn so far: smooth = T n
        def extend(
            j: jax.Array, previous: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            smooth, counts, log_normalizers = previous
            places = sizes[:, j]
            exponents = places[:, None] * smooth + plan.log_weights[places]
            chosen, top, mass = importance.pick(exponents, jax.random.fold_in(keys[1], j))
            log_normalizers += jnp.where(places > 0, top + jnp.log(mass), 0)
            added = jnp.where(positions == chosen[:, None], places[:, None], 0.0)
            smooth += places[:, None] * self.rows(chosen) - added * plan.spikes
            return smooth, counts + added, log_normalizers

        nothing = jnp.zeros((size, self.bins))
        steps, begin = order.astype(int) + 1, (nothing, nothing, plan.log_over[kind])
        smooth, counts, log_normalizers = jax.lax.fori_loop(0, steps, extend, begin)
        products = smooth + counts * plan.spikes
        along, square = jnp.sum(counts * noise, axis=1), jnp.sum(counts * products, axis=1)
        return Drawn(products, along, square, log_normalizers)


@float64
def shared(pair: DominatingPair) -> SharedGaussianComponent | None:
    """Shared Gaussian component of all modes; None where it is too small to gain anything.

    The largest r² is 1/(1ᵀG⁻¹1), the squared distance of the origin from the affine hull of the
    modes: with û = Lᵀα/|Lᵀα|, Gα ∝ 1, L û = r·1.
    """
    ones, factor = np.ones(pair.bins), pair.factor
    try:
        # what an ill-conditioned G does to it is seen by whoever takes it
        if isinstance(factor, HierarchicalLowRank):
            toward = factor.solve(ones)  # Lᵀ G⁻¹ 1
        else:
            solved = scipy.linalg.cho_solve(scipy.linalg.cho_factor(np.asarray(pair.gram)), ones)
            toward = np.asarray(factor).T @ solved
    except scipy.linalg.LinAlgError:
        return None
    largest = float(np.max(np.asarray(pair.gram).diagonal()))
    return shared_component(KeptBins(*pair), toward, 1, largest)


# --- moments -----------------------------------------------------------------------------------


def tuples(overlaps: np.ndarray) -> tuple[float, ...]:
    """Mean of e^(Σ_{l<l'} S[k_l, k_l']) over tuples of k bins, k = 2, 3, …, if affordable."""
    bins = len(overlaps)
    with np.errstate(over="ignore"):
        factors = np.exp(overlaps)

    def total(weights: np.ndarray, places: int) -> float:
        """Sum over tuples of so many places of the weights of their bins and all factors."""
        if places > 3:
            inner = (total(weights * row, places - 1) for row in factors)
            return float(sum(w * part for w, part in zip(weights, inner, strict=True)))
        weighted = factors * weights
        if places == 2:
            return float(weights @ weighted.sum(axis=1))
        return float(np.sum(weights[:, None] * (weighted @ factors) * weighted))

    def affordable(places: int) -> bool:
        products = float(bins) ** max(places - 3, 0)
        return products <= _PRODUCTS and products * float(bins) ** min(places, 3) <= _TUPLES

    ones, size = np.ones(bins) / bins, 2
    while size < _MOST_PLACES and affordable(size + 1):
        size += 1
    with np.errstate(over="ignore", invalid="ignore"):
        return tuple(total(ones, places) for places in range(2, size + 1))


# --- ceilings ------------------------------------------------------------------------------------


@float64
def ceilings(bins: KeptBins, common: float = 0.0) -> Ceilings:
    """The ceilings of bins in noise units; clusters are chosen by c of a shared component."""
    numbers = bins._replace(gram=np.asarray(bins.gram))  # nothing is compiled for a few sums
    diagonal = numbers.diagonal()
    means = np.mean(numbers.gram, axis=0) / bins.sigma**2
    plain: list[float] = [0.0]  # Σ_{l<=s} log R_l

    def chain(order: int) -> tuple[float, None]:
        while len(plain) <= order:
            plain.extend(plain[-1] + np.cumsum(_log_normalizers(numbers, len(plain))[0]))
        return float(plain[order]), None

    chains = {"chain": PatternChain(chain, MAX_ORDER)}
    if bins.bins > 1:
        chains = {"clusters": _clusters(numbers, diagonal, numbers.diagonal(1), common), **chains}
    squares = np.max(diagonal), np.mean(diagonal), np.mean(means)
    return Ceilings(chains, *map(float, squares))


def _clusters(
    bins: KeptBins, diagonal: np.ndarray, beside: np.ndarray, common: float
) -> PatternChain:
    spikes = clusters.spikes(diagonal - common, beside - common)
    log_weights = clusters.log_weights(spikes, diagonal)

    @functools.cache
    def smooth() -> tuple[np.ndarray, float]:
        log_normalizers, beside = _log_normalizers(bins, 1, spikes)
        # T is at most what S is beside the diagonal, or what it keeps of it
        return log_normalizers, max(beside, float(np.max(diagonal - spikes)))

    @functools.cache
    def ceiling(order: int) -> tuple[float, Clusters]:
        log_normalizers, top = smooth()
        plan = clusters.clusters(spikes, log_weights, log_normalizers, order, top)
        return plan.log_sum, plan

    return PatternChain(ceiling, clusters.MOST - 1)


def _log_normalizers(
    pattern: KeptBins, first: int, spikes: float | np.ndarray = 0.0
) -> tuple[np.ndarray, float]:
    """log max_k mean_i e^(l·T[i,k]), T = S − diag(``spikes``), and the largest S off the diagonal.

    For l = first, …, shape (_ORDERS,), of a G of NumPy: nothing is compiled.
    """
    bins, orders = pattern.bins, first + np.arange(_ORDERS)
    spikes = np.broadcast_to(spikes, bins)
    largest: list[np.ndarray] = []
    beside: list[float] = []
    for begin in range(0, bins, _ROWS):
        rows = pattern.gram[begin : begin + _ROWS] / pattern.sigma**2
        diagonal = np.arange(len(rows)), begin + np.arange(len(rows))
        own = rows[diagonal]
        rows[diagonal] = -np.inf
        beside.append(np.max(rows))
        rows[diagonal] = own - spikes[diagonal[1]]
        top = np.max(rows, axis=1)
        ratio = np.exp(rows - top[:, None])  # one exponential for all orders
        power = ratio ** (first - 1)
        masses = np.stack([np.sum(np.multiply(power, ratio, out=power), axis=1) for _ in orders])
        largest.append(np.max(orders[:, None] * top + np.log(masses), axis=1))
    return np.max(largest, axis=0) - math.log(bins), float(np.max(beside))
