"""δ̂ on frozen samples where bins are assigned more than once: for calibration and optimization.

Samples come from R = E_k N(α m_k + γ m̄, σ²I), m̄ the mean mode: a unit's own columns are overshot by
α, and all others are raised alike by γ. R over Q is a chain as P over Q is, with exponents α Z -
α² |M|²/2 - αγ <M, m̄> and transitions T^{α²}, so a sample costs two forward passes. Any (α, γ) is
unbiased; no bound on the weights is proven. They follow from the order s of the certificate's chain
(:mod:`.importance`), whose shift by s further patterns they imitate: about a third of it is on the
unit's own columns.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import STATIC
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import band
from mfopt.accounting.monte_carlo.dominating_pair import log_hinge
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.importance import remove_tilts
from mfopt.accounting.monte_carlo.likelihood import Ceilings, Drawn
from mfopt.strategies.fields import Array

_CHUNK = 2**17  # numbers of a chunk's antithetic pairs: a few MiB of arrays
_EXACT = 2**20  # numbers that are cached in float64
_OWN, _REST = 0.35, 0.65  # of the order, the parts of α - 1 and γ


@dataclasses.dataclass(frozen=True)
class PatternLikelihood(abc.ABC):
    """The likelihood ratio of patterns of columns of a banded C, which can be frozen.

    A :class:`.likelihood.Likelihood` whose patterns are arrays of integers, and a JAX pytree.

    Attributes:
      columns: shape (bands, n), [d, j] = C[j + d, j].
      gram: shape (bands, n), [d, j] = <C[:, j], C[:, j + d]>.
      bins: b; a unit takes part in a step with probability 1/b.
    """

    columns: Array
    gram: Array
    bins: int = dataclasses.field(metadata=STATIC)

    @property
    def dimension(self) -> int:
        """n."""
        return int(self.columns.shape[1])

    work = numbers = dimension  # of a sample; of entries

    def scaled(self, noise_multiplier: Scalar) -> Self:
        """Return the same in noise units: C/σ and the overlaps over σ²."""
        return dataclasses.replace(
            self, columns=self.columns / noise_multiplier, gram=self.gram / noise_multiplier**2
        )

    def noise(self, normal: jax.Array) -> jax.Array:
        """Cᵀ z for white noise z, shape (samples, n)."""
        return band.transposed(jnp.asarray(self.columns), normal)

    def average(self, exponents: jax.Array) -> jax.Array:
        return jnp.sum(exponents, axis=-1) / self.bins

    def mean(self) -> tuple[jax.Array, jax.Array]:
        columns = band.tiles(jnp.asarray(self.columns))
        row = band.product(columns, jnp.full((1, self.dimension), 1 / self.bins))
        return self.noise(row)[0], jnp.sum(row**2)

    def log_ratio(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        return self.ratio(power)(exponents)

    @abc.abstractmethod
    def ratio(self, power: Scalar = 1) -> Callable[[jax.Array], jax.Array]:
        """Exponents -> :meth:`log_ratio`; what it takes of C alone is found here, once."""

    @abc.abstractmethod
    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn: ...

    @abc.abstractmethod
    def first(self, key: jax.Array, count: int) -> jax.Array:
        """Patterns by their law, one for each row."""

    @abc.abstractmethod
    def products(self, pattern: jax.Array) -> jax.Array:
        """<m, m_k> of every entry for each pattern, shape (count, entries)."""

    @abc.abstractmethod
    def mean_square(self) -> jax.Array:
        """E_k |m_k|²."""

    @abc.abstractmethod
    def largest_square(self) -> jax.Array:
        """max_k |m_k|²."""


@_quick.jit
def squares(patterns: PatternLikelihood) -> tuple[jax.Array, ...]:
    """max_k |m_k|², E_k |m_k|² and |m̄|², each of shape (), and <m, m̄> of every entry.

    One program: operation by operation, each would be compiled for each shape.
    """
    products, square = patterns.mean()
    return patterns.largest_square(), patterns.mean_square(), square, products


class PatternProposal(NamedTuple):
    """α and γ, each of shape ()."""

    alpha: jax.Array
    gamma: jax.Array


class PatternDraws(NamedTuple):
    """Frozen randomness; every row serves z and -z.

    Attributes:
      pattern: as the likelihood draws them, one for each row.
      normal: shape (pairs, n), float32: an estimate needs no more.
    """

    pattern: jax.Array
    normal: jax.Array


class PatternTerms(NamedTuple):
    """Terms of log δ̂ for samples X = v + σz that do not depend on σ.

    Attributes:
      patterns, proposal: C, and where X is put.
      centre, noise: Mᵀv and Mᵀz, shape (pairs, K·b).
    """

    patterns: PatternLikelihood
    proposal: PatternProposal
    centre: jax.Array
    noise: jax.Array


def _chunks_of(pairs: int, n: int) -> int:
    """Number of chunks for ``pairs`` antithetic pairs."""
    return -(-pairs // max(64, min(_CHUNK // n, 4096)))


@functools.partial(_quick.jit, static_argnums=1)
def draw(key: jax.Array, samples: int, likelihood: PatternLikelihood) -> PatternDraws:
    """Frozen draws, ``samples`` or more, by the patterns' law: C does not matter."""
    pairs = -(-samples // 2)
    chunks = _chunks_of(pairs, likelihood.dimension)
    count = -(-pairs // chunks) * chunks  # in chunks of one size
    pattern_key, noise_key = jax.random.split(key)
    return PatternDraws(
        likelihood.first(pattern_key, count),
        jax.random.normal(noise_key, (count, likelihood.dimension), jnp.float32),
    )


def _ratio(
    scaled: PatternLikelihood, proposal: PatternProposal, of_mean: tuple[jax.Array, jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """Z -> log R/Q, in noise units; ``of_mean`` is what :meth:`mean` gives."""
    (toward, square), gamma = of_mean, proposal.gamma
    ratio = scaled.ratio(proposal.alpha)

    def log_ratio(exponents: jax.Array) -> jax.Array:
        log_density = ratio(exponents - gamma * toward) - gamma**2 * square / 2
        return log_density + gamma * scaled.average(exponents)

    return log_ratio


def terms(
    patterns: PatternLikelihood, proposal: PatternProposal, draws: PatternDraws
) -> PatternTerms:
    """Terms of one chunk of draws, in float64."""
    centre = proposal.alpha * patterns.products(draws.pattern)
    centre += proposal.gamma * patterns.mean()[0]
    return PatternTerms(patterns, proposal, centre, patterns.noise(draws.normal.astype(float)))


def all_terms(
    patterns: PatternLikelihood, proposal: PatternProposal, draws: PatternDraws
) -> PatternTerms:
    """Terms of all chunks, many in float32 like the draws; they do not depend on σ."""

    width = jnp.float32 if draws.normal.size > _EXACT else jnp.float64

    @jax.checkpoint
    def chunk(draws: PatternDraws) -> tuple[jax.Array, jax.Array]:
        likelihoods = terms(patterns, proposal, draws)
        return likelihoods.centre.astype(width), likelihoods.noise.astype(width)

    kept = jax.lax.map(chunk, _cut(draws))
    return PatternTerms(patterns, proposal, *(x.reshape(-1, patterns.numbers) for x in kept))


def _cut(tree: PyTree) -> PyTree:
    """Arrays of pairs in chunks along the first axis."""
    pairs, n = jax.tree.leaves(tree)[-1].shape
    # a device's part of the draws need not be whole chunks
    chunks = next(k for k in range(_chunks_of(pairs, n), pairs + 1) if pairs % k == 0)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), tree)


def log_values(
    patterns: PatternLikelihood, proposal: PatternProposal, log_sigma: Scalar, epsilon: Scalar
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(centre, noise) of a chunk -> log f, f = (P/R)(1 - e^(ε-Y))₊, for z, then for -z.

    Args:
      patterns, proposal: at σ = 1, and where X is put.
      log_sigma, epsilon: log σ and ε.
    """
    x = jnp.exp(-log_sigma)
    scaled = patterns.scaled(jnp.exp(log_sigma))
    # not of ``scaled``: derivatives in σ would pass through all columns
    toward, square = patterns.mean()
    of_loss = scaled.ratio()
    of_proposal = _ratio(scaled, proposal, (x**2 * toward, x**2 * square))

    def values(centre: jax.Array, noise: jax.Array) -> jax.Array:
        moved, centre = x * noise, x**2 * centre
        exponents = jnp.concatenate([centre + moved, centre - moved])
        loss = of_loss(exponents)
        return loss - of_proposal(exponents) + log_hinge(loss - epsilon)

    return values


def log_delta(terms: PatternTerms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
    """log δ̂: smooth and decreasing in log σ, and differentiable in the patterns."""
    values = log_values(terms.patterns, terms.proposal, log_sigma, epsilon)

    @jax.checkpoint
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return values(*(kept.astype(float) for kept in part))

    found = jax.lax.map(chunk, _cut((terms.centre, terms.noise)))
    return jax.scipy.special.logsumexp(found) - np.log(found.size)


@float64
def placed(
    patterns: PatternLikelihood,
    noise_multiplier: float,
    epsilon: float,
    ceilings: Callable[[Any], Ceilings],
) -> PatternProposal:
    """The proposal for this σ and ε, by the order of the certificate's chain there.

    Args:
      patterns: at σ = 1.
      noise_multiplier, epsilon: σ and ε.
      ceilings: of patterns in noise units; estimates will do.
    """
    scaled = patterns.scaled(noise_multiplier)
    tilts = remove_tilts(ceilings(scaled), Point(noise_multiplier, epsilon))
    order = next((tilt.order for tilt in tilts if tilt.kind != "shift"), 1)
    return PatternProposal(*(jnp.asarray(part) for part in (1 + _OWN * order, _REST * order)))
