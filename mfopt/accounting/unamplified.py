"""Sensitivity where the order is not random: fixed epochs and b-min-separation.

The mechanism releases C x + σ z, where a unit changes the rows of x in which it takes part, each
by a vector of norm at most 1. Its sensitivity is the largest norm of C x over the participation
patterns π, and for any vectors

    |C x|² = Σ_{i,j in π} X[i, j] <x_i, x_j> <= Σ_{i,j in π} |X[i, j]|,   X = CᵀC,

with equality for aligned vectors where all X[i, j] >= 0. The release is then one Gaussian
mechanism, also when the x's are chosen adaptively (Denisov, McMahan, Rush, Smith, Thakurta 2022).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt.sampling import FixedOrder, MinSeparation, Scheme
from mfopt.strategies import Strategy
from mfopt.strategies.base import check_triangular

# Dense CᵀC is formed up to this many iterations (512 MiB).
_LARGEST_DENSE = 8192
_FLIPS = 20  # rounds of signs that a lower bound is searched for with


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Largest change of C x by one unit, in units of the clip norm.

    Attributes:
      value: the sensitivity, or a proven upper bound of it.
      exact: whether ``value`` is attained by some data.
      method: how it was obtained.
    """

    value: float
    exact: bool
    method: str


def sensitivity(strategy: Strategy, scheme: Scheme | np.ndarray) -> Sensitivity:
    """Sensitivity of C under add-remove or zero-out adjacency; replacement doubles it.

    Args:
      strategy: C.
      scheme: FixedOrder or MinSeparation; or, where participations are known and public, the
        number of contributions of norm at most 1 that each unit makes in each iteration, shape
        (units, n), as :meth:`mfopt.sampling.Owners.participations` gives it.

    Raises:
      UsageError: the scheme has no participation pattern of its own, n is too large for the
        dense computation that an unstructured C needs, or parameters are narrower than float32.
    """
    if isinstance(scheme, np.ndarray):
        return _counted(strategy.widened(), scheme)
    # by exact class: a subclass may let units take part otherwise
    if type(scheme) not in _BY_SCHEME:
        raise _check.reject("sampling", scheme, "must be an array, FixedOrder or MinSeparation")
    return _sensitivity(strategy.widened(), scheme)


@functools.lru_cache(maxsize=2)  # asked again for the lower end of an account
def _sensitivity(strategy: Strategy, scheme: Scheme) -> Sensitivity:
    return _BY_SCHEME[type(scheme)][0](strategy, scheme)


def _counted(strategy: Strategy, counts: np.ndarray) -> Sensitivity:
    """Sensitivity where row m of ``counts`` (units, n) moves C x by at most (mᵀ |CᵀC| m)^½."""
    if counts.ndim != 2 or counts.dtype.kind not in "iu" or not counts.size or counts.min() < 0:
        rule = "must hold whole numbers >= 0, shape (units, n)"
        raise _check.reject("participations", counts, rule)
    units, n = counts.shape
    products = _products(strategy, n)
    squares = np.sum(counts @ np.abs(products) * counts, axis=1)
    value = _up(math.sqrt(squares.max()), n)
    return Sensitivity(value, bool(products.min() >= 0), f"{units} participation patterns")


def attained(strategy: Strategy, scheme: Scheme) -> float:
    """Change of C x by one unit in some data, rounded down: a lower bound of the sensitivity.

    Where the sensitivity is not exact: participations as far apart as the scheme has them, with
    contributions of one vector or its opposite. |C x|² = sᵀ X s does not fall as each sign of s
    becomes that of X s, as X is positive semidefinite.
    """
    strategy, n = strategy.widened(), scheme.iterations
    bound = sensitivity(strategy, scheme)
    if bound.exact:
        return bound.value * (1 - 8 * n * float(np.finfo(np.float64).eps))
    separation, participations = _BY_SCHEME[type(scheme)][1](scheme)
    products, best = _products(strategy, n), 0.0
    for start in range(min(separation, n)):
        square = products[start::separation, start::separation][:participations, :participations]
        for signs in (np.ones(len(square)), np.sign(square[np.argmax(np.abs(square).sum(1))])):
            for _ in range(_FLIPS):
                previous, signs = signs, np.where(square @ signs < 0, -1.0, 1.0)
                best = max(best, float(signs @ square @ signs))
                if np.array_equal(previous, signs):
                    break
    return math.sqrt(best) * (1 - 1e-9)


