"""Proven ceilings of the certificate's values where bins are thrown more than once.

S is the Gram matrix of the modes in noise units, M_g[:, k] the modes of throw g, m_k the sum of the
modes of pattern k; see :mod:`.patterns`. All numbers here are plain float64 sums and maxima of
non-negative terms; the relative slack for rounding is that of :mod:`.evidence`.
"""

from __future__ import annotations

import copy

import jax
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo.patterns import (
    Patterns,
    corners,
    largest_square,
    mean_square,
    toward_mean,
    within,
)


@_quick.jit
def _parts(patterns: Patterns) -> tuple[jax.Array, ...]:
    """One program: operation by operation, each would be compiled for each shape."""
    largest, mean = largest_square(patterns), mean_square(patterns)
    return corners(patterns), within(patterns), largest, mean, toward_mean(patterns)[1]


class Ceilings:
    """Maxima over all patterns, at one σ.

    Args:
      patterns: in noise units.
    """

    @float64
    def __init__(self, patterns: Patterns) -> None:
        self.bins, self.throws = patterns.bins, patterns.throws
        found = _parts(patterns)
        self.corner, self.within = map(np.asarray, found[:2])
        # max_k |m_k|², ḡ = E_k |m_k|², ρ = |m̄|²
        self.largest_square, self.mean_square, self.square_of_mean = map(float, found[2:])
        self.common = 0.0  # c, what all <m_k, m_k'> are less by
        self._log_normalizers = [0.0]  # with c = 0

    def without(self, common: float) -> Ceilings:
        """Of what is left of the patterns where a part in common is paid for apart.

        Args:
          common: its squared length c, in noise units (:mod:`.pattern_common`).
        """
        rest = copy.copy(self)  # and the list of normalizers is one for both
        rest.common += common
        rest.largest_square -= common
        rest.mean_square -= common
        rest.square_of_mean -= common
        return rest

    def log_normalizer(self, order: int) -> float:
        """Σ_{l=1..order} log max_k' E_k exp(l <m_k, m_k'>/σ²)."""
        while len(self._log_normalizers) <= order:
            one = self._largest_moment(len(self._log_normalizers))
            self._log_normalizers.append(self._log_normalizers[-1] + one)
        return self._log_normalizers[order] - self.common * order * (order + 1) / 2

    def _largest_moment(self, l: int) -> float:
        """log of an upper bound of max_k' Π_g φ_g(k'_{g-1}, k'_g, k'_{g+1}), where

        φ_g(p, c, q) = mean_k exp(l (A_p[k] + D_c[k] + B_q[k])) is the mean over the bins of throw
        g of its overlaps with bin p of the throw before (A, on early bins k only), with bin c of
        its own (D) and with bin q of the next (B, on late bins only). Exactly,

            e^{A+D+B} = e^D + (e^A - 1) e^{D+B} + e^D (e^B - 1),

        so that with B replaced by its maximum over q in the middle term (nothing is lost where no
        bin is both early and late: 2·bands <= bins + 2)

            φ_g(p, c, q) <= F_g(c) + P_g(p, c) + N_g(c, q).

        The maximum of the product over all patterns is then one forward pass over the throws; its
        state is (k'_g, k'_{g+1}), where a next bin that is not early is as good as any other.
        """
        bins, reach = self.bins, self.corner.shape[-1]
        with np.errstate(over="ignore", invalid="ignore"):
            inner = np.exp(l * self.within)  # (K, k, c)
            outer = np.expm1(l * self.corner)  # (K - 1, i late, k' early)
            own = np.mean(inner, axis=1)  # F: (K, c)
            after = np.zeros((self.throws, bins, reach + 1))  # N: (K, c, q early or none)
            before = np.zeros((self.throws, reach, bins))  # P: (K, p late, c)
            if reach and self.throws > 1:
                late, early = inner[:-1, bins - reach :], inner[1:, :reach]
                after[:-1, :, :reach] = np.einsum("gic,giq->gcq", late, outer) / bins
                largest = np.ones((self.throws, bins))
                largest[:-1, bins - reach :] += np.max(outer, axis=2)
                raised = outer * largest[1:, None, :reach]
                before[1:] = np.einsum("gpk,gkc->gpc", raised, early) / bins
            best = np.log(own[0][:, None] + after[0])  # (c, next early or none)
            kind = np.minimum(np.arange(bins), reach)  # of a bin as the next one
            for g in range(1, self.throws):
                rest = np.max(best[: bins - reach], axis=0)[kind]  # (q,)
                alone = own[g][:, None] + after[g]  # (q, r)
                found = rest[:, None] + np.log(alone)
                for i in range(reach):
                    seen = best[bins - reach + i][kind]
                    coupled = seen[:, None] + np.log(alone + before[g, i][:, None])
                    found = np.maximum(found, coupled)
                best = found
            result = float(np.max(best[:, reach]))
        return result if np.isfinite(result) else np.inf

    def coupling(self) -> float:
        """The largest overlap of modes of two throws."""
        return float(np.max(self.corner, initial=0.0))
