"""Bins assigned once: the likelihood ratio of b modes by their Gram matrix, and its ceilings.

A pattern is one bin k, uniform over b, and X ~ N(m_k, σ²I) enters through the b numbers <m_k, X>/σ²
alone, with covariance S = G/σ² under Q: white noise of b numbers and a factor L of G make them
(:mod:`.dominating_pair`). Entries are bins.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import patterns
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair, privacy_loss
from mfopt.accounting.monte_carlo.likelihood import (
    Ceilings,
    Drawn,
    SharedGaussianComponent,
    shared_component,
)
from mfopt.accounting.monte_carlo.nested import Factor, HierarchicalLowRank, coloured
from mfopt.strategies.fields import Array

_ORDERS = 24  # normalizers that one pass over S gives
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

    def diagonal(self) -> Any:
        """The diagonal of S."""
        return self.gram.diagonal() / self.sigma**2

    def noise(self, normal: jax.Array) -> jax.Array:
        return coloured(normal / self.sigma, self.factor)

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        return privacy_loss(power * exponents - power**2 * self.diagonal() / 2)

    def average(self, exponents: jax.Array) -> jax.Array:
        return jnp.mean(exponents, axis=-1)

    def mean(self) -> tuple[jax.Array, jax.Array]:
        products = jnp.mean(jnp.asarray(self.gram), axis=0) / self.sigma**2
        return products, jnp.mean(products)

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, by: PyTree) -> Drawn:
        first = jax.random.randint(keys[0], (len(noise), 1), 0, self.bins)
        return patterns.drawn(_Rows(self), keys[1], noise, order, first)


class _Rows(patterns.PatternOverlaps):
    """Those of the one assignment, row by row."""

    def __init__(self, bins: KeptBins) -> None:
        self._bins = bins

    def overlaps_of(self, pattern: jax.Array) -> jax.Array:
        return self._bins.rows(pattern[:, 0])


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
def ceilings(bins: KeptBins) -> Ceilings:
    """The ceilings of bins in noise units."""
    diagonal = np.asarray(bins.gram).diagonal() / bins.sigma**2
    mean = np.mean(np.asarray(bins.gram)) / bins.sigma**2
    log_products: list[float] = [0.0]  # Σ_{l<=s} log R_l

    @float64  # they may be asked for outside of any scope
    def chain(order: int) -> tuple[float, None]:
        while len(log_products) <= order:
            normalizers = np.asarray(_log_normalizers(bins, len(log_products)))
            log_products.extend(log_products[-1] + np.cumsum(normalizers))
        return float(log_products[order]), None

    return Ceilings(chain, *map(float, (np.max(diagonal), np.mean(diagonal), mean)))


@_quick.jit
def _log_normalizers(pattern: KeptBins, first: int) -> jax.Array:
    """log R_l = log max_k mean_i e^(l·S[i, k]) for l = first, …, shape (_ORDERS,)."""
    bins = pattern.bins
    orders = first + jnp.arange(_ORDERS)

    def of_rows(numbers: jax.Array) -> jax.Array:
        rows = pattern.rows(numbers)
        top = jnp.max(rows, axis=1)
        ratio = jnp.exp(rows - top[:, None])

        def add(power: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            return power * ratio, jnp.sum(power, axis=1)

        # one exponential for all orders
        masses = jax.lax.scan(add, ratio**first, None, length=_ORDERS)[1]
        return jnp.max(orders[:, None] * top + jnp.log(masses), axis=1)

    # the last rows are examined again where there is no whole number of times so many
    count = min(bins, _ROWS)
    numbers = jnp.minimum(jnp.arange(-(-bins // count) * count), bins - 1).reshape(-1, count)
    return jnp.max(jax.lax.map(of_rows, numbers), axis=0) - jnp.log(bins)
