"""δ̂ where bins are thrown more than once, on frozen samples: for calibration and optimization.

Samples come from R = Σ_j E_k N(α_j m_k + γ_j m̄, σ²I)/J, m̄ the mean mode: a unit's own columns are
overshot by α, and all others are raised alike by γ. R over Q is a chain as P over Q is, with
exponents α Z - α² |M|²/2 - αγ <M, m̄> and transitions T^{α²}, so a sample costs 1 + J forward
passes. Any (α, γ) is unbiased; no bound on the weights is proven. They are fitted to samples of the
certificate's proposal (:mod:`.pattern_tilts`), which misses nothing: the second moment of P(1 -
e^{ε-Y})₊/R under R is the mean of the same ratio under its numerator.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, pattern_tilts, spread
from mfopt.accounting.monte_carlo.dominating_pair import log_hinge
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.frozen import LogDelta, paired_moments
from mfopt.accounting.monte_carlo.pattern_ceilings import Ceilings
from mfopt.accounting.monte_carlo.pattern_tilts import add_order, remove_tilts
from mfopt.accounting.monte_carlo.patterns import (
    Overlaps,
    Patterns,
    corners,
    log_mean,
    mean_square,
    noise,
    squared_norms,
    toward_mean,
)

COMPONENTS = 2
_CHUNK = 2**17  # numbers of a chunk's antithetic pairs: a few MiB of arrays
_PILOT = 256
_START = ((0.35, 0.65), (0.65, 0.35))  # of the order, the parts of α - 1 and γ
_REACH = 3.0  # of the order, the largest α - 1 and γ: a component that no sample needs would leave


class PatternProposal(NamedTuple):
    """α and γ of the components, each of shape (J,)."""

    alpha: jax.Array
    gamma: jax.Array


class PatternDraws(NamedTuple):
    """Frozen randomness; every row serves z and -z.

    Attributes:
      component: shape (pairs,).
      bins: of each throw, shape (pairs, K).
      normal: shape (pairs, n), float32: an estimate needs no more.
    """

    component: jax.Array
    bins: jax.Array
    normal: jax.Array


class PatternTerms(NamedTuple):
    """What log δ̂ is computed from: of X = v + σz by samples, with the rest in chunks.

    Attributes:
      patterns: C.
      proposal: where X is put.
      centre: Mᵀv, shape (pairs, K·b).
      noise: Mᵀz, shape (pairs, K·b).
    """

    patterns: Patterns
    proposal: PatternProposal
    centre: jax.Array
    noise: jax.Array


def _chunks_of(pairs: int, n: int) -> int:
    """In how many chunks so many antithetic pairs are looked at."""
    return -(-pairs // max(64, min(_CHUNK // n, 4096)))


def _whole_pairs(samples: int, n: int) -> int:
    """Pairs that make at least ``samples``, in chunks of one size."""
    pairs = -(-samples // 2)
    chunks = _chunks_of(pairs, n)
    return -(-pairs // chunks) * chunks


@functools.partial(_quick.jit, static_argnums=(1, 2))
def draw(key: jax.Array, samples: int, shape: tuple[int, int, int]) -> PatternDraws:
    """At least ``samples`` frozen draws; ``shape`` is (K, b, n)."""
    throws, bins, n = shape
    count = _whole_pairs(samples, n)
    bin_key, noise_key = jax.random.split(key)
    return PatternDraws(
        jnp.arange(count) % COMPONENTS,
        jax.random.randint(bin_key, (count, throws), 0, bins),
        jax.random.normal(noise_key, (count, n), jnp.float32),
    )


def _log_ratio(
    patterns: Patterns, proposal: PatternProposal, exponents: jax.Array, scale: jax.Array
) -> jax.Array:
    """log R/Q at Z = ``exponents``; ``scale`` is 1/σ², which overlaps are multiplied by."""
    half = scale * squared_norms(patterns) / 2
    corner = scale * corners(patterns)
    toward, square = (scale * part for part in toward_mean(patterns))
    mean = jnp.sum(exponents, axis=1) / patterns.bins

    def one(component: tuple[jax.Array, jax.Array]) -> jax.Array:
        alpha, gamma = component
        own = alpha * exponents - alpha**2 * half - alpha * gamma * toward
        chain = log_mean(own, alpha**2 * corner, patterns.bins)
        return chain + gamma * mean - gamma**2 * square / 2

    parts = [one((proposal.alpha[j], proposal.gamma[j])) for j in range(len(proposal.alpha))]
    result: jax.Array = jax.scipy.special.logsumexp(jnp.stack(parts), axis=0) - np.log(len(parts))
    return result


def terms(patterns: Patterns, proposal: PatternProposal, draws: PatternDraws) -> PatternTerms:
    """Of one chunk, in float64."""
    alpha, gamma = (part[draws.component][:, None] for part in map(jnp.asarray, proposal))
    centre = alpha * Overlaps(patterns).of(draws.bins) + gamma * toward_mean(patterns)[0]
    return PatternTerms(patterns, proposal, centre, noise(patterns, draws.normal.astype(float)))


def all_terms(patterns: Patterns, proposal: PatternProposal, draws: PatternDraws) -> PatternTerms:
    """Of all chunks, kept in float32 as the draws are: the same at any σ."""

    @jax.checkpoint
    def chunk(draws: PatternDraws) -> tuple[jax.Array, jax.Array]:
        made = terms(patterns, proposal, draws)
        return made.centre.astype(jnp.float32), made.noise.astype(jnp.float32)

    kept = jax.lax.map(chunk, _cut(draws))
    return PatternTerms(patterns, proposal, *(x.reshape(-1, patterns.numbers) for x in kept))


def _cut(tree: Any) -> Any:
    """Arrays of pairs in chunks along the first axis."""
    pairs, n = jax.tree.leaves(tree)[-1].shape
    # a device's part of the draws need not be whole chunks
    chunks = next(k for k in range(_chunks_of(pairs, n), pairs + 1) if pairs % k == 0)
    return jax.tree.map(lambda leaf: leaf.reshape(chunks, -1, *leaf.shape[1:]), tree)


def log_values(terms: PatternTerms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log f, f = (P/R)(1 - e^(ε-Y))₊, of one chunk: shape (2·pairs,), z first, then -z."""
    patterns, proposal = terms.patterns, terms.proposal
    x = jnp.exp(-log_sigma)
    moved, centre = x * terms.noise, x**2 * terms.centre
    exponents = jnp.concatenate([centre + moved, centre - moved])
    half = x**2 * squared_norms(patterns) / 2
    loss = log_mean(exponents - half, x**2 * corners(patterns), patterns.bins)
    ratio = _log_ratio(patterns, proposal, exponents, x**2)
    return loss - ratio + log_hinge(loss - epsilon)


