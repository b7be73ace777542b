"""Proven ceilings of the certificate's values where bins are assigned more than once.

S is the Gram matrix of the modes in noise units, M_g[:, k] the modes of assignment g, m_k the sum
of the modes of pattern k; see :mod:`.patterns`. All numbers here are plain float64 sums and maxima
of non-negative terms; the relative slack for rounding is that of :mod:`.evidence`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER
from mfopt.accounting.monte_carlo.likelihood import Ceilings, PatternChain
from mfopt.accounting.monte_carlo.patterns import (
    COUPLING,
    Patterns,
    corners,
    largest_square,
    mean_square,
    within,
)
from mfopt.errors import FailureError

_BLOCK = 16  # bins: a ceiling is 0.4% above that of single bins at most, at 128 bins and bands


@_quick.jit
def _parts(patterns: Patterns) -> tuple[jax.Array, ...]:
    """One program: operation by operation, each would be compiled for each shape."""
    largest, mean = largest_square(patterns), mean_square(patterns)
    return corners(patterns), within(patterns), largest, mean, patterns.mean()[1]


@float64
def ceilings(patterns: Patterns) -> Ceilings:
    """The ceilings of patterns in noise units.

    Raises:
      FailureError: assignments overlap by more than the likelihood is known for.
    """
    corner, inside, *squares = _parts(patterns)
    found = _Moments(patterns.bins, np.asarray(corner), np.asarray(inside))
    coupling = float(np.max(found.corner, initial=0.0))
    if not coupling <= COUPLING:
        raise FailureError(
            f"σ is beyond numerical range: the contributions of two assignments overlap by "
            f"{coupling:.3g} in noise units, and the likelihood is known up to {COUPLING:g}. "
            "Ask for a larger σ, or a smaller ε."
        )
    known = [0.0]

    def chain(order: int) -> tuple[float, None]:
        while len(known) <= order:
            known.append(known[-1] + found.log_largest(len(known)))
        return known[order], None

    return Ceilings({"chain": PatternChain(chain, MAX_ORDER)}, *map(float, squares))


class _Moments(NamedTuple):
    """Overlaps of the modes of consecutive assignments, and of those of one assignment."""

    bins: int
    corner: np.ndarray
    within: np.ndarray

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
            own = np.mean(inner, axis=1)  # F: (K, c)
            after = np.zeros((throws, bins, reach + 1))  # N: (K, c, q early or none)
            before = np.zeros((throws, reach, bins))  # P: (K, p late, c)
            if reach and throws > 1:
                late, early = inner[:-1, bins - reach :], inner[1:, :reach]
                after[:-1, :, :reach] = np.einsum("gic,giq->gcq", late, outer) / bins
                before[1:] = np.einsum("gpk,gkc->gpc", outer, early) / bins
            best = np.log(own[0][:, None] + after[0])  # (c, next early or none)
            kind = np.minimum(np.arange(bins), reach)  # of a bin as the next one
            block = np.arange(reach + 1) // _BLOCK  # Q of q
            block[reach] = -1  # not early
            for g in range(1, throws):
                rest = np.max(best[: bins - reach], axis=0)[kind]  # (q,)
                alone = own[g][:, None] + after[g]  # (q, r)
                found = rest[:, None] + np.log(alone)
                between = self._between(l, g)
                for i in range(reach):
                    seen = best[bins - reach + i][kind]
                    sides = before[g, i][:, None] + between[i][:, block]
                    found = np.maximum(found, seen[:, None] + np.log(alone + sides))
                best = found
            result = float(np.max(best[:, reach]))
        return result if np.isfinite(result) else np.inf

    def _between(self, l: int, g: int) -> np.ndarray:
        """T_g, shape (late p, c, Q), the last Q for a q that is not early: 0."""
        bins, reach = self.bins, self.corner.shape[-1]
        blocks = -(-reach // _BLOCK)
        found = np.zeros((reach, bins, blocks + 1))
        both = 2 * reach - bins  # bins from bins - reach on that are early too
        if both > 0 and 0 < g < len(self.within) - 1:
            ahead, back = (np.expm1(l * self.corner[at]) for at in (g, g - 1))
            most = np.maximum.reduceat(ahead[:both], np.arange(0, reach, _BLOCK), axis=1)
            inner = np.exp(l * self.within[g, bins - reach : reach])
            right = (inner[:, :, None] * most[:, None, :]).reshape(both, -1)
            product = back[:, bins - reach :] @ right / bins
            found[:, :, :-1] = product.reshape(reach, bins, blocks)
        return found
