"""δ̂ on frozen samples where bins are assigned more than once: for calibration and optimization.

Samples come from R = Σ_j E_k N(α_j m_k + γ_j m̄, σ²I)/J, m̄ the mean mode: a unit's own columns are
overshot by α, and all others are raised alike by γ. R over Q is a chain as P over Q is, with
exponents α Z - α² |M|²/2 - αγ <M, m̄> and transitions T^{α²}, so a sample costs 1 + J forward
passes. Any (α, γ) is unbiased; no bound on the weights is proven. They are fitted to samples of the
certificate's proposal (:mod:`.importance`), which misses nothing: the second moment of P(1 -
e^{ε-Y})₊/R under R is the mean of the same ratio under its numerator.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _quick
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import STATIC
from mfopt.accounting.monte_carlo import band, chunked
from mfopt.accounting.monte_carlo.dominating_pair import log_hinge
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.importance import remove_tilts
from mfopt.accounting.monte_carlo.likelihood import Ceilings, Drawn
from mfopt.strategies.fields import Array

COMPONENTS = 2
_CHUNK = 2**17  # numbers of a chunk's antithetic pairs: a few MiB of arrays
_PILOT = 256
_ENOUGH = 1e-3  # of the logarithm of a second moment: what the pilot's samples tell apart
_EXACT = 2**20  # numbers that are cached in float64
_START = ((0.35, 0.65), (0.65, 0.35))  # of the order, the parts of α - 1 and γ
_REACH = 3.0  # of the order, the largest α - 1 and γ: a component that no sample needs would leave


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

    def scaled(self, noise_multiplier: Any) -> Self:
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

    def log_ratio(self, exponents: jax.Array, power: Any = 1) -> jax.Array:
        return self.ratio(power)(exponents)

    @abc.abstractmethod
    def ratio(self, power: Any = 1) -> Callable[[jax.Array], jax.Array]:
        """Exponents -> :meth:`log_ratio`; what it takes of C alone is found here, once."""

    @abc.abstractmethod
    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, by: Any) -> Drawn: ...

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
def largest_square(patterns: PatternLikelihood) -> jax.Array:
    """max_k |m_k|², as one program."""
    return patterns.largest_square()


@_quick.jit
def _mean_square(patterns: PatternLikelihood) -> jax.Array:
    """E_k |m_k|², as one program."""
    return patterns.mean_square()


class PatternProposal(NamedTuple):
    """α and γ of the components, each of shape (J,)."""

    alpha: jax.Array
    gamma: jax.Array


class PatternDraws(NamedTuple):
    """Frozen randomness; every row serves z and -z.

    Attributes:
      component: shape (pairs,).
      pattern: as the likelihood draws them, one for each row.
      normal: shape (pairs, n), float32: an estimate needs no more.
    """

    component: jax.Array
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
        jnp.arange(count) % COMPONENTS,
        likelihood.first(pattern_key, count),
        jax.random.normal(noise_key, (count, likelihood.dimension), jnp.float32),
    )


def _ratio(
    scaled: PatternLikelihood, proposal: PatternProposal, of_mean: tuple[jax.Array, jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """Z -> log R/Q, in noise units; ``of_mean`` is what :meth:`mean` gives."""
    toward, square = of_mean
    parts = [(scaled.ratio(a), g) for a, g in zip(proposal.alpha, proposal.gamma, strict=True)]

    def log_ratio(exponents: jax.Array) -> jax.Array:
        mean = scaled.average(exponents)
        own = [of(exponents - gamma * toward) - gamma**2 * square / 2 for of, gamma in parts]
        logs = jnp.stack(own) + proposal.gamma[:, None] * mean
        return jax.scipy.special.logsumexp(logs, axis=0) - np.log(len(own))

    return log_ratio


def terms(
    patterns: PatternLikelihood, proposal: PatternProposal, draws: PatternDraws
) -> PatternTerms:
    """Terms of one chunk of draws, in float64."""
    alpha, gamma = (part[draws.component][:, None] for part in map(jnp.asarray, proposal))
    centre = alpha * patterns.products(draws.pattern) + gamma * patterns.mean()[0]
    return PatternTerms(patterns, proposal, centre, patterns.noise(draws.normal.astype(float)))


def all_terms(
    patterns: PatternLikelihood, proposal: PatternProposal, draws: PatternDraws
) -> PatternTerms:
    """Terms of all chunks, many in float32 like the draws; they do not depend on σ."""

    width = jnp.float32 if draws.normal.size > _EXACT else jnp.float64

    @jax.checkpoint
    def chunk(draws: PatternDraws) -> tuple[jax.Array, jax.Array]:
        made = terms(patterns, proposal, draws)
        return made.centre.astype(width), made.noise.astype(width)

    kept = jax.lax.map(chunk, _cut(draws))
    return PatternTerms(patterns, proposal, *(x.reshape(-1, patterns.numbers) for x in kept))


def _cut(tree: Any) -> Any:
    """Arrays of pairs in chunks along the first axis."""
    pairs, n = jax.tree.leaves(tree)[-1].shape
    # a device's part of the draws need not be whole chunks
    chunks = next(k for k in range(_chunks_of(pairs, n), pairs + 1) if pairs % k == 0)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), tree)


def log_values(
    patterns: PatternLikelihood, proposal: PatternProposal, log_sigma: jax.Array, epsilon: jax.Array
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


def log_delta(terms: PatternTerms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log δ̂: smooth and decreasing in log σ, and differentiable in the patterns."""
    values = log_values(terms.patterns, terms.proposal, log_sigma, epsilon)

    @jax.checkpoint
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        return values(*(kept.astype(float) for kept in part))

    found = jax.lax.map(chunk, _cut((terms.centre, terms.noise)))
    return jax.scipy.special.logsumexp(found) - np.log(found.size)


