"""Bins assigned more than once: the likelihood ratio by one forward pass over the assignments.

Assignment g of K puts a unit into bin k_g, and the bins of all assignments are independent and
uniform. With the *modes* M_g[:, k] = Σ of the columns of C that bin k of assignment g uses (one
column for each epoch until the next assignment), a unit with the pattern k = (k_1, …, k_K) adds m_k
= Σ_g M_g[:, k_g] to C x, and the dominating pair is

    P = E_k N(m_k, σ²I)    against    Q = N(0, σ²I)

for every C >= 0: given the pattern, row t of C x has norm at most (m_k)_t by the triangle
inequality, the pattern does not depend on the data, and a mixture of Gaussians whose sensitivity is
random is dominated by the one with the largest sensitivities (Choquette-Choo et al. 2024, Lemma
3.2, which is the case K = 1; 2024b, Lemma 4.5). Adjacency: add-remove of one privacy unit whose
per-iteration contribution is clipped to norm 1; σ is relative to that clip norm, for C as stored.

There are b^K patterns, but where C has at most b bands the modes of assignments that are not
consecutive do not overlap. With Z = Mᵀ X/σ², which has K·b entries and covariance S = MᵀM/σ² under
Q,

    log P/Q (X) = log b^(-K) Σ_k Π_g e^{Z_g[k_g] - |M_g[:, k_g]|²/2σ²} · Π_g T_g[k_g, k_{g+1}],
    T_g[k, k'] = exp(-S[(g, k), (g+1, k')]),

a chain. T_g differs from 1 only where k is among the last and k' among the first bands - 1 bins:
a corner. So an assignment costs b + bands² operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime._arrays import Array, Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._pytree import STATIC, pytree
from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import dominating_pair, importance
from mfopt.accounting.monte_carlo.likelihood import Drawn, SharedGaussianComponent, shared_component
from mfopt.accounting.monte_carlo.pattern_frozen import PatternLikelihood, squares

_PARTS = 256  # of all epochs, which the best component is found by
_ONE_LENGTH = 1e-9  # relative, of squared norms that count as equal
COUPLING = 300.0  # largest overlap of two assignments, in noise units; float64 loses T beyond


@pytree
@dataclasses.dataclass(frozen=True)
class Patterns(PatternLikelihood):
    """Bins of a unit, reassigned every ``rethrow`` epochs; C has at most as many bands."""

    rethrow: int = dataclasses.field(metadata=STATIC)

    @property
    def throws(self) -> int:
        """K."""
        return self.dimension // (self.bins * self.rethrow)

    @property
    def reach(self) -> int:
        """Bins that overlap with those of the assignment before, or after: bands − 1."""
        return self.gram.shape[0] - 1

    @property
    def numbers(self) -> int:
        """Entries of Z: K·b."""
        return self.throws * self.bins

    def noise(self, normal: jax.Array) -> jax.Array:
        """Mᵀ z for white noise z (samples, n): covariance MᵀM, shape (samples, K·b)."""
        parts = super().noise(normal).reshape(-1, self.throws, self.rethrow, self.bins)
        return jnp.sum(parts, axis=2).reshape(-1, self.numbers)

    def overlaps(self) -> tuple[jax.Array, jax.Array]:
        """<M_g[:, i], M_g[:, j]>, (K, b, b), and late bins' with early ones of the next."""
        return within(self), corners(self)

    def first(self, key: jax.Array, count: int) -> jax.Array:
        """Bins by assignment, uniform: shape (count, K)."""
        return jax.random.randint(key, (count, self.throws), 0, self.bins)

    def products(self, pattern: jax.Array) -> jax.Array:
        """<M, m_k> for each pattern (count, K): shape (count, K·b)."""
        return Overlaps(*self.overlaps()).overlaps_of(pattern)

    def mean_square(self) -> jax.Array:
        """E_k |m_k|²."""
        pairs = jnp.sum(corners(self)) / self.bins**2
        return jnp.sum(squared_norms(self)) / self.bins + 2 * pairs

    def largest_square(self) -> jax.Array:
        """max_k |m_k|²: one pass over the assignments, whose state is the last bin."""
        squares = jnp.asarray(squared_norms(self)).reshape(self.throws, self.bins)
        corner = corners(self)
        reach = corner.shape[-1]

        def step(best: jax.Array, throw: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            square, coupled = throw
            early = jnp.max(best[self.bins - reach :, None] + 2 * coupled, axis=0, initial=0.0)
            coming = jnp.full(self.bins, jnp.max(best))
            # overlaps are >= 0, so that a late bin without any is no better than with one
            return square + coming.at[:reach].max(early), None

        return jnp.max(jax.lax.scan(step, squares[0], (squares[1:], corner))[0])

    def ratio(self, power: Scalar = 1) -> Callable[[jax.Array], jax.Array]:
        half = power**2 * squared_norms(self) / 2
        log_of = log_mean(power**2 * corners(self), self.bins)
        return lambda exponents: log_of(power * exponents - half)

    def draw(self, keys: jax.Array, noise: jax.Array, order: jax.Array, plan: PyTree) -> Drawn:
        # Given the earlier patterns, whose modes sum to V, <m_k, V> = Σ_g <M_g[:, k_g], V>:
        # assignments are independent, k_g is drawn ∝ e^<M_g[:, k], V> and
        # N = Π_g mean_k e^<M_g[:, k], V>.
        first = self.first(keys[0], len(noise))
        return drawn(Overlaps(*self.overlaps()).overlaps_of, keys[1], noise, order, first)


def drawn(
    overlaps_of: Callable[[jax.Array], jax.Array],
    key: jax.Array,
    noise: jax.Array,
    order: jax.Array,
    first: jax.Array,
) -> Drawn:
    """1 + ``order`` patterns of bins for each row of ``noise``, as :meth:`.Likelihood.draw` says.

    Args:
      overlaps_of: <M, m_k> for each pattern (samples, K): shape (samples, K·b).
      key, noise, order: as there.
      first: bins of the first patterns, shape (samples, K).
    """

    def extend(l: jax.Array, previous: Drawn) -> Drawn:
        pattern, logs = picked(previous.products, first.shape[1], jax.random.fold_in(key, l))
        return added(overlaps_of(pattern), pattern, previous, noise, logs)

    nothing = Drawn.nothing(noise)
    start = added(overlaps_of(first), first, nothing, noise, nothing.log_normalizers)
    return jax.lax.fori_loop(1, order.astype(int) + 1, extend, start)


def added(
    products: jax.Array, pattern: jax.Array, previous: Drawn, noise: jax.Array, logs: jax.Array
) -> Drawn:
    """``previous`` with one pattern more in each sample.

    Args:
      products: overlaps of the pattern, shape (samples, K·b).
      pattern: its bins, shape (samples, K).
      previous: what was drawn so far.
      noise: of every entry, shape (samples, K·b).
      logs: log normalizers that it was drawn at, shape (samples,).
    """
    return Drawn(
        previous.products + products,
        previous.along + entries(noise, pattern),
        previous.square + 2 * entries(previous.products, pattern) + entries(products, pattern),
        previous.log_normalizers + logs,
    )


class Overlaps:
    """Rows of MᵀM: gathered, since a pattern has one bin for each assignment.

    Args:
      inside, corner: :meth:`Patterns.overlaps`.
    """

    def __init__(self, inside: jax.Array, corner: jax.Array) -> None:
        self._within, self._bins = inside, inside.shape[-1]
        padding = self._bins - corner.shape[-1]
        # for each bin of an assignment: its part in early bins of the next assignment, and in late
        # bins of the previous one
        self._ahead = jnp.pad(corner, ((0, 0), (padding, 0), (0, 0)))
        self._back = jnp.pad(jnp.swapaxes(corner, 1, 2), ((0, 0), (0, padding), (0, 0)))

    def overlaps_of(self, pattern: jax.Array) -> jax.Array:
        """<M, m_k> for each pattern (samples, K): shape (samples, K·b)."""
        throw = jnp.arange(pattern.shape[1])
        total = self._within[throw, pattern]
        reach = self._ahead.shape[2]
        if reach:
            total = total.at[:, 1:, :reach].add(self._ahead[throw[:-1], pattern[:, :-1]])
            late = self._back[throw[:-1], pattern[:, 1:]]
            total = total.at[:, :-1, self._bins - reach :].add(late)
        return total.reshape(pattern.shape[0], -1)


def picked(products: jax.Array, throws: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Patterns drawn ∝ e^<m_k, V>, shape (samples, K), and log of the mean of that, (samples,).

    ``products`` are <M, V>, shape (samples, K·b).
    """
    exponents, shape = products.reshape(len(products) * throws, -1), (len(products), throws)
    chosen, top, mass = importance.pick(exponents, key)
    logs = top + jnp.log(mass / exponents.shape[1])
    return chosen.reshape(shape), jnp.sum(logs.reshape(shape), axis=1)


def entries(x: jax.Array, pattern: jax.Array) -> jax.Array:
    """<x, counts of the pattern>: the sum of the entries of x (samples, K·b) that it picks."""
    parts = x.reshape(*pattern.shape, -1)
    return jnp.sum(jnp.take_along_axis(parts, pattern[:, :, None], axis=2), axis=(1, 2))


def within(patterns: Patterns) -> jax.Array:
    """<M_g[:, k], M_g[:, c]>, shape (K, bins, bins)."""
    bins, reach = patterns.bins, patterns.reach
    shape = reach + 1, patterns.throws, patterns.rethrow, bins
    by_epoch = jnp.asarray(patterns.gram).reshape(shape)
    k, c = jnp.arange(bins)[:, None], jnp.arange(bins)[None, :]
    lag = jnp.abs(k - c)
    # the lag moves to the front: [k, c, assignment]
    in_one_block = jnp.sum(by_epoch[jnp.minimum(lag, reach), :, :, jnp.minimum(k, c)], axis=3)
    total = jnp.where((lag <= reach)[:, :, None], in_one_block, 0)
    if patterns.rethrow > 1:
        # one column late in an epoch, one early in the next of the same assignment
        lag = bins + c - k
        wrapped = jnp.sum(by_epoch[jnp.minimum(lag, reach), :, :-1, k], axis=3)
        wrapped = jnp.where((lag <= reach)[:, :, None], wrapped, 0)
        total = total + wrapped + jnp.swapaxes(wrapped, 0, 1)
    return jnp.moveaxis(total, 2, 0)


def squared_norms(patterns: Patterns) -> Array:
    """|M_g[:, k]|², shape (K·b,): columns of one bin never overlap within b bands."""
    grams = patterns.gram[0].reshape(patterns.throws, patterns.rethrow, patterns.bins)
    return grams.sum(axis=1).reshape(-1)


def orthogonal_norm(patterns: Patterns) -> float | None:
    """The squared norm of the M_g[:, k], rounded up, where C is diagonal and all are of one length.

    Else None. To shorten columns is to add noise, so whatever is proven for the longest holds.
    """
    norms = np.asarray(squared_norms(patterns), np.float64)
    if np.any(patterns.gram[1:]) or np.max(norms) > np.min(norms) * (1 + _ONE_LENGTH):
        return None
    return dominating_pair.rounded_norm(float(np.max(norms)))


def corners(patterns: Patterns) -> jax.Array:
    """<M_g[:, b - c + i], M_{g+1}[:, k']>, c = bands - 1, shape (K - 1, c, c): late i, early k'."""
    reach, bins = patterns.reach, patterns.bins
    begins = bins * patterns.rethrow * jnp.arange(1, patterns.throws)[:, None, None] - reach
    late, early = jnp.arange(reach)[:, None], jnp.arange(reach)[None, :]
    lag = jnp.clip(reach - late + early, 0, reach)
    return jnp.where(early <= late, jnp.asarray(patterns.gram)[lag, begins + late], 0)


def log_mean(corner: jax.Array, bins: int) -> Callable[[jax.Array], jax.Array]:
    """Exponents -> log b^(-K) Σ_k e^{Σ_g exponents_g[k_g] - Σ_g corner_g[k_g, k_{g+1}]}.

    All terms are positive and those of an assignment are scaled by their largest, so nothing
    cancels; a pattern that float64 loses weighs less than e^(2·COUPLING - 745) of another. Shapes
    (samples, K·b) -> (samples,).

    Args:
      corner: shape (K - 1, c, c), see :func:`corners`; at most COUPLING.
      bins: b.
    """
    reach = corner.shape[-1]
    late = bins - reach  # the first bin that overlaps with the next assignment
    # nothing comes before the first assignment
    passing = jnp.exp(-jnp.pad(corner, ((1, 0), (0, 0), (0, 0))))

    def step(state: tuple[jax.Array, jax.Array], throw: tuple[jax.Array, ...]) -> PyTree:
        (body, tail), (early, latest, elsewhere, passed) = state, throw
        early = early * (body[:, None] + tail @ passed)
        body = elsewhere + jnp.sum(early[:, :late], axis=1)
        tail = jnp.concatenate([early[:, late:], latest], axis=1)
        mass = body + jnp.sum(tail, axis=1)
        return (body / mass, tail / mass[:, None]), jnp.log(mass)

    def log_of(exponents: jax.Array) -> jax.Array:
        parts = exponents.reshape(-1, exponents.shape[1] // bins, bins)
        peak = jax.lax.stop_gradient(jnp.max(parts, axis=2))
        weights = jnp.exp(parts - peak[:, :, None])
        # bins in the middle of an assignment overlap with no other: the pass sees their sum alone
        ends = weights[:, :, :reach], weights[:, :, max(reach, late) :]
        middle = jnp.sum(weights[:, :, reach:late], axis=2)
        start = jnp.ones_like(middle[:, 0]), jnp.zeros((len(parts), reach))
        by_throw = tuple(jnp.moveaxis(part, 1, 0) for part in (*ends, middle))
        logs = jax.lax.scan(step, start, (*by_throw, passing))[1]
        return jnp.sum(logs, axis=0) + jnp.sum(peak, axis=1) - parts.shape[1] * jnp.log(bins)

    return log_of


@float64
def shared(patterns: Patterns) -> SharedGaussianComponent | None:
    """Shared Gaussian component of all patterns; None where it is too small or not found.

    All m_k have the same product with a unit vector û just where it has the same product a_g with
    all modes of an assignment, since one bin can be changed alone. Its largest square is the
    squared distance of the origin from the affine hull of the patterns. With J the indicators of
    the epochs û = C⁻ᵀJa/|C⁻ᵀJa| has one product with all columns of an epoch, for any a; |C⁻ᵀJa|² =
    aᵀDa with D = Jᵀ(CᵀC)⁻¹J, and (1ᵀa)²/aᵀDa is largest at Da ∝ 1. (Where bins are kept for several
    epochs û may be another still, and what is found is less than the largest; it is no less true.)
    """
    largest = float(squares(patterns)[0])
    along = toward(np.asarray(patterns.columns, np.float64), patterns.bins)
    return shared_component(patterns, along, patterns.throws, largest)


def toward(columns: np.ndarray, bins: int) -> np.ndarray:
    """û up to its length: C⁻ᵀJa for the best a of an epoch."""
    bands, n = columns.shape
    if not np.all(columns[0] > 0):  # no inverse
        return np.zeros(n)
    upper = np.zeros_like(columns)  # Cᵀ, as SciPy stores it
    for d in range(bands):
        upper[bands - 1 - d, d:] = columns[d, : n - d] / np.max(columns)
    # J, of neighbours together where there are many: time grows with the square of their number
    count = n // bins
    parts = min(count, _PARTS)
    epochs = np.repeat(np.eye(parts)[np.arange(count) * parts // count], bins, axis=0)
    # what is no number leaves no û, and is seen by whoever asked
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        solved = partial(scipy.linalg.solve_banded, (0, bands - 1), upper, check_finite=False)
        # D itself may be singular to rounding, and sums of C⁻ᵀJ lose digits
        triangle = np.linalg.qr(solved(epochs), mode="r"), False
        best = scipy.linalg.cho_solve(triangle, np.sum(epochs, axis=0), check_finite=False)
        return np.asarray(solved(epochs @ best))
