"""What all patterns of bins have in common is a Gaussian release, and is paid exactly.

It is :mod:`.common_part` where bins are thrown more than once; notation of :mod:`.patterns`, in
noise units. The patterns m_k = Σ_g M_g[:, k_g] all have the same product with a unit vector û just
where it has the same product a_g with all modes of a throw, since one bin can be changed alone.
Then that product is Σ_g a_g, and its largest square is the squared distance of the origin from the
affine hull of the patterns. With J the indicators of the epochs, û = C⁻ᵀJa/|C⁻ᵀJa| has one product
with all columns of an epoch, for any a; |C⁻ᵀJa|² = aᵀDa with D = Jᵀ(CᵀC)⁻¹J, and (1ᵀa)²/aᵀDa is
largest at Da ∝ 1. (Where bins are kept for several epochs û may be another still, and what is found
is less than the largest; it is no less true.)

Let 0 < q < 1, θ² = 1 - q, p_g = √q a_g, √c = Σ_g p_g and M'_g[:, k] = M_g[:, k] - (1 - θ) a_g û:
what is left of a mode, with a little of it along û, so that the mean of all patterns is not 0.

(1) M'ᵀM' = MᵀM - p_g p_h between all bins of throws g and h: off û nothing has changed, and along
    it θ² a_g a_h = a_g a_h - p_g p_h is left.
(2) So <m'_k, m'_l> = <m_k, m_l> - c, and as for bins thrown once ((1) to (3) of
    :mod:`.common_part`, whose modes are the patterns here) P and Q are P' and Q', those of M',
    beside a Gaussian release of shift √c: H(P, Q) = E_P' δ₂(ε - Y') and H(Q, P) = E_Q' δ₂(ε + Y')
    with δ₂(t) = H_{e^t}(N(√c, 1), N(0, 1)).
(3) The chain remains. Throws that are not neighbours overlap now, by -p_g p_h, but that is one
    factor for all patterns: with Z' = M'ᵀX, and |m'_k|² = |m_k|² - c by (2),

        Y' = log E_k e^{Σ_g Z'_g[k_g] - |m_k|²/2} + c/2,

    the forward pass of :func:`.patterns.log_mean` at Z' with the norms and T of C itself, plus c/2.
(4) Nothing in the proofs of :mod:`.pattern_tilts` asks for the sign of an overlap. With l patterns
    in V_l the exponents h_g[k] are less by l p_g √c, which is the same for all bins of a throw: the
    patterns are drawn as before. log N_l is less by l c, and so is the maximum of (4) there; the
    squares of the longest pattern, of the mean pattern and the mean square are less by c.
(5) (2) of :mod:`.pattern_blocks` holds for a forward pass at any Z, so ℓ + c/2 <= Y' with ℓ taken
    at Z'. Its a_g are those of Z, as Z' differs from it by one number for all bins of a throw: they
    depend on the rows of throw g alone, and the rows of X ~ N(-t m̄', I) are independent too, with
    m̄' = m̄ - (1 - θ)(Σ_g a_g) û.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import patterns as pattern
from mfopt.accounting.monte_carlo.patterns import Patterns
from mfopt.accounting.monte_carlo.proposals import Drawn
from mfopt.strategies import Array

_SHARE = 0.999  # q: of the squared length along û
_LEFT = math.sqrt(1 - _SHARE)  # θ
_WORTH = 1e-3  # of the largest squared norm of a pattern: a smaller c gains nothing
_ROUNDING = 1e-9  # relative: the products of û with the modes of a throw against each other
_STEPS = 200  # of the search for the best a: any a is valid


class Rest(NamedTuple):
    """Patterns without what they have in common; all of them where ``parts`` are 0.

    Attributes:
      patterns: C.
      toward: û, shape (n,).
      parts: a_g, shape (K,).
    """

    patterns: Patterns
    toward: Array
    parts: Array

    @property
    def shift(self) -> jax.Array:
        """√c, of the release that is paid for exactly."""
        return math.sqrt(_SHARE) * jnp.sum(jnp.asarray(self.parts))

    def scaled(self, noise_multiplier: Any) -> Rest:
        """In noise units."""
        parts = self.parts / noise_multiplier
        return Rest(self.patterns.scaled(noise_multiplier), self.toward, parts)

    def noise(self, z: jax.Array) -> jax.Array:
        """M'ᵀz of rows z (samples, n): shape (samples, K·b)."""
        along = z @ jnp.asarray(self.toward)
        return pattern.noise(self.patterns, z) - self._by_bin((1 - _LEFT) * along)

    def of(self, drawn: Drawn, order: Any) -> Drawn:
        """V' of 1 + ``order`` patterns from V, whose noise is that of :meth:`noise`."""
        count, square = 1 + order, self.shift**2
        along = jnp.full(drawn.products.shape[0], _SHARE * count * jnp.sum(jnp.asarray(self.parts)))
        return drawn._replace(
            products=drawn.products - self._by_bin(along),
            square=drawn.square - count**2 * square,
            log_normalizers=drawn.log_normalizers - order * count / 2 * square,
        )

    def mean_row(self) -> jax.Array:
        """m̄', shape (n,)."""
        along = (1 - _LEFT) * jnp.sum(jnp.asarray(self.parts))
        return pattern.mean_row(self.patterns) - along * jnp.asarray(self.toward)

    def ratio(self, exponents: jax.Array, power: Any = 1) -> jax.Array:
        """log E_k e^{power·<m'_k, X> - power²·|m'_k|²/2} at M'ᵀX: Y' at 1."""
        at, square = self.patterns, power**2
        half = square * pattern.squared_norms(at) / 2
        corner = square * pattern.corners(at)
        passed = pattern.log_mean(power * exponents - half, corner, at.bins)
        result: jax.Array = passed + square * self.shift**2 / 2
        return result

    def _by_bin(self, along: jax.Array) -> jax.Array:
        """a_g·along for every bin: (samples,) -> (samples, K·b)."""
        each = jnp.repeat(jnp.asarray(self.parts), self.patterns.bins)
        return along[:, None] * each


