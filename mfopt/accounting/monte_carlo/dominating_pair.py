"""Dominating pair of balls-in-bins: a b×b Gram matrix computed from the strategy matrix.

The dominating pair is P = (1/b) Σ_i N(m_i, σ²I) against Q = N(0, σ²I), with the modes m_i of
``Strategy.modes`` (Choquette-Choo et al. 2024, Lemma 3.2). The privacy loss depends on X only
through the b numbers <m_i, X>/σ², which are jointly Gaussian with covariance S = G/σ²,
G[i, k] = <m_i, m_k>. So nothing of size n is sampled, whatever the number of epochs.

Adjacency: add-remove of one privacy unit whose per-iteration contribution is clipped to norm 1
("remove" is H(P, Q), "add" is H(Q, P)); σ is relative to that clip norm, for C as stored.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt._runtime import _check, _sizes
from mfopt._runtime._arrays import Array
from mfopt._runtime._float64 import wide
from mfopt.accounting.monte_carlo import nested
from mfopt.accounting.monte_carlo.nested import Factor, HierarchicalLowRank
from mfopt.sampling import BallsInBins, Scheme
from mfopt.strategies import Strategy

_ONE_LENGTH = 1e-9  # relative: squared norms and overlaps that differ by less count as equal
_JITTER = 1e-12  # relative to the mean squared mode norm
_FACTOR = 1e-9  # relative to the largest squared norm: G against L Lᵀ
_SPARE = 1e-9  # relative to the mean squared norm: room for a factor in pieces
STRUCTURED = 4.0  # numbers held for each entry of G, at the peak of making and certifying a pair
_ROWS = 1024  # processed together: no second matrix is made to check one


class DominatingPair(NamedTuple):
    """(P, Q) at every σ.

    Attributes:
      gram: G, shape (bins, bins); with many bins it may stand for that of the pieces.
      factor: any L with L Lᵀ = G, a matrix of shape (bins, bins) or in pieces (:mod:`.nested`).
    """

    gram: Array
    factor: Factor

    @property
    def bins(self) -> int:
        """Number of components of P."""
        return int(self.gram.shape[0])


_COVERED = (BallsInBins,)
_ROUNDING = 1e-9  # relative, far above that of an entry of G by its modes, and of a row's sum


def covers(scheme: Scheme) -> bool:
    """True if this is the scheme's dominating pair; by exact class, as a subclass may differ."""
    return type(scheme) in _COVERED


@wide
def exact(strategy: Strategy, scheme: Scheme) -> DominatingPair:
    """The pair for accounting, without jitter.

    Parameters are taken to float64 first, whatever their width: the pair is that of C as stored,
    not of C as rounded on the way.

    With many bins, or where C has a Gram matrix by structure (:meth:`Strategy.structured_gram`),
    the pair is that of a G̃ >= G, a hair above it (:func:`above`). Else the factor is the triangle
    of a QR of the modes, which are divided by their largest entry before, so that nothing is lost
    below the smallest float.

    Raises:
      UsageError: where Lemma 3.2 does not apply (negative or non-finite entries of C), where C is
        so large or small that G would leave float64, where parameters are not float32 or wider
        real numbers, or the scheme is not balls-in-bins.
    """
    strategy, bins = _widened(strategy, scheme), cast(BallsInBins, scheme).bins
    if bins >= nested.LEAST or strategy.has_structured_gram(cast(BallsInBins, scheme)):
        gram, relative = _gram(strategy, cast(BallsInBins, scheme))
        # a norm, which no entry exceeds
        _check.scale_of_c(math.sqrt(float(np.max(np.diagonal(gram)))))
        return above(gram, relative)
    modes = np.asarray(strategy.modes(cast(BallsInBins, scheme)))
    largest = float(np.max(modes))
    _check.scale_of_c(largest)
    triangle = np.linalg.qr(modes / largest, mode="r").T
    return DominatingPair(triangle @ triangle.T * largest**2, triangle * largest)


def overlaps(strategy: Strategy, scheme: Scheme) -> tuple[np.ndarray, float]:
    """G of a C >= 0, and a bound on the relative error of each row's sum, without a factor.

    Raises:
      UsageError: as :func:`exact`, but for the range of C.
    """
    gram, error = _gram(_widened(strategy, scheme), cast(BallsInBins, scheme))
    return gram, error + _ROUNDING


def _gram(strategy: Strategy, scheme: BallsInBins) -> tuple[np.ndarray, float]:
    """G, and a bound on the relative error of its entries or of its norm."""
    if strategy.has_structured_gram(scheme):
        gram, error = strategy.structured_gram(scheme)
        return np.asarray(gram), error
    return np.asarray(strategy.gram(scheme)), _ROUNDING


