"""δ̂ as a deterministic function of σ: frozen design-point samples, in bounded memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, design_point, spread
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.nested import Factor, Nested, Square

_CHUNK = 2048  # samples, at most
_KEPT = 4  # memory budgets for the draws of an estimate: to make them again costs b² for each


Own = tuple[
    jax.Array, jax.Array, jax.Array
]  # of a chunk, or of a round of them: design_point.linear


class LogDelta(NamedTuple):
    """log δ̂ at one σ, its slope in log σ, and the relative standard error of δ̂."""

    value: float
    slope: float
    relative_error: float

    @classmethod
    def joined(cls, parts: np.ndarray, pairs: int) -> LogDelta:
        """From the :func:`paired_moments` of chunks, shape (chunks, 4), of so many pairs in all."""
        top, total, square, slope = parts.T
        peak = np.max(top)
        if np.isnan(peak):  # no number says nothing of σ
            return cls(np.nan, np.nan, np.inf)
        if not np.isfinite(peak):  # no sample reached ε: δ̂ = 0, σ is far too large
            return cls(-np.inf, -np.inf, np.inf)
        weight = np.exp(top - peak)
        first, second = np.sum(weight * total), np.sum(weight**2 * square)
        variance = max(second / pairs - (first / pairs) ** 2, 0.0) / max(pairs - 1, 1)
        return cls(
            float(peak + np.log(first / pairs)),
            float(np.sum(weight * slope) / first),
            float(np.sqrt(variance) / (first / pairs)),
        )


class FrozenSamples:
    """Draws and shifts held fixed, so log δ̂ is smooth and decreasing in log σ.

    Chunks are spread over the local devices; the answer is the same for any number of them.

    Draws are kept while they fit into the memory budget and made again from their counters at
    each evaluation where they do not, so memory is bounded for any number of samples.

    Args:
      pair: the dominating pair.
      noise_multiplier: σ at which the shifts are placed (any value is unbiased; near the
        solution is precise).
      epsilon: ε of the hockey-stick divergence.
      samples: number of samples, rounded up to whole chunks.
      key: randomness.
    """

    @float64
    def __init__(
        self,
        pair: DominatingPair,
        noise_multiplier: float,
        epsilon: float,
        samples: int,
        key: jax.Array,
    ) -> None:
        self.epsilon = float(epsilon)
        self._bins, self._factor = pair.bins, jax.device_put(pair.factor)
        gram = np.asarray(pair.gram)
        self._overlaps = gram.mean(axis=0), gram.diagonal()
        offset = np.random.default_rng(np.asarray(jax.random.key_data(key))).random()
        if isinstance(pair.factor, Nested):
            times: Any = Square(self._factor, jnp.asarray(self._overlaps[1]))
        else:
            times = jax.device_put(gram)
        placed = design_point.placed(times, float(noise_multiplier), self.epsilon, offset)
        # by NumPy where it is a matrix: two products, once
        by = times if isinstance(times, Square) else gram
        known = design_point.tables(by, np.asarray(placed.weights))
        self._placed, self._tables = placed, design_point.Tables(*jax.device_put(known))
        self._size = _even_chunk(samples, pair.bins)
        count = -(-samples // self._size)
        self.samples, self._count = self._size * count, count
        self._devices = spread.row(count)
        keys = [chunked.subkey(key, i) for i in range(count)]
        self._keys = spread.rounds(keys, self._devices)
        kept = kept_bytes(self.samples, pair.bins)
        self._own = [self._make(k) for k in self._keys] if kept else None

    def _make(self, keys: Any) -> Own:
        at = self._factor, self._placed.weights
        shape = self._size, self._bins
        made: Own = spread.each(_linear, self._devices, keys, *at, static=shape)
        return made

    def _chunks(self) -> Iterable[Own]:
        return self._own if self._own is not None else map(self._make, self._keys)

    @float64
    def evaluate(self, log_sigma: float) -> LogDelta:
        """log δ̂, its slope, and its relative standard error (antithetic pairs as units)."""
        same = self._tables, self._placed.nodes, log_sigma, self.epsilon
        parts, left = [], self._count
        for own in self._chunks():
            parts.append(np.asarray(spread.each(_moments, self._devices, own, *same)))
            done = min(len(self._devices), left)
            left -= done
            chunked.looked_at(done * self._size)
        found = spread.results(parts, self._devices, self._count)
        return LogDelta.joined(found, self.samples // 2)

    @float64
    def log_delta_add(self, log_sigma: float) -> float:
        """log δ̂ of the add direction from the same normals."""
        same = *self._overlaps, log_sigma, self.epsilon
        values = [
            np.asarray(spread.each(_log_delta_add, self._devices, own[1], *same))
            for own in self._chunks()
        ]
        found = spread.results(values, self._devices, self._count)
        return float(np.logaddexp.reduce(found) - np.log(self._count))


def _even_chunk(samples: int, bins: int) -> int:
    """Samples per chunk, whole antithetic pairs; few sizes, since each is compiled."""
    size = min(chunked.chunk_size(samples, bins), _CHUNK)
    return size + size % 2


def kept_bytes(samples: int, bins: int) -> int:
    """Of the draws of so many samples; 0 where they are too many to be kept."""
    found = samples * bytes_per_sample(bins)
    return found if found <= _KEPT * chunked.MEMORY_BUDGET else 0


def bytes_per_sample(bins: int) -> int:
    """Of kept ``design_point.Terms``: for a pair of samples bins + 2K numbers and an index."""
    return 4 * (bins + 2 * design_point.node_count(bins) + 1)


@functools.partial(_quick.jit, static_argnums=(3, 4))
def _linear(key: jax.Array, factor: Factor, weights: jax.Array, size: int, bins: int) -> Own:
    return design_point.linear(factor, weights, design_point.draw(key, size, bins))


@_quick.jit
def _moments(
    own: Own,
    tables: design_point.Tables,
    nodes: jax.Array,
    log_sigma: jax.Array,
    epsilon: jax.Array,
) -> jax.Array:
    terms = design_point.joined(tables, own, nodes)
    return paired_moments(lambda theta: design_point.log_values(terms, theta, epsilon), log_sigma)


def paired_moments(log_values: Callable[[jax.Array], jax.Array], log_sigma: jax.Array) -> jax.Array:
    """(top, Σ p, Σ p², Σ dp/dlogσ) of samples z, then -z, p the mean of a pair, over e^top."""
    values, tangents = jax.jvp(log_values, (log_sigma,), (jnp.ones_like(log_sigma),))
    top = jnp.max(values)
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    scaled = jnp.exp(values - safe)
    rate = jnp.where(scaled > 0, scaled * jnp.where(scaled > 0, tangents, 0.0), 0.0)
    half = scaled.shape[0] // 2
    paired = (scaled[:half] + scaled[half:]) / 2
    return jnp.stack([top, jnp.sum(paired), jnp.sum(paired**2), jnp.sum(rate) / 2])


@_quick.jit
def _log_delta_add(
    linear: jax.Array,
    means: jax.Array,
    squares: jax.Array,
    log_sigma: jax.Array,
    epsilon: jax.Array,
) -> jax.Array:
    return design_point.log_delta_add(means, squares, linear, log_sigma, epsilon)