@float64
def fit(
    patterns: PatternLikelihood,
    noise_multiplier: float,
    epsilon: float,
    ceilings: Callable[[Any], Ceilings],
) -> PatternProposal:
    """The (α, γ) of least variance at this σ and ε, from the same pilot samples at every call.

    Args:
      patterns: at σ = 1.
      noise_multiplier, epsilon: σ and ε.
      ceilings: of patterns in noise units; estimates will do.
    """
    scaled = patterns.scaled(noise_multiplier)
    # of all patterns: found in one pass
    tilts = remove_tilts(ceilings(scaled).of_all(), Point(noise_multiplier, epsilon))
    order = next((tilt.order for tilt in tilts if tilt.kind == "chain"), 1)
    exponents, log_weight = _pilot(scaled, float(order), epsilon, chunked.seed_key(0))
    start = np.array([(math.log1p(order * own), order * rest) for own, rest in _START])[:COMPONENTS]
    best = start
    if np.any(np.isfinite(np.asarray(log_weight))):
        least = math.inf

        def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal best, least
            at = flat.reshape(-1, 2)
            value, slope = _second_moment(jnp.asarray(at), scaled, exponents, log_weight)
            if float(value) < least:
                least, best = float(value), at.copy()
            return float(value), np.asarray(slope).reshape(-1)

        far = _REACH * order
        scipy.optimize.minimize(
            function,
            start.reshape(-1),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-1.0, math.log1p(far)), (-far, far)] * COMPONENTS,
            options={"maxfun": 12, "ftol": _ENOUGH},
        )
    return PatternProposal(jnp.exp(jnp.asarray(best[:, 0])), jnp.asarray(best[:, 1]))


@_quick.jit
def _pilot(
    scaled: PatternLikelihood, order: jax.Array, epsilon: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(Z, log of weight times target) of samples from the certificate's chain."""
    *draw_keys, noise_key = jax.random.split(key, 3)
    moved = scaled.noise(jax.random.normal(noise_key, (_PILOT, scaled.dimension)))
    drawn = scaled.draw(jnp.stack(draw_keys), moved, order, None)
    exponents = drawn.products + moved
    loss = scaled.log_ratio(exponents)
    hinge = log_hinge(loss - epsilon)
    return exponents, drawn.log_normalizers - order * loss + hinge + loss + hinge


@jax.jit
@jax.value_and_grad
def _second_moment(
    parameters: jax.Array, scaled: PatternLikelihood, exponents: jax.Array, log_weight: jax.Array
) -> jax.Array:
    proposal = PatternProposal(jnp.exp(parameters[:, 0]), parameters[:, 1])
    ratio = _ratio(scaled, proposal, scaled.mean())(exponents)
    return jax.scipy.special.logsumexp(log_weight - ratio)


class FrozenPatterns(NamedTuple):
    """Frozen samples of one mechanism (:class:`.frozen.FrozenEstimator`).

    Attributes:
      likelihood, mean_square: the patterns at σ = 1, and ḡ.
      proposal: where samples are put.
    """

    likelihood: PatternLikelihood
    mean_square: Any
    proposal: PatternProposal

    @classmethod
    def at(
        cls,
        patterns: PatternLikelihood,
        noise_multiplier: float,
        epsilon: float,
        ceilings: Callable[[Any], Ceilings],
    ) -> FrozenPatterns:
        """A proposal that is fitted at this σ and ε.

        Args:
          patterns, noise_multiplier, epsilon, ceilings: as for :func:`fit`.
        """
        proposal = fit(patterns, noise_multiplier, epsilon, ceilings)
        return cls(patterns, _mean_square(patterns), proposal)

    def terms(self, key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        draws = draw(key, size, self.likelihood)
        made = terms(self.likelihood, self.proposal, draws)
        return made.centre, made.noise

    def noise(self, terms: tuple[jax.Array, jax.Array]) -> jax.Array:
        return terms[1]

    def log_values(self, terms: Any, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
        return log_values(self.likelihood, self.proposal, log_sigma, epsilon)(*terms)
