"""Proven ceilings of the certificate's values where bins are assigned more than once.

S is the Gram matrix of the modes in noise units, M_g[:, k] the modes of assignment g, m_k the sum
of the modes of pattern k; see :mod:`.patterns`. All numbers here are plain float64 sums and maxima
of non-negative terms; the relative slack for rounding is that of :mod:`.evidence`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _quick
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting import solve
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import Ceilings, PatternChain, require_range, summed
from mfopt.accounting.monte_carlo.pattern_frozen import squares
from mfopt.accounting.monte_carlo.patterns import COUPLING, Patterns, corners, within

_LEAST = 1e-300  # least share of the largest product: smaller ones are rounded up to it
_RANGE = 12.0  # of log σ in which the second moment is that of a Gaussian mechanism
_BLOCK = 16  # bins: a ceiling is 0.4% above that of single bins at most, at 128 bins and bands


@_quick.jit
def _parts(patterns: Patterns) -> tuple[jax.Array, ...]:
    """One program: operation by operation, each would be compiled for each shape."""
    return corners(patterns), within(patterns), *squares(patterns)[:3]


@float64
def ceilings(patterns: Patterns) -> Ceilings:
    """The ceilings of patterns in noise units.

    Raises:
      FailureError: assignments overlap by more than the likelihood is known for.
    """
    moments, squares = _moments(patterns)
    return Ceilings({"chain": PatternChain(summed(moments.log_largest), MAX_ORDER)}, *squares)


@float64
def estimated(patterns: Patterns) -> Ceilings:
    """Estimates of the ceilings, to choose an order by: bins of neighbouring assignments are
    averaged over instead of followed, which takes 1/b of the time.

    Raises:
      FailureError: as :func:`ceilings`.
    """
    moments, squares = _moments(patterns)
    return Ceilings({"chain": PatternChain(summed(moments.log_about), MAX_ORDER)}, *squares)


def _moments(patterns: Patterns) -> tuple[_Moments, tuple[float, ...]]:
    """(overlaps of the modes, squared norms of a ceiling)."""
    corner, inside, *of_squares = _parts(patterns)
    moments = _Moments(patterns.bins, np.asarray(corner), np.asarray(inside))
    coupling = float(np.max(moments.corner, initial=0.0))
    require_range("the contributions of two assignments overlap by", coupling, COUPLING)
    return moments, tuple(map(float, of_squares))


@float64
def second_moment(patterns: Patterns, common: float) -> float:
    """E e^(<m_k, m_k'> − c) over two independent patterns k and k', c = ``common``.

    Patterns and c are in noise units.
    """
    corner, inside, *_ = map(np.asarray, _parts(patterns))
    return math.exp(float(log_second_moment(corner, inside)) - common)


@_quick.jit
def log_second_moment(corner: jax.Array, inside: jax.Array) -> jax.Array:
    """log E e^<m_k, m_k'> over two independent patterns k and k', by a pass over the assignments.

    Differentiable; infinite or NaN where exponentials leave float64.

    Args:
      corner, inside: overlaps in noise units, as :func:`.patterns.corners` and
        :func:`.patterns.within` give them.
    """
    bins, reach = inside.shape[-1], corner.shape[-1]
    same_round = jnp.exp(inside) / bins**2  # (K, k, k')

    def step(pairs: jax.Array, assignment: tuple[jax.Array, jax.Array]) -> PyTree:
        # by the bins (k, k') of an assignment; a late bin overlaps with an early one of the other
        # pattern in the next
        following, coupling = assignment
        mass = jnp.sum(pairs)
        pairs = pairs / mass
        early = jnp.sum(pairs[bins - reach :], axis=1) @ coupling
        pairs_between = coupling.T @ pairs[bins - reach :, bins - reach :] @ coupling
        total = jnp.ones_like(pairs).at[:reach].add(early[:, None]).at[:, :reach].add(early)
        return following * total.at[:reach, :reach].add(pairs_between), jnp.log(mass)

    pairs, logs = jax.lax.scan(step, same_round[0], (same_round[1:], jnp.expm1(corner)))
    return jnp.sum(logs) + jnp.log(jnp.sum(pairs))


@float64
def gaussian_noise_multiplier(patterns: Patterns, mu: float) -> float:
    """About the σ at which the second moment is that of a Gaussian mechanism of noise 1/``mu``.

    Of many assignments the privacy loss is nearly Gaussian, and this is σ for what μ stands for.
    Patterns are at σ = 1.
    """
    corner, inside, *_ = map(np.asarray, _parts(patterns))

    def excess(log_sigma: float) -> float:
        square = math.exp(-2 * log_sigma)
        log_moment = float(log_second_moment(corner * square, inside * square))
        return log_moment - mu**2 if math.isfinite(log_moment) else math.inf

    # one pattern for all would have σ = |m|/μ
    squares = np.max(np.diagonal(inside, axis1=1, axis2=2), axis=1)
    high = math.log(np.sum(squares)) / 2 - math.log(mu) + 1.0
    return math.exp(solve.root(excess, high - _RANGE, high, relative=1e-3))


class _Moments(NamedTuple):
    """Overlaps of the modes of consecutive assignments, and of those of one assignment."""

    bins: int
    corner: np.ndarray
    within: np.ndarray

    def log_about(self, l: int) -> float:
        """log of max_k' Π_g φ_g, each φ_g averaged over the bins of its neighbours."""
        bins, reach = self.bins, self.corner.shape[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            inner = np.exp(l * self.within)
            weights = np.ones(inner.shape[:2])  # (K, k): of a bin, by its neighbours' overlaps
            if reach and len(inner) > 1:
                outer = np.expm1(l * self.corner)
                weights[:-1, bins - reach :] += np.sum(outer, axis=2) / bins
                weights[1:, :reach] += np.sum(outer, axis=1) / bins
            means = np.einsum("gk,gkc->gc", weights, inner) / bins
            result = float(np.sum(np.log(np.max(means, axis=1))))
        return result if math.isfinite(result) else math.inf

    def log_largest(self, l: int) -> float:
        """log of an upper bound of max_k' Π_g φ_g(k'_{g-1}, k'_g, k'_{g+1}), where

        φ_g(p, c, q) = mean_k exp(l (A_p[k] + D_c[k] + B_q[k])) is the mean over the bins of
        assignment g of its overlaps with bin p of the assignment before (A, on early bins k only),
        with bin c of its own (D) and with bin q of the next (B, on late bins only). Exactly,

            e^{A+D+B} = e^D + (e^A - 1) e^D + e^D (e^B - 1) + (e^A - 1) e^D (e^B - 1),

        and the last term is 0 unless k is both early and late (never if 2·bands <= bins + 2). There
        e^B - 1 is replaced by its maximum over the block of bins Q that q is in, so that

            φ_g(p, c, q) <= F_g(c) + P_g(p, c) + N_g(c, q) + T_g(p, c, Q).

        The maximum of the product over all patterns is then one forward pass over the assignments;
        its state is (k'_g, k'_{g+1}), where a next bin that is not early is as good as any other.
        """
        bins, reach, throws = self.bins, self.corner.shape[-1], len(self.within)
        with np.errstate(over="ignore", invalid="ignore"):
            inner = np.exp(l * self.within)  # (K, k, c)
            outer = np.expm1(l * self.corner)  # (K - 1, i late, k' early)
            diagonal = np.mean(inner, axis=1)  # F: (K, c)
            following = np.zeros((throws, bins, reach + 1))  # N: (K, c, q early or none)
            preceding = np.zeros((throws, reach, bins))  # P: (K, p late, c)
            if reach and throws > 1:
                late, early = inner[:-1, bins - reach :], inner[1:, :reach]
                following[:-1, :, :reach] = late.swapaxes(1, 2) @ outer / bins
                preceding[1:] = outer @ early / bins
            best = np.log(diagonal[0][:, None] + following[0])  # (c, next early or none)
            kind = np.minimum(np.arange(bins), reach)  # of a bin as the next one
            starts = np.append(np.arange(0, reach, _BLOCK), reach)  # of blocks Q: last no early q
            block = np.repeat(np.arange(len(starts)), np.diff(starts, append=reach + 1))
            for g in range(1, throws):
                untied = np.max(best[: bins - reach], axis=0)[kind]  # (q,)
                tied = best[bins - reach :][:, kind]  # (i, q)
                top = np.maximum(untied, np.max(tied, axis=0, initial=-np.inf))
                # in units of the largest, and never rounded to nothing; a bin that is not late last
                weights = np.exp(np.append(tied, untied[None], axis=0) - top)
                shares = np.maximum(weights, _LEAST)[:, :, None]
                between = preceding[g][:, :, None] + self._between(l, g)
                between = np.pad(between, ((0, 1), (0, 0), (0, 0)))  # (i, q, Q)
                independent = diagonal[g][:, None] + following[g]  # (q, r)
                low = np.minimum.reduceat(independent, starts, axis=1)
                high = np.maximum.reduceat(independent, starts, axis=1)
                # a maximum of lines in ``alone`` is convex: in a block at most on its chord
                at_low, at_high = (np.max(shares * (between + x), axis=0) for x in (low, high))
                rise = (at_high - at_low) / np.maximum(high - low, _LEAST)
                best_sum = at_low[:, block] + rise[:, block] * (independent - low[:, block])
                best = top[:, None] + np.log(best_sum)
            result = float(np.max(best[:, reach]))
        return result if math.isfinite(result) else math.inf

    def _between(self, l: int, g: int) -> np.ndarray:
        """T_g, shape (late p, c, Q), the last Q for a q that is not early: 0."""
        bins, reach = self.bins, self.corner.shape[-1]
        blocks = -(-reach // _BLOCK)
        sums = np.zeros((reach, bins, blocks + 1))
        overlapping = 2 * reach - bins  # bins from bins - reach on that are early too
        if overlapping > 0 and 0 < g < len(self.within) - 1:
            ahead, back = (np.expm1(l * self.corner[rounds]) for rounds in (g, g - 1))
            largest = np.maximum.reduceat(ahead[:overlapping], np.arange(0, reach, _BLOCK), axis=1)
            inner = np.exp(l * self.within[g, bins - reach : reach])
            right = (inner[:, :, None] * largest[:, None, :]).reshape(overlapping, -1)
            product = back[:, bins - reach :] @ right / bins
            sums[:, :, :-1] = product.reshape(reach, bins, blocks)
        return sums
