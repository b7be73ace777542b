"""Cyclic Poisson sampling with a random partition: a mixture over groups of products of rounds.

A unit is in one of S groups by chance, and takes part in each step of its group with probability p
(:class:`~mfopt.sampling.RandomPartition`). The columns of C of one group's steps do not overlap
where C has at most S bands, so with u_t = <c_t, X> − |c_t|²/2 in noise units and y_t =
log(1 − p + p e^(u_t))

    Y = log P/Q (X) = log mean_γ e^(Y_γ),    Y_γ = Σ_{t in γ} y_t.

Columns of different groups do overlap, and their Y_γ are not independent: Y is sampled. The
dominating pair is that of :mod:`.patterns`, for every C >= 0: a pattern's law is public and depends
on no data. Adjacency: add-remove of one unit; σ for C as stored.

**"powers", remove.** Take a whole s >= 0, a uniform group γ, and X from the density e^((1+s) Y_γ) /
M_γ over Q. Rounds of one group are independent under Q, and

    M_γ = E_Q e^((1+s) Y_γ) = Π_{t in γ} Σ_j w_tj,
    w_tj = (1+s over j) p^j (1−p)^(1+s−j) e^((j² − j) |c_t|²/2),

so that X ~ N(Σ_t j_t c_t, I) with the j_t of a group drawn ∝ w_tj, and j_t = 0 elsewhere. Over Q
the proposal has the density R = mean_γ e^((1+s) Y_γ) / M_γ, and f = e^Y δ₂(ε − Y)/R has the mean
H(P, Q). With M the largest M_γ, by the mean of powers

    R >= mean_γ e^((1+s) Y_γ)/M >= e^((1+s) Y)/M,    so f <= M e^(−sY) δ₂(ε − Y)
                                                       <= M e^(−sε) sup_t e^(st) δ₂(t):

the bound of Rényi divergence that a known group has, whose log M bounds log E_Q e^((1+s) Y) too.

Adding is sampled by "mean" (:mod:`.importance`). Divergences are jointly convex: both directions
are no larger than with a known group, whose rounds are composed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, logsumexp, xlog1py, xlogy

from mfopt._runtime import _quick
from mfopt._runtime._arrays import Array, Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import STATIC, pytree
from mfopt._runtime._types import PyTree
from mfopt.accounting.bound import RoundsBound
from mfopt.accounting.loss_distribution import poisson
from mfopt.accounting.monte_carlo import band, importance
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER, Sums, sums
from mfopt.accounting.monte_carlo.likelihood import (
    Ceilings,
    Drawn,
    PatternChain,
    require_range,
)
from mfopt.accounting.monte_carlo.pattern_frozen import PatternLikelihood, squares
from mfopt.accounting.monte_carlo.pattern_law import PatternLaw, PatternLoss
from mfopt.accounting.monte_carlo.protocol import FreeBound, law
from mfopt.accounting.monte_carlo.separated import LONGEST
from mfopt.sampling import RandomPartition
from mfopt.strategies import Strategy

POWERS = "powers"
KNOWN_GROUP = "privacy loss distribution of cyclic Poisson sampling, a known partition"
_FACTORS = 4  # rounds whose likelihoods are multiplied


@pytree
@dataclasses.dataclass(frozen=True)
class _RandomGroups(PatternLikelihood):
    """Steps of a unit in one of ``groups``, no fewer than C has bands, by chance."""

    groups: int = dataclasses.field(metadata=STATIC)

    @property
    def probability(self) -> float:
        """p, of a unit in a step of its group."""
        return self.groups / self.bins

    def ratio(self, power: Scalar = 1) -> Callable[[jax.Array], jax.Array]:
        return lambda exponents: self._mean(self.by_group(exponents, power))

    def by_group(self, exponents: jax.Array, power: Scalar = 1) -> jax.Array:
        """Y_γ of each group, of the modes times ``power``: shape (samples, groups)."""
        half = power**2 * jnp.asarray(self.gram)[0] / 2
        p = self.probability
        # a step past the end is a factor of 1
        factors = self._rounds(1 - p + p * jnp.exp(power * exponents - half), 1.0)
        # one logarithm for several: float64 holds their product, or Y is no number
        return jnp.sum(jnp.log(jnp.prod(factors, axis=2)), axis=1)

    def log_density(self, exponents: jax.Array, order: Scalar) -> jax.Array:
        """log R of "powers" at order s, shape (samples,)."""
        return self._mean((1 + order) * self.by_group(exponents) - self.log_moments(order)[1])

    def log_moments(self, order: Scalar) -> tuple[jax.Array, jax.Array]:
        """log Σ_j w_tj of each step, shape (n,), and log M_γ, shape (1, groups)."""

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            return jnp.logaddexp(total, self._log_weight(j, order))

        count = jnp.asarray(order).astype(int) + 2
        of_steps = jax.lax.fori_loop(0, count, add, jnp.full(self.dimension, -jnp.inf))
        return of_steps, jnp.sum(self._rounds(of_steps[None], 0.0), axis=(1, 2))

    def _log_weight(self, j: jax.Array, order: Scalar) -> jax.Array:
        """log w_tj of each step, shape (n,)."""
        choices = gammaln(2.0 + order) - gammaln(1.0 + j) - gammaln(2.0 + order - j)
        chances = xlogy(j, self.probability) + xlog1py(1.0 + order - j, -self.probability)
        return choices + chances + (j * j - j) * jnp.asarray(self.gram)[0] / 2

    def _rounds(self, steps: jax.Array, past_end: float) -> jax.Array:
        """Steps by group: (samples, n) -> (samples, rounds / _FACTORS, _FACTORS, groups)."""
        padding = (0, 0), (0, -self.dimension % (_FACTORS * self.groups))
        padded = jnp.pad(steps, padding, constant_values=past_end)
        return padded.reshape(len(steps), -1, _FACTORS, self.groups)

    def _mean(self, by_group: jax.Array) -> jax.Array:
        result: jax.Array = logsumexp(by_group, axis=1) - jnp.log(self.groups)
        return result

    def first(self, key: jax.Array, count: int) -> jax.Array:
        """Participations by their law: shape (count, n)."""
        return self.multiples(jax.random.split(key), count, jnp.zeros(()))

    def multiples(self, keys: jax.Array, count: int, order: jax.Array) -> jax.Array:
        """j_t of the proposal of order s, a pattern at order 0: shape (count, n)."""
        group = jax.random.randint(keys[0], (count, 1), 0, self.groups)
        rounds = -(-self.dimension // self.groups)
        uniforms = jax.random.uniform(keys[1], (count, rounds))
        steps = self.groups * jnp.arange(rounds) + group
        of_steps = self.log_moments(order)[0]

        def add(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            cumulative, multiple = state
            cumulative = cumulative + jnp.exp(self._log_weight(j, order) - of_steps)
            # steps past the end are dropped below
            reached = jnp.take(cumulative, steps, mode="clip") <= uniforms
            return cumulative, multiple + reached

        start = jnp.zeros(self.dimension), jnp.zeros((count, rounds), int)
        multiple = jax.lax.fori_loop(0, order.astype(int) + 1, add, start)[1]
        rows = jnp.arange(count)[:, None]
        return jnp.zeros((count, self.dimension), int).at[rows, steps].set(multiple, mode="drop")

    def products(self, pattern: jax.Array) -> jax.Array:
        columns = band.tiles(jnp.asarray(self.columns))
        return self.noise(band.product(columns, pattern.astype(float)))

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        multiple = self.multiples(keys, len(noise), order)
        products = self.products(multiple)
        along, square = (jnp.sum(multiple * x, axis=1) for x in (noise, products))
        return Drawn(products, along, square, jnp.zeros(len(noise)))

    def mean_square(self) -> jax.Array:
        return jnp.sum(jnp.asarray(self.gram)[0]) / self.bins

    def largest_square(self) -> jax.Array:
        return jnp.max(jnp.sum(self._rounds(jnp.asarray(self.gram)[:1], 0.0), axis=(1, 2)))


@_quick.jit
def _log_largest(pattern: _RandomGroups, order: Scalar) -> jax.Array:
    return jnp.max(pattern.log_moments(order)[1])


@float64
def ceilings(pattern: _RandomGroups) -> Ceilings:
    """log M of each order, and squared norms, in noise units.

    Raises:
      FailureError: contributions of a unit are longer than the likelihood is known for.
    """
    of_squares = [float(square) for square in squares(pattern)[:3]]
    require_range("the contribution of a unit has a squared norm of", of_squares[0], LONGEST)

    @functools.cache
    def log_largest(order: int) -> tuple[float, None]:
        return float(_log_largest(pattern, float(order))), None

    return Ceilings({POWERS: PatternChain(log_largest, MAX_ORDER)}, *of_squares)


def _powers(
    key: jax.Array, size: int, likelihood: _RandomGroups, question: importance.Asked, _: None
) -> Sums:
    *draw_keys, noise_key, point_key = jax.random.split(key, 4)
    noise = likelihood.noise(jax.random.normal(noise_key, (size, likelihood.dimension)))
    drawn = likelihood.draw(jnp.stack(draw_keys), noise, question.order, None)

    def evaluate(exponents: jax.Array) -> tuple[jax.Array, PyTree]:
        loss = likelihood.log_ratio(exponents)
        paid = question.payoff.log_value(question.epsilon - loss)
        log_value = loss - likelihood.log_density(exponents, question.order) + paid
        return log_value - question.log_ceiling, ()

    at = noise, 1.0, drawn, question.points
    return sums(importance.on_points(point_key, evaluate, *at)[0])


importance.KERNELS[POWERS] = _powers


class _RandomPartitionLoss(PatternLoss):
    """One unit, any C >= 0 with at most as many bands as groups.

    Args:
      likelihood: for σ = 1.
      known_group: bound of a unit whose group is known.
    """

    name = "cyclic Poisson sampling with a random partition"
    proven = staticmethod(ceilings)

    def __init__(self, likelihood: _RandomGroups, known_group: RoundsBound) -> None:
        super().__init__(likelihood)
        self._bound = known_group

    def free_bounds(self) -> Sequence[FreeBound]:
        return (self._bound,)

    def slow_bounds(self) -> Sequence[FreeBound]:
        return ()


@dataclasses.dataclass(frozen=True)
class RandomPartitionLaw(PatternLaw):
    """δ̂ of cyclic Poisson sampling with a random partition."""

    scheme: RandomPartition
    covers = RandomPartition
    losses = _RandomPartitionLoss
    limit = (
        "a random partition supports at most as many bands as groups",
        "columns of two participations of a unit overlap",
    )

    def of(self, columns: Array, gram: Array) -> _RandomGroups:
        return _RandomGroups(columns, gram, self.scheme.bins, self.scheme.separation)

    def loss(self, strategy: Strategy) -> _RandomPartitionLoss:
        likelihood = self.exact(strategy)
        rounds = poisson.independent(strategy.widened(), self.scheme.cyclic, 1)
        exact = rounds.exact and self.scheme.separation == 1
        return _RandomPartitionLoss(likelihood, RoundsBound(rounds, KNOWN_GROUP, exact))

    def require_memory(self) -> None:
        """Nothing but vectors over the run."""


law.register(RandomPartition)(RandomPartitionLaw)