def _widened(strategy: Strategy, scheme: Scheme) -> Strategy:
    """C in float64, once it is known to be covered and its overlaps to fit."""
    if not covers(scheme):
        raise _check.reject("sampling", scheme, "this accountant covers BallsInBins only")
    bins, n = cast(BallsInBins, scheme).bins, scheme.length
    if strategy.has_structured_gram(cast(BallsInBins, scheme)):
        _sizes.require("bins", bins, lambda bins: 8 * STRUCTURED * bins**2)
    else:
        # the modes, and those that are scaled, in whose place their QR is made
        _sizes.require("bins", bins, lambda bins: 8 * (2.0 * n * bins + 4.0 * bins**2))
    strategy = strategy.widened()
    strategy.check_entries(scheme.iterations)
    return strategy


def above(gram: np.ndarray, relative: float) -> DominatingPair:
    """The pair of some G̃ >= G, where each entry of ``gram`` is that of G up to so much, relatively.

    With Ĝ what is given, all of its entries >= 0, u = 2^-53 and R = max_i Σ_k Ĝ[i, k]:

    1. |Ĝ − G| <= ρ Ĝ entry by entry, ρ = ``relative``/(1 − ``relative``), so ‖Ĝ − G‖ <= ρ R, a
       symmetric matrix having no eigenvalue beyond its largest row sum (Gershgorin); by FFT an
       entry is off by some 10^-15 log n of the largest, b of them by less than ρ R for any b whose
       G fits;
    2. the Cholesky factor L that is computed of Ĝ + ηI has L Lᵀ = Ĝ + ηI + Δ with |Δ| <=
       γ |L||L|ᵀ, γ = (b+1)u/(1 − (b+1)u) (Higham 2002, Theorem 10.3), so ‖Δ‖ <= γ ‖L‖_F², and
       ‖L‖_F² = tr(L Lᵀ) <= tr(Ĝ + ηI)/(1 − γ);
    3. so L Lᵀ >= G if η >= ρ R + γ tr(Ĝ + ηI)/(1 − γ). η here is twice
       ``relative``·R + (b+1)u·tr(Ĝ), which leaves room for the sums themselves and for η on the
       right;
    4. with many bins L is replaced by the L̃ of :mod:`.nested`, for which η has a part κ more, where
       twice 2 ‖L‖ ‖L̃ − L‖_F + ‖L̃ − L‖_F² <= κ as it is measured: L̃ L̃ᵀ >= L Lᵀ − κI, and twice
       leaves room for the rounding of the norms. ‖L‖² <= R + 2η, as ‖L Lᵀ − Ĝ‖ <= 2η. What is
       given then is the pair of G̃ = L̃ L̃ᵀ itself.

    Where G <= G̃ the modes of G are those of G̃ times a contraction T, and σ²(I − TTᵀ) more noise is
    post-processing: what is proven for the pair of G̃ holds for that of G. σ grows by a relative
    η/(2 min_i G[i, i]) at most: 1e-7 for 4,096 bins.
    """
    bins = gram.shape[0]
    rows, trace = float(gram.sum(axis=1).max()), float(np.trace(gram))
    room = 2 * (relative * rows + (bins + 1) * 2.0**-53 * trace)
    spare = _SPARE * trace / bins if bins >= nested.LEAST else 0.0  # κ
    raised = gram.copy()
    raised[np.diag_indices(bins)] += room + spare
    if not spare:
        return DominatingPair(raised, scipy.linalg.cholesky(raised, lower=True))
    factor = _cholesky_in_place(raised)
    pieces, distance = nested.nested(factor)
    if 2 * (2 * math.sqrt(rows + 2 * (room + spare)) * distance + distance**2) <= spare:
        del raised, factor, gram  # of very many bins no two matrices should be held
        return DominatingPair(pieces.square(bins), pieces)
    return DominatingPair(factor @ factor.T, factor)


def _cholesky_in_place(matrix: np.ndarray) -> np.ndarray:
    """The lower triangular factor, where ``matrix`` was; by panels of columns.

    LAPACK's own ends in a segmentation fault at 16,384 rows (OpenBLAS, two threads).
    """
    for begin in range(0, len(matrix), _ROWS):
        block, below = slice(begin, begin + _ROWS), slice(begin + _ROWS, None)
        corner = scipy.linalg.cholesky(matrix[block, block], lower=True)
        matrix[block, block], matrix[block, below] = corner, 0
        matrix[below, block] = scipy.linalg.solve_triangular(
            corner, matrix[below, block].T, lower=True
        ).T
        for cut in range(begin + _ROWS, len(matrix), _ROWS):  # and nothing above the diagonal
            rows = slice(cut, cut + _ROWS)
            matrix[cut:, rows] -= matrix[cut:, block] @ matrix[rows, block].T
    return matrix


