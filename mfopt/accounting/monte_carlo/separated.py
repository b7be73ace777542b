"""b-min-sep sampling: the likelihood ratio by one backward pass over the steps.

A unit that is available at a step takes part with probability p, then rests for S − 1 steps; it
begins with r steps of rest left with probability p/(1 + (S−1) p) for r = 1, …, S − 1, else free
(:class:`~mfopt.sampling.BMinSep`). The columns of C of one unit's steps do not overlap where C has
at most S bands, so with u_t = <c_t, X>/σ² − |c_t|²/2σ²

    P/Q (X) = (f_0 + p Σ_{r=1..S−1} f_r) / (1 + (S−1) p),
    f_t = (1−p) f_{t+1} + p e^(u_t) f_{t+S},   f_t = 1 for t >= n.

The dominating pair is that of :mod:`.patterns`: a pattern's law is public and depends on no data,
so P is a mixture of Gaussians with a random sensitivity, for every C >= 0. Adjacency: add-remove of
one privacy unit whose per-iteration contribution is clipped to norm 1; σ for C as stored.

Steps go in blocks of S, of which a pattern has at most one each: f of a block is a running sum of
what it takes from the next block, so a sample costs n operations and n/S steps one after another.
All terms are positive and nothing cancels. Each block is divided by its first f, of which no other
is more than 1/(1−p)^S times as large.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from mfopt._runtime._arrays import Scalar
from mfopt._runtime._pytree import STATIC, pytree
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo.likelihood import Drawn
from mfopt.accounting.monte_carlo.pattern_frozen import PatternLikelihood

LONGEST = 300.0  # largest |m_k|² in noise units: float64 loses patterns beyond


@pytree
@dataclasses.dataclass(frozen=True)
class Separated(PatternLikelihood):
    """Steps of a unit, any two at least the ``separation`` apart, S, which C's bands are within."""

    separation: int = dataclasses.field(metadata=STATIC)

    @property
    def probability(self) -> float:
        """p."""
        return 1 / (self.bins - self.separation + 1)

    @property
    def blocks(self) -> int:
        """Blocks of S steps, the last of which may be partly past the end."""
        return -(-self.dimension // self.separation)

    def ratio(self, power: Scalar = 1) -> Callable[[jax.Array], jax.Array]:
        half = power**2 * jnp.asarray(self.gram)[0] / 2
        return lambda exponents: self.passed(power * exponents - half)[1]

    def first(self, key: jax.Array, count: int) -> jax.Array:
        """Patterns by their law, by place in each block, S for none: shape (count, blocks)."""
        return self.chosen(key, self.passed(jnp.zeros((count, self.dimension)))[0])

    @property
    def _begun(self) -> jax.Array:
        """Weights of the first step at which a unit is available, (S,)."""
        return jnp.where(jnp.arange(self.separation) == 0, 1.0, self.probability)

    def mean_square(self) -> jax.Array:
        """E_k |m_k|²: columns of one unit do not overlap."""
        return jnp.sum(jnp.asarray(self.gram)[0]) / self.bins

    def largest_square(self) -> jax.Array:
        """max_k |m_k|², over all steps that are S apart: one pass over the blocks."""
        size = self.separation
        squares = self._cut(jnp.asarray(self.gram)[:1])[0]

        def step(following: jax.Array, square: jax.Array) -> tuple[jax.Array, None]:
            reached = jnp.append(square + following, following[0])
            return jax.lax.cummax(reached, reverse=True)[:-1], None

        return jax.lax.scan(step, jnp.zeros(size), squares, reverse=True)[0][0]

    def products(self, places: jax.Array) -> jax.Array:
        """<c_t, m_k> for patterns by place in each block, S for none: (samples, blocks) -> n."""
        size, gram, q = self.separation, jnp.asarray(self.gram), jnp.arange(self.blocks)
        reach = gram.shape[0] - 1
        begin = size * q[:, None, None]
        k, t = jnp.arange(size + 1)[:, None], jnp.arange(size)[None, :]

        def table(lag: jax.Array, offset: jax.Array) -> jax.Array:
            # overlaps with columns past the end are 0 in ``gram``, and indices past it are clamped
            inside = (jnp.abs(lag) <= reach) & (k < size) & (offset >= 0)
            return jnp.where(inside, gram[jnp.abs(lag), offset], 0.0)  # (blocks, k, t)

        total = table(t - k, begin + jnp.minimum(t, k))[q, places]
        if reach:
            # of an early step with the participation in the block before; a late one, in the next
            early, late = t[:, :reach], t[:, size - reach :]
            past = table(size + early - k, begin - size + k)[q[1:], places[:, :-1]]
            ahead = table(size + k - late, begin + late)[q[:-1], places[:, 1:]]
            total = total.at[:, 1:, :reach].add(past).at[:, :-1, size - reach :].add(ahead)
        return total.reshape(len(places), -1)[:, : self.dimension]

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        # ``plan`` has a row a_l of shape (n,) for each pattern: see :mod:`.separated_ceilings`
        tilts = jnp.zeros((1, self.dimension)) if plan is None else jnp.asarray(plan)

        def extend(l: jax.Array, previous: Drawn) -> Drawn:
            tilt = tilts[jnp.minimum(l, len(tilts) - 1)]
            weights, log_mean = self.passed(previous.products + tilt)
            places = self.chosen(jax.random.fold_in(keys[1], l), weights)
            products = self.products(places)

            def picked(x: jax.Array) -> jax.Array:  # its sum over the steps of a pattern
                parts = jnp.pad(self._cut(x), ((0, 0), (0, 0), (0, 1)))  # 0 for none
                chosen = jnp.take_along_axis(parts, places[:, :, None], axis=2)
                return jnp.sum(chosen[:, :, 0], axis=1)

            return Drawn(
                previous.products + products,
                previous.along + picked(noise),
                previous.square + 2 * picked(previous.products) + picked(products),
                previous.log_normalizers + log_mean - picked(jnp.broadcast_to(tilt, noise.shape)),
            )

        nothing = Drawn.nothing(noise)
        return jax.lax.fori_loop(0, order.astype(int) + 1, extend, nothing)

    def _cut(self, x: jax.Array) -> jax.Array:
        """Rows in blocks, (samples, blocks, S), 0 past the end."""
        padding = self.blocks * self.separation - self.dimension
        padded = jnp.pad(x, ((0, 0), (0, padding)))
        return padded.reshape(len(x), self.blocks, self.separation)

    def passed(self, exponents: jax.Array) -> tuple[PyTree, jax.Array]:
        """Backward pass of log weights u (samples, n).

        Returns what :meth:`chosen` draws by, and log E_k e^Σu, (samples,). Here the first is
        f_t (1−p)^t of each block, (blocks, samples, S), and the same of the next block's first,
        (blocks, samples), both up to a factor for a block and sample.
        """
        size, p = self.separation, self.probability
        waits = (1 - p) ** jnp.arange(size + 1)
        parts = jnp.moveaxis(self._cut(exponents), 1, 0)  # past the end f = 1
        peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(parts, axis=2), 0.0))

        def step(following: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> PyTree:
            u, peak = inputs
            weighted = p * waits[:-1] * jnp.exp(u - peak[:, None]) * following
            ending = waits[-1] * jnp.exp(-peak) * following[:, 0]
            # XLA's running sums take ten times as long as this product of matrices
            summed = weighted @ later + ending[:, None]
            scale = jax.lax.stop_gradient(summed[:, 0])
            return summed / (waits[:-1] * scale[:, None]), ((summed, ending), jnp.log(scale) + peak)

        later = jnp.tril(jnp.ones((size, size)))  # of a place: its own and all after it
        start = jnp.ones((len(exponents), size))
        initial, (summed, logs) = jax.lax.scan(step, start, (parts, peak), reverse=True)
        mean = jnp.log(initial @ self._begun) - math.log1p((size - 1) * p)
        return summed, jnp.sum(logs, axis=0) + mean

    def chosen(self, key: jax.Array, weights: PyTree) -> jax.Array:
        """Places of patterns drawn by the weights of :meth:`passed`, (samples, blocks)."""
        size, p = self.separation, self.probability
        waits = (1 - p) ** jnp.arange(size)
        uniforms = jax.random.uniform(key, (weights[0].shape[1], self.blocks + 1))
        begun = jnp.cumsum(weights[0][0] / waits * self._begun, 1)
        begin = jnp.sum(begun <= uniforms[:, :1] * begun[:, -1:], axis=1)

        def step(free: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> PyTree:
            (sums, ending), uniform = inputs
            # of the units that are free from here on, those that take part later than a step
            threshold = uniform * jnp.take_along_axis(sums, free[:, None], axis=1)[:, 0]
            waiting = jnp.sum(sums[:, 1:] > threshold[:, None], axis=1) + (ending > threshold)
            # a unit is free again at the same place of the next block
            return jnp.where(waiting == size, 0, waiting), waiting

        free = jnp.minimum(begin, size - 1)
        places = jax.lax.scan(step, free, (weights, uniforms[:, 1:].T))[1]
        return places.T
