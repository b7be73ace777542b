"""δ̂ as a deterministic function of σ: frozen samples, in bounded memory, for any scheme."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, design_point, importance, sharding
from mfopt.accounting.monte_carlo.evidence import Pilot, Point
from mfopt.accounting.monte_carlo.likelihood import Likelihood

_CHUNK = 2048  # samples, at most
_GLANCE, _SLOPE = 2048, 0.02  # samples that a slope is read off, over such a step of log σ
_KEPT = 4  # memory budgets for the draws of an estimate: to make them again costs b² for each


class FrozenEstimator(Protocol):
    """Proposal of frozen samples, and their values at any σ: a JAX pytree.

    Attributes:
      likelihood, mean_square: of the mechanism at σ = 1; ḡ = E_k |m_k|², likewise.
    """

    @property
    def likelihood(self) -> Likelihood: ...

    @property
    def mean_square(self) -> Any: ...

    def terms(self, key: jax.Array, size: int) -> Any:
        """σ-independent terms of ``size`` samples in antithetic pairs z and −z, a pytree."""

    def noise(self, terms: Any) -> jax.Array:
        """<m, z> of every entry, shape (pairs, entries)."""

    def log_values(self, terms: Any, log_sigma: jax.Array, epsilon: jax.Array) -> jax.Array:
        """log f of the remove direction, shape (2·pairs,): all z first, then all −z."""


class LogDelta(NamedTuple):
    """log δ̂ at one σ, its slope in log σ, and the relative standard error of δ̂."""

    value: float
    slope: float
    relative_error: float

    @classmethod
    def joined(cls, parts: np.ndarray, pairs: int) -> LogDelta:
        """Combine the :func:`paired_moments` of chunks, shape (chunks, 4), of ``pairs`` in all."""
        top, total, square, slope = parts.T
        peak = np.max(top)
        if np.isnan(peak):  # no number says nothing of σ
            return cls(np.nan, np.nan, np.inf)
        if not np.isfinite(peak):  # no sample reached ε: δ̂ = 0, σ is far too large
            return cls(-np.inf, -np.inf, np.inf)
        weight = np.exp(top - peak)
        first, second = np.sum(weight * total), np.sum(weight**2 * square)
        mean, steepness = first / pairs, np.sum(weight * slope) / first
        variance = max(second / pairs - mean**2, 0.0) / max(pairs - 1, 1)
        return cls(float(peak + np.log(mean)), float(steepness), float(np.sqrt(variance) / mean))


class FrozenSamples:
    """Samples held fixed, so log δ̂ is smooth and decreasing in log σ.

    Chunks are spread over the local devices; the answer is the same for any number of them.
    Terms are kept while they fit into the memory budget and regenerated from their counters at
    each evaluation where they do not, so memory is bounded for any number of samples.

    Args:
      estimator: where the samples are put.
      epsilon: ε of the hockey-stick divergence.
      samples: number of samples, rounded up to whole chunks.
      key: randomness.
    """

    @float64
    def __init__(
        self, estimator: FrozenEstimator, epsilon: float, samples: int, key: jax.Array
    ) -> None:
        self.epsilon, self._estimator = float(epsilon), jax.device_put(estimator)
        size = min(chunked.chunk_size(samples, estimator.likelihood.work), _CHUNK)
        self._size = size + size % 2
        self._count = -(-samples // self._size)
        self.samples = self._size * self._count
        self._devices = sharding.devices()[: self._count]  # none that would be idle
        keys = [chunked.subkey(key, i) for i in range(self._count)]
        self._keys = sharding.rounds(keys, self._devices)
        shapes = jax.eval_shape(functools.partial(self._estimator.terms, size=self._size), key)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
        kept = held * self._count <= _KEPT * chunked.MEMORY_BUDGET
        self._terms = [self._make(k) for k in self._keys] if kept else None

    def _make(self, keys: Any) -> Any:
        return sharding.each(_terms, self._devices, keys, self._estimator, static=(self._size,))

    def _chunks(self) -> Iterable[Any]:
        return self._terms if self._terms is not None else map(self._make, self._keys)

    @float64
    def evaluate(self, log_sigma: float) -> LogDelta:
        """log δ̂ of the remove direction; antithetic pairs are the units of its standard error."""
        return self._joined(_moments, log_sigma, self._size // 2)

    @float64
    def evaluate_add(self, log_sigma: float) -> LogDelta:
        """The add direction's, from the same normals."""
        pairs = self._size // 2
        return self._joined(_moments_add, log_sigma, pairs - importance.placing(pairs))

    def _joined(self, moments: Callable[..., jax.Array], log_sigma: float, pairs: int) -> LogDelta:
        """``moments`` of all chunks, of so many pairs each."""
        same = self._estimator, log_sigma, self.epsilon
        parts, left = [], self._count
        for terms in self._chunks():
            parts.append(np.asarray(sharding.each(moments, self._devices, terms, *same)))
            done = min(len(self._devices), left)
            left -= done
            chunked.looked_at(done * self._size)
        found = sharding.results(parts, self._devices, self._count)
        return LogDelta.joined(found, pairs * self._count)