def fixed_order(strategy: Strategy, scheme: FixedOrder) -> Sensitivity:
    """The largest mode norm: exact for C >= 0, where contributions add up at worst.

    With negative entries the bound is Σ |X[i, j]| over each pattern.
    """
    bins, n = scheme.bins, scheme.iterations
    if strategy.is_identity:
        return Sensitivity(_up(math.sqrt(scheme.epochs), scheme.epochs), True, "largest mode norm")
    if _non_negative(strategy, n):
        return Sensitivity(_up(_largest_mode(strategy, scheme), n), True, "largest mode norm")
    products = np.abs(_products(strategy, n))
    worst = max(float(products[start::bins, start::bins].sum()) for start in range(min(bins, n)))
    value = _up(math.sqrt(worst), n)
    return Sensitivity(value, False, "sum of |CᵀC| over each bin's iterations")


def _min_separation(strategy: Strategy, scheme: MinSeparation) -> Sensitivity:
    """Sensitivity under b-min-separation with at most k participations.

    Exact where it is known: for at most ``separation`` bands the columns of one unit never
    overlap, so the best set of column norms is found by dynamic programming; for a Toeplitz C
    with non-negative, non-increasing coefficients the worst pattern is the earliest and densest
    (Kalinin and Lampert 2024, Theorem 2). Otherwise a bound: with u_i the largest
    Σ_{j in π} |X[i, j]| over patterns π that contain i, |C x|² <= max over π of Σ_{i in π} u_i.
    """
    n, b, k = scheme.iterations, scheme.separation, scheme.participations
    strategy.check_size(n)
    if strategy.is_identity:
        return Sensitivity(_up(math.sqrt(k), k), True, "earliest equally spaced participations")
    column = strategy.toeplitz_column(n)
    if column is not None:
        coefs = np.asarray(column)
        if np.all(coefs >= 0) and np.all(np.diff(coefs) <= 0):
            method = "earliest equally spaced participations"
            return Sensitivity(_up(_spaced_norm(coefs, b, k), n), True, method)
    products = np.abs(_products(strategy, n))
    if bands(strategy, n) <= b:
        value = math.sqrt(_best_prefix(np.diagonal(products)[None], b, k)[-1][0, -1])
        return Sensitivity(_up(value, n), True, "disjoint columns, dynamic programming")
    through = _best_through(products, b, k)
    value = math.sqrt(_best_prefix(through[None], b, k)[-1][0, -1])
    return Sensitivity(_up(value, n), False, "row-wise worst patterns, dynamic programming")


# the sensitivity; steps from one participation to the next, and how many there are, at most
_BY_SCHEME: dict[
    type, tuple[Callable[[Strategy, Any], Sensitivity], Callable[[Any], tuple[int, int]]]
] = {
    FixedOrder: (fixed_order, lambda scheme: (scheme.bins, scheme.epochs)),
    MinSeparation: (_min_separation, lambda scheme: (scheme.separation, scheme.participations)),
}


def bands(strategy: Strategy, n: int) -> int:
    """Number of diagonals of C that are not all zero, from the main one on: seen in the matrix.

    Raises:
      UsageError: the strategy states fewer bands than its matrix has.
    """
    return _extent(strategy, n)[0]


def column_norms(strategy: Strategy, n: int) -> np.ndarray:
    """Euclidean norms of the n columns of C, shape (n,); not to be written to.

    Raises:
      UsageError: as :func:`bands`.
    """
    return _extent(strategy, n)[1]


@functools.lru_cache(maxsize=2)  # an account asks for the same C several times
def _extent(strategy: Strategy, n: int) -> tuple[int, np.ndarray]:
    """Bands and column norms, from all entries of C; the bands are held against those stated."""
    # found again by the numbers alone: they must not be seen in the width of their arrays
    strategy = strategy.widened()
    width, norms = _seen(strategy, n)
    stated = strategy.column_bands(n)
    if stated < width:
        subject, rule = f"{strategy.kind}.column_bands({n})", f"C has {width} bands"
        raise _check.reject(subject, stated, rule, "The strategy contradicts its own matrix.")
    # one number for all columns is looked at once, however many they are
    _check.scale_of_c(float(np.max(norms if norms.strides[0] else norms[:1])))
    norms.setflags(write=False)
    return width, norms