def log_delta(terms: PatternTerms, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
    """log δ̂: smooth and decreasing in log σ, and differentiable in the patterns."""

    @jax.checkpoint
    def chunk(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        own = terms._replace(centre=part[0].astype(float), noise=part[1].astype(float))
        return log_values(own, log_sigma, epsilon)

    values = jax.lax.map(chunk, _cut((terms.centre, terms.noise)))
    result: jax.Array = jax.scipy.special.logsumexp(values) - np.log(values.size)
    return result


@float64
def fit(patterns: Patterns, noise_multiplier: float, epsilon: float) -> PatternProposal:
    """The (α, γ) of least variance at this σ and ε, from the same pilot samples at every call."""
    scaled = patterns.scaled(noise_multiplier)
    tilts = remove_tilts(Ceilings(scaled), Point(noise_multiplier, epsilon))
    order = next((tilt.order for tilt in tilts if tilt.kind == "chain"), 1)
    exponents, log_weight = _pilot(scaled, float(order), epsilon, chunked.seed_key(0))
    start = np.array([(math.log1p(order * own), order * rest) for own, rest in _START])[:COMPONENTS]
    best = start
    if np.any(np.isfinite(np.asarray(log_weight))):
        least = math.inf

        def function(flat: np.ndarray) -> tuple[float, np.ndarray]:
            nonlocal best, least
            value, slope = _second_moment(
                jnp.asarray(flat.reshape(-1, 2)), scaled, exponents, log_weight
            )
            if float(value) < least:
                least, best = float(value), flat.reshape(-1, 2).copy()
            return float(value), np.asarray(slope).reshape(-1)

        far = _REACH * order
        scipy.optimize.minimize(
            function,
            start.reshape(-1),
            jac=True,
            method="L-BFGS-B",
            bounds=[(-1.0, math.log1p(far)), (-far, far)] * COMPONENTS,
            options={"maxfun": 12},
        )
    return PatternProposal(jnp.exp(jnp.asarray(best[:, 0])), jnp.asarray(best[:, 1]))


@_quick.jit
def _pilot(
    scaled: Patterns, order: jax.Array, epsilon: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(Z, log of weight times target) of samples from the certificate's chain."""
    pattern_key, noise_key = jax.random.split(key)
    moved = noise(scaled, jax.random.normal(noise_key, (_PILOT, scaled.iterations)))
    drawn = pattern_tilts.draw(scaled, pattern_key, moved, order)
    exponents = drawn.products + moved
    half = squared_norms(scaled) / 2
    loss = log_mean(exponents - half, corners(scaled), scaled.bins)
    hinge = log_hinge(loss - epsilon)
    return exponents, drawn.log_normalizers - order * loss + hinge + loss + hinge


@jax.jit
@jax.value_and_grad
def _second_moment(
    parameters: jax.Array, scaled: Patterns, exponents: jax.Array, log_weight: jax.Array
) -> jax.Array:
    proposal = PatternProposal(jnp.exp(parameters[:, 0]), parameters[:, 1])
    ratio = _log_ratio(scaled, proposal, exponents, jnp.ones(()))
    return jax.scipy.special.logsumexp(log_weight - ratio)


class FrozenPatterns:
    """log δ̂ of one mechanism at any σ, on samples made again from their counters at each call.

    Chunks are spread over the local devices; the answer is the same for any number of them.

    Args:
      patterns: C.
      noise_multiplier: σ at which the proposal is placed.
      epsilon: ε of the hockey-stick divergence.
      samples: rounded up to whole chunks.
      key: randomness.
    """

    def __init__(
        self,
        patterns: Patterns,
        noise_multiplier: float,
        epsilon: float,
        samples: int,
        key: jax.Array,
    ) -> None:
        self.patterns, self.epsilon = patterns, float(epsilon)
        self._proposal = fit(patterns, noise_multiplier, epsilon)
        pairs = _whole_pairs(samples, patterns.iterations)
        chunks = _chunks_of(pairs, patterns.iterations)
        self.samples, self._size = 2 * pairs, 2 * pairs // chunks
        self._count, self._devices = chunks, spread.row(chunks)
        keys = [chunked.subkey(key, i) for i in range(chunks)]
        self._keys = spread.rounds(keys, self._devices)

    @float64
    def evaluate(self, log_sigma: float) -> LogDelta:
        """log δ̂, its slope, and its relative standard error (antithetic pairs as units)."""
        at = self.patterns, self._proposal, log_sigma, self.epsilon
        parts, left = [], self._count
        for keys in self._keys:
            made = spread.each(_moments, self._devices, keys, *at, static=(self._size,))
            parts.append(np.asarray(made))
            done = min(len(self._devices), left)
            left -= done
            chunked.looked_at(done * self._size)
        found = spread.results(parts, self._devices, self._count)
        return LogDelta.joined(found, self.samples // 2)

    @float64
    def log_delta_add(self, log_sigma: float) -> float:
        """log δ̂ of the add direction from as many samples of its own."""
        at = self.patterns, log_sigma, self.epsilon
        values = [
            np.asarray(spread.each(_log_delta_add, self._devices, keys, *at, static=(self._size,)))
            for keys in self._keys
        ]
        found = spread.results(values, self._devices, self._count)
        with np.errstate(invalid="ignore"):  # what is no number stays none
            return float(np.logaddexp.reduce(found) - np.log(self._count))


@functools.partial(jax.jit, static_argnums=5)
def _moments(
    key: jax.Array,
    patterns: Patterns,
    proposal: PatternProposal,
    log_sigma: jax.Array,
    epsilon: jax.Array,
    size: int,
) -> jax.Array:
    draws = draw(key, size, (patterns.throws, patterns.bins, patterns.iterations))
    made = terms(patterns, proposal, draws)
    return paired_moments(lambda theta: log_values(made, theta, epsilon), log_sigma)


@functools.partial(jax.jit, static_argnums=4)
def _log_delta_add(
    key: jax.Array, patterns: Patterns, log_sigma: jax.Array, epsilon: jax.Array, size: int
) -> jax.Array:
    """As :func:`.design_point.log_delta_add`: samples of N(-t m̄, σ²I)."""
    at = patterns.scaled(jnp.exp(log_sigma))
    toward, square = toward_mean(at)
    t = add_order(mean_square(at), square, epsilon)
    moved = noise(at, jax.random.normal(key, (size // 2, at.iterations)))
    exponents = jnp.concatenate([moved, -moved]) - t * toward
    loss = log_mean(exponents - squared_norms(at) / 2, corners(at), at.bins)
    log_weight = t * jnp.sum(exponents, axis=1) / at.bins + t**2 * square / 2
    values = log_weight + log_hinge(-epsilon - loss)
    result: jax.Array = jax.scipy.special.logsumexp(values) - np.log(values.size)
    return result