def whole(patterns: Patterns) -> Rest:
    """Patterns of which nothing is paid for apart."""
    return Rest(patterns, np.zeros(patterns.iterations), np.zeros(patterns.throws))


@float64
def split(patterns: Patterns) -> Rest | None:
    """The largest common part; None where it is too small to gain anything, or not to be found.

    Args:
      patterns: C, for σ = 1.
    """
    toward = _toward(patterns)
    length = float(np.linalg.norm(toward))
    if not 0 < length < math.inf:
        return None
    toward = toward / length
    products = np.asarray(pattern.noise(patterns, jnp.asarray(toward)[None]))[0]
    by_throw = products.reshape(patterns.throws, patterns.bins)
    parts = np.mean(by_throw, axis=1)
    root = float(np.sum(parts))
    uneven = float(np.sum(np.max(np.abs(by_throw - parts[:, None]), axis=1)))
    worth = _WORTH * float(pattern.largest_square(patterns))
    if not (root > 0 and uneven <= _ROUNDING * root and root**2 >= worth):
        return None
    return Rest(patterns, toward, parts)


def _toward(patterns: Patterns) -> np.ndarray:
    """û up to its length: C⁻ᵀJa for the best a of an epoch, by conjugate gradients on D."""
    columns = np.asarray(patterns.columns, np.float64)
    bands, n = columns.shape
    epochs = n // patterns.bins
    if not np.all(columns[0] > 0):  # no inverse
        return np.zeros(n)
    lower = columns / np.max(columns)
    upper = np.zeros_like(lower)  # Cᵀ, as SciPy stores it
    for d in range(bands):
        upper[bands - 1 - d, d:] = lower[d, : n - d]

    def solved(reach: tuple[int, int], band: np.ndarray, right: np.ndarray) -> np.ndarray:
        # what is no number leaves no û, and is seen by whoever asked
        return np.asarray(scipy.linalg.solve_banded(reach, band, right, check_finite=False))

    def from_epochs(a: np.ndarray) -> np.ndarray:
        """C⁻ᵀJa"""
        return solved((0, bands - 1), upper, np.repeat(a, patterns.bins))

    def times(a: np.ndarray) -> np.ndarray:
        """Da"""
        back = solved((bands - 1, 0), lower, from_epochs(np.ravel(a)))
        return np.asarray(back.reshape(epochs, patterns.bins).sum(axis=1))

    d = scipy.sparse.linalg.LinearOperator((epochs, epochs), matvec=times, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        best, _ = scipy.sparse.linalg.cg(d, np.ones(epochs), rtol=1e-10, maxiter=_STEPS)
        return from_epochs(best)