def _seen(strategy: Strategy, n: int) -> tuple[int, np.ndarray]:
    if strategy.is_identity:  # no array of length n, however many iterations
        return 1, np.broadcast_to(1.0, (n,))
    column = strategy.toeplitz_column(n)
    if column is not None:
        coefs = np.asarray(column)
        width = n - int(np.argmax(coefs[::-1] != 0))
        squares = np.cumsum(coefs[:width] ** 2)
        if width == 1:  # one number, however many columns
            return width, np.broadcast_to(np.sqrt(squares[-1]), (n,))
        norms = np.full(n, np.sqrt(squares[-1]))
        norms[n - width :] = np.sqrt(squares[::-1])
        return width, norms
    squares = np.zeros(n)
    if (factors := strategy.scaled_column(n)) is not None:  # diag(rows) T diag(columns), 0 beyond
        coefs, rows, columns = map(np.asarray, factors)
        width = n - int(np.argmax(coefs[::-1] != 0))
        for lag in range(width):
            squares[: n - lag] += (coefs[lag] * rows[lag:]) ** 2
        return width, columns * np.sqrt(squares)
    furthest = 0
    width = n if n <= _LARGEST_DENSE else max(1, _LARGEST_DENSE**2 // n)
    for start in range(0, n, width):
        stop = min(start + width, n)
        if width == n:
            block = np.asarray(strategy.materialize(n))
        else:  # the matrix does not fit: its columns are its products with unit vectors
            block = np.asarray(strategy.multiply(np.eye(n, stop - start, -start)))
        check_triangular(block, start)
        below = block[::-1] != 0  # last row first
        lags = n - 1 - np.argmax(below, axis=0) - np.arange(start, stop)
        furthest = max(furthest, int(np.max(lags, where=below.any(axis=0), initial=0)))
        squares[start:stop] = np.einsum("ij,ij->j", block, block)
    return furthest + 1, np.sqrt(squares)


def _largest_mode(strategy: Strategy, scheme: FixedOrder) -> float:
    """Largest norm of a mode Σ_j C[:, bins·j + i], for C >= 0.

    Only the diagonal of the Gram matrix of the modes: its bins² entries may not fit in memory.
    """
    n, bins, epochs = scheme.iterations, scheme.bins, scheme.epochs
    if (column := strategy.toeplitz_column(n)) is not None:
        # mode i is mode 0 shifted down by i and cut at n, so none is longer
        return _spaced_norm(np.asarray(column), bins, epochs)
    largest, width = 0.0, max(1, _LARGEST_DENSE**2 // n)
    for start in range(0, bins, width):
        chosen = np.tile(np.eye(bins, min(width, bins - start), -start), (epochs, 1))
        modes = np.asarray(strategy.multiply(chosen))
        largest = max(largest, float(np.max(np.sum(modes**2, axis=0))))
    return math.sqrt(largest)


def _spaced_norm(coefs: np.ndarray, separation: int, participations: int) -> float:
    """Norm of the summed columns 0, separation, 2·separation, … of a Toeplitz C; coefs (n,)."""
    n = len(coefs)
    total = np.zeros(n)
    for start in range(0, participations * separation, separation):
        total[start:] += coefs[: n - start]
    return float(np.linalg.norm(total))


def _non_negative(strategy: Strategy, n: int) -> bool:
    try:
        strategy.check_entries(n)
    except _check.UsageError:
        return False
    return True


def _products(strategy: Strategy, n: int) -> np.ndarray:
    if n > _LARGEST_DENSE:
        rule = f"this strategy and pattern need a dense CᵀC (limit {_LARGEST_DENSE})"
        way_out = "Use a Toeplitz strategy with non-increasing coefficients >= 0 under a scheme."
        raise _check.reject("iterations", n, rule, way_out)
    matrix = np.asarray(strategy.materialize(n))
    check_triangular(matrix)
    return matrix.T @ matrix


def _up(value: float, n: int) -> float:
    """``value`` raised by the rounding error of a sum of n terms: never less private."""
    _check.scale_of_c(value)
    return value * (1 + 4 * n * float(np.finfo(np.float64).eps))


def _best_prefix(weights: np.ndarray, separation: int, participations: int) -> list[np.ndarray]:
    """best[c][row, t] = largest weight of <= c indices among 0..t-1, >= ``separation`` apart.

    For c = 0..``participations``; ``weights``: shape (rows, n), >= 0.
    """
    rows, n = weights.shape
    tables = [np.zeros((rows, n + 1))]
    for _ in range(participations):
        previous = tables[-1]
        earlier = np.zeros((rows, n))
        if separation < n:
            earlier[:, separation:] = previous[:, 1 : n - separation + 1]
        with_this = weights + earlier
        current = np.zeros((rows, n + 1))
        current[:, 1:] = np.maximum.accumulate(with_this, axis=1)
        tables.append(np.maximum(current, previous))
    return tables


def _best_through(products: np.ndarray, separation: int, participations: int) -> np.ndarray:
    """u_i: largest Σ_{j in π} products[i, j] over patterns π that contain i, shape (n,)."""
    n = len(products)
    result = np.zeros(n)
    block = max(1, 2**22 // (n * participations))
    for start in range(0, n, block):
        rows = np.arange(start, min(start + block, n))
        prefixes = _best_prefix(products[rows], separation, participations - 1)
        suffixes = _best_prefix(products[rows][:, ::-1], separation, participations - 1)
        starts = np.maximum(rows - separation + 1, 0)
        stops = np.maximum(n - rows - separation, 0)
        pick = np.arange(len(rows))
        options = [
            prefixes[c][pick, starts] + suffixes[participations - 1 - c][pick, stops]
            for c in range(participations)
        ]
        result[rows] = products[rows, rows] + np.max(options, axis=0)
    return result