def check(pair: DominatingPair) -> DominatingPair:
    """``pair`` in float64, refused unless G is finite, symmetric, G >= 0 and L Lᵀ = G.

    Raises:
      UsageError: it is not a Gram matrix with its factor.
    """
    gram = np.asarray(pair.gram, np.float64)
    factor: Any = pair.factor
    if not isinstance(factor, HierarchicalLowRank):
        factor = np.asarray(factor, np.float64)
        square = gram.ndim == 2 and gram.shape[0] == gram.shape[1] > 0
        if not square or factor.shape[:1] != gram.shape[:1] or factor.ndim != 2:
            shapes = gram.shape, factor.shape
            raise _check.reject("pair", shapes, "must be G (b, b) and L (b, ...)")
    diagonal = np.diagonal(gram)
    cuts = [slice(cut, cut + _ROWS) for cut in range(0, len(gram), _ROWS)]
    parts = [*jax.tree.leaves(factor), *[gram[cut] for cut in cuts]]
    if not (all(np.all(np.isfinite(part)) for part in parts) and np.all(diagonal > 0)):
        rule = "must be finite, with a diagonal greater than 0"
        raise _check.reject("pair", "G or its factor", rule)
    if isinstance(factor, HierarchicalLowRank):
        product = factor.square_rows(len(gram))
    else:
        product = ((cut, factor[cut] @ factor.T) for cut in cuts)
    off = max(float(np.abs(part - gram[cut]).max()) for cut, part in product)
    off = max(off, *(float(np.abs(gram[cut] - gram[:, cut].T).max()) for cut in cuts))
    # entries that are 0 in exact arithmetic come out as dust of either sign
    dust = _FACTOR * float(diagonal.max())
    if not off <= dust or float(gram.min()) < -dust:
        raise _check.reject("pair", off, "G must be symmetric and >= 0, and L Lᵀ = G")
    return DominatingPair(gram, factor)


def jittered(gram: jax.Array) -> DominatingPair:
    """The pair of a Gram matrix for optimizing: a Cholesky factor, cheap to differentiate.

    Call it inside a float64 scope. Not for certificates: the diagonal is raised by 1e-12.
    """
    jitter = _JITTER * jnp.mean(jnp.diagonal(gram)) * jnp.eye(gram.shape[0])
    return DominatingPair(gram, jnp.linalg.cholesky(gram + jitter))


def orthogonal_norm(pair: DominatingPair) -> float | None:
    """g with G <= g·I, where the modes are orthogonal and of one length up to rounding; else None.

    The largest row sum of |G| is above its largest eigenvalue (Gershgorin), so the pair of G is a
    contraction of the pair of g·I: whatever is proven for that holds for it.
    """
    gram = np.asarray(pair.gram, np.float64)
    bound = float(np.abs(gram).sum(axis=1).max())
    if bound > float(np.diagonal(gram).min()) * (1 + _ONE_LENGTH):
        return None
    return rounded_norm(bound)


def rounded_norm(squared_norm: float) -> float:
    """A squared norm raised to nine digits: above what the entries of G may have rounded.

    However it was computed, the same mechanism has the same number and so the same σ.
    """
    raised = squared_norm * (1 + 1e-11)
    unit = 10.0 ** (math.floor(math.log10(raised)) - 9)
    return math.ceil(raised / unit) * unit


def coloured(normal: jax.Array, factor: Factor) -> jax.Array:
    """``normal`` Lᵀ, shape (samples, bins)."""
    if isinstance(factor, HierarchicalLowRank):
        return factor.colour(normal)
    return normal @ factor.T


def privacy_loss(exponents: jax.Array) -> jax.Array:
    """Y = log P/Q from u_i = <m_i, X>/σ² − |m_i|²/(2σ²), shape (samples, bins) -> (samples,)."""
    bins = exponents.shape[-1]
    return jax.scipy.special.logsumexp(exponents, axis=-1) - jnp.log(bins)


def log_hinge(excess: jax.Array) -> jax.Array:
    """log (1 − e^(−excess))₊, −inf where ``excess`` <= 0, with a finite gradient everywhere.

    NaN stays NaN: a loss that is no number must not count as 0.
    """
    inside = excess > 0
    outside = jnp.where(jnp.isnan(excess), jnp.nan, -jnp.inf)
    return jnp.where(inside, jnp.log(-jnp.expm1(-jnp.where(inside, excess, 1.0))), outside)
