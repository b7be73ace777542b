"""k of n steps with separation on a circle: the likelihood ratio by a pass for each beginning.

A unit takes part in exactly k of n steps, any two at least S apart where steps n − 1 and 0 are
neighbours, and all such patterns are alike (:class:`~mfopt.sampling.KOfN`). Their number is Z =
(n/k) binom(n − k(S−1) − 1, k − 1). Where C has at most S bands the columns of C of one unit's
participations do not overlap, so with u_t = <c_t, X>/σ² − |c_t|²/2σ²

    P/Q (X) = Σ_k Π_{t in k} e^(u_t) / Z.

**The circle is cut at the first empty block.** Of the blocks of S steps from step 0 on a pattern
has at most one participation each, and with S(k+1) <= n one of the first k + 1 is empty. Let it be
block q: one participation in each block before it, and none within S − 1 steps before step (q+1)S.
What follows is a line again, from that step to step n and on through blocks 0, …, q − 1:

    v_q,i = Σ over participations in blocks 0, …, q − 1, one each, the first at or after step i,
    f_t(c) = f_{t+1}(c) + e^(u_t) f_{t+S}(c−1)  for t < n,   f_{n+i}(c) = v_q,i [c = 0],
    Z P/Q = Σ_q f_{(q+1)S}(k − q),  an f for each q.

Blocks of f end at step n, so that no step is left over. A sample costs about n k²/2 operations and
n/S + k steps one after another. All terms are positive, each block is divided by its largest, and
nothing cancels. A participation weighs e^u times x = p/(1−p)^S, with which counts near k weigh most
(see :mod:`.circular_ceilings`), and the x^k is divided by.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import pytree
from mfopt.accounting.monte_carlo import pattern_frozen, patterns
from mfopt.accounting.monte_carlo.likelihood import SharedGaussianComponent, shared_component
from mfopt.accounting.monte_carlo.separated import Separated


@pytree
@dataclasses.dataclass(frozen=True)
class Circular(Separated):
    """k steps of a unit on a circle, any two of them at least as far apart as C has bands."""

    @property
    def times(self) -> int:
        """k."""
        return self.dimension // self.bins

    @property
    def log_patterns(self) -> float:
        """log Z."""
        n, k = self.dimension, self.times
        rest = n - k * (self.separation - 1) - 1
        log_gamma = scipy.special.gammaln
        log_ways = log_gamma(rest + 1) - log_gamma(k) - log_gamma(rest - k + 2)
        return math.log(n / k) + float(log_ways)

    @property
    def log_weight(self) -> float:
        """log x."""
        return math.log(self.probability) - self.separation * math.log1p(-self.probability)

    @property
    def work(self) -> int:
        return max(self.dimension, self.dimension * len(_pairs(self.times)[0]) // 16)

    def first(self, key: jax.Array, count: int) -> jax.Array:
        # a participation anywhere, and the n − kS steps that are free in k parts after it
        n, k, size = self.dimension, self.times, self.separation
        start_key, key = jax.random.split(key)
        start = jax.random.randint(start_key, (count, 1), 0, n)
        free = n - k * size
        borders = jax.lax.top_k(jax.random.uniform(key, (count, free + k - 1)), k - 1)[1]
        waits = jnp.sort(borders, axis=1) - jnp.arange(k - 1) + size * jnp.arange(1, k)
        steps = jnp.concatenate([start, start + waits], axis=1) % n
        return self._by_block(jnp.any(steps[:, :, None] == jnp.arange(n), axis=1))

    def largest_square(self) -> jax.Array:
        """max |m|² over k steps that are S apart on a line: no less than on the circle."""
        size, k = self.separation, self.times
        squares = self._cut(jnp.asarray(self.gram)[:1], 0.0)[0]

        def step(after: jax.Array, own: jax.Array) -> tuple[jax.Array, None]:
            taken = jnp.pad(own + after[:-1], ((1, 0), (0, 0)))
            found = jnp.concatenate([taken, after[:, :1]], axis=1)
            return jax.lax.cummax(found, axis=1, reverse=True)[:, :-1], None

        result: jax.Array = jax.lax.scan(step, jnp.zeros((k + 1, size)), squares, reverse=True)[0]
        return jnp.max(result[:, 0])

    def passed(self, exponents: jax.Array) -> tuple[Any, jax.Array]:
        size, k = self.separation, self.times
        exponents = exponents + self.log_weight
        skipped = self.dimension - size * self.lines
        late = jnp.moveaxis(exponents[:, skipped:].reshape(-1, self.lines, size), 1, 0)
        early = jnp.moveaxis(exponents[:, : k * size].reshape(-1, k, size), 1, 0)
        of, _, nothing = _pairs(k)

        def begin(after: jax.Array, at: tuple[jax.Array, jax.Array]) -> Any:  # v of all q
            u, longer = at
            peak = jax.lax.stop_gradient(jnp.max(u, axis=1))
            taken = jnp.exp(u - peak[:, None])[:, None] * after
            summed = jax.lax.cumsum(taken, axis=2, reverse=True)
            top = jax.lax.stop_gradient(summed[:, :, 0])
            logs = jnp.where(longer, jnp.log(top) + peak[:, None], 0.0)
            return jnp.where(longer[:, None], summed / top[:, :, None], after), (summed, logs)

        longer = jnp.arange(k + 1) > jnp.arange(k)[:, None]
        ones = jnp.ones((len(exponents), k + 1, size))
        first, (begun, each) = jax.lax.scan(begin, ones, (early, longer), reverse=True)
        logs = jnp.sum(each, axis=0)
        base = jnp.max(logs, axis=1)
        first = first * jnp.exp(logs - base[:, None])[:, :, None]

        def step(before: tuple[jax.Array, jax.Array], at: tuple[jax.Array, ...]) -> Any:
            (after, total), (u, whole) = before, at
            peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(u, axis=1), 0.0))
            fewer = jnp.where(nothing[:, None], 0.0, jnp.roll(after, 1, axis=1))
            taken = jnp.exp(u - peak[:, None])[:, None] * fewer
            without = jnp.exp(-peak)
            last = (without[:, None] * after[:, :, 0])[:, :, None]
            summed = jax.lax.cumsum(jnp.concatenate([taken, last], axis=2), axis=2, reverse=True)
            here = summed[:, :, :-1]
            # the circle may have been cut just before: at the place of step (q + 1) S
            ended = jnp.where(whole < 0, 0.0, here[:, whole, -skipped % size])
            total = total * without + ended
            top = jax.lax.stop_gradient(jnp.maximum(jnp.max(here, axis=(1, 2)), total))
            new = here / top[:, None, None], total / top
            return new, (summed, ended / total, jnp.log(top) + peak)

        start = jnp.where(nothing[:, None], first[:, of], 0.0), first[:, k, 0]
        whole = [np.flatnonzero(of == q)[-1] for q in range(k)] + [-1] * (self.lines - k)  # c = k−q
        every = late, jnp.asarray(whole)
        found, (summed, shares, logs) = jax.lax.scan(step, start, every, reverse=True)
        mean = jnp.log(found[1]) + jnp.sum(logs, axis=0) + base
        known = self.log_patterns + k * self.log_weight
        return (summed, shares[:k], begun), mean - known

    @property
    def lines(self) -> int:
        """Blocks of S steps that end at step n, but for the one at step 0."""
        return -(-self.dimension // self.separation) - 1

    def chosen(self, uniforms: jax.Array, weights: Any) -> jax.Array:
        summed, shares, begun = weights
        size, k, lines = self.separation, self.times, self.lines
        skipped = self.dimension - size * lines
        of = _pairs(k)[0]
        begins = np.array([*(np.flatnonzero(of == q)[0] for q in range(k)), 0])
        rows = jnp.arange(len(uniforms))
        # the empty block is after block j with the chance that no earlier one is
        q = jnp.sum(uniforms[:, 0] < jnp.cumprod(1 - shares, axis=0), axis=0)

        def step(state: tuple[jax.Array, jax.Array], at: tuple[jax.Array, ...]) -> Any:
            (free, left), (sums, uniform, j) = state, at
            free = jnp.where(j == q, -skipped % size, free)
            own = sums[rows, jnp.asarray(begins)[q] + left]
            place = jnp.sum(own[:, 1:] > (uniform * own[rows, free])[:, None], axis=1)
            place = jnp.where((j >= q) & (left > 0), place, size)
            took = place < size
            return (jnp.where(took, place, 0), left - took), place

        late = uniforms[:, 1 : 1 + lines].T, jnp.arange(lines)
        (free, _), after = jax.lax.scan(step, (jnp.zeros_like(q), k - q), (summed, *late))

        def begin(free: jax.Array, at: tuple[jax.Array, ...]) -> Any:
            sums, uniform, j = at
            own = jnp.pad(sums[rows, q], ((0, 0), (0, 1)))
            place = jnp.sum(own[:, 1:] > (uniform * own[rows, free])[:, None], axis=1)
            return jnp.where(j < q, place, free), jnp.where(j < q, place, size)

        early = begun, uniforms[:, 1 + lines : 1 + lines + k].T, jnp.arange(k)
        before = jax.lax.scan(begin, free, early)[1]

        def taken(places: jax.Array, start: int) -> jax.Array:
            hot = (places.T[:, :, None] == jnp.arange(size)).reshape(len(rows), -1)
            return jnp.pad(hot, ((0, 0), (start, self.dimension - start - hot.shape[1])))

        return self._by_block(taken(after, skipped) | taken(before, 0))

    @property
    def uniforms(self) -> int:
        return 1 + self.lines + self.times

    def _by_block(self, taken: jax.Array) -> jax.Array:
        """Place in each block, S for none, of steps given as booleans (samples, n)."""
        parts = self._cut(taken, 0)
        return jnp.where(jnp.any(parts, axis=2), jnp.argmax(parts, axis=2), self.separation)


@float64
def shared(at: Circular) -> SharedGaussianComponent | None:
    """Shared Gaussian component of all patterns, along C⁻ᵀ1: k steps are in each."""
    toward = patterns.toward(np.asarray(at.columns), at.dimension)
    return shared_component(at, toward, 1, float(pattern_frozen.largest_square(at)), at.times)


@functools.cache
def _pairs(k: int) -> tuple[np.ndarray, ...]:
    """(q, c, whether c is 0) for 0 <= q < k and 0 <= c <= k − q, in that order."""
    q, c = np.array([(q, c) for q in range(k) for c in range(k - q + 1)]).T
    return q, c, c == 0