class FrozenPilots:
    """log δ̂ with the same random numbers at every σ, its proposals placed at one.

    Args:
      loss: of the mechanism.
      noise_multiplier: σ at which the proposals are placed.
      epsilon: ε of the estimate.
      samples: of each evaluation.
      key: randomness.
    """

    def __init__(
        self, loss: Any, noise_multiplier: float, epsilon: float, samples: int, key: jax.Array
    ) -> None:
        self.samples, self._loss, self._epsilon, self._key = samples, loss, epsilon, key
        self._tilts = {
            direction: loss.least(direction, Point(noise_multiplier, epsilon))
            for direction in ("remove", "add")
        }

    def evaluate(self, log_sigma: float) -> LogDelta:
        """The remove direction."""
        return self._log_delta("remove", log_sigma)

    def evaluate_add(self, log_sigma: float) -> LogDelta:
        """The add direction; its ceiling, where that is far below what could matter."""
        return self._log_delta("add", log_sigma)

    def _log_delta(self, direction: str, log_sigma: float) -> LogDelta:
        here = self._pilot(direction, log_sigma, self.samples)
        few = min(_GLANCE, self.samples)
        below, ahead = (self._pilot(direction, log_sigma + s, few) for s in (0.0, _SLOPE))
        slope = (ahead.log_mean - below.log_mean) / _SLOPE
        if not math.isfinite(slope):
            return LogDelta(here.log_mean, -math.inf, math.inf)
        return LogDelta(here.log_mean, slope, here.deviation / math.sqrt(here.samples))

    def _pilot(self, direction: str, log_sigma: float, samples: int) -> Pilot:
        point = Point(math.exp(log_sigma), self._epsilon)
        tilt = self._loss.at(self._tilts[direction], point)
        return self._loss.pilot(tilt, point, samples, self._key)


def kept_bytes(samples: int, bins: int) -> int:
    """Bytes to cache the terms of ``samples`` samples of b modes; 0 if they do not fit."""
    # for a pair of samples bins + 2K numbers and an index
    found = samples * 4 * (bins + 2 * design_point.node_count(bins) + 1)
    return found if found <= _KEPT * chunked.MEMORY_BUDGET else 0


@functools.partial(_quick.jit, static_argnums=2)
def _terms(key: jax.Array, estimator: FrozenEstimator, size: int) -> Any:
    return estimator.terms(key, size)


@_quick.jit
def _moments(
    terms: Any, estimator: FrozenEstimator, log_sigma: jax.Array, epsilon: jax.Array
) -> jax.Array:
    return paired_moments(lambda theta: estimator.log_values(terms, theta, epsilon), log_sigma)


@_quick.jit
def _moments_add(
    terms: Any, estimator: FrozenEstimator, log_sigma: jax.Array, epsilon: jax.Array
) -> jax.Array:
    noise = estimator.noise(terms)
    # not of what is scaled: derivatives in σ would pass through all columns
    toward, square = estimator.likelihood.mean()

    def log_values(theta: jax.Array) -> jax.Array:
        x = jnp.exp(-theta)
        scaled, of_mean = estimator.likelihood.scaled(1 / x), (x**2 * toward, x**2 * square)
        norm = x**2 * estimator.mean_square
        return importance.log_values_add(scaled, of_mean, norm, x * noise, epsilon)

    return paired_moments(log_values, log_sigma)


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
