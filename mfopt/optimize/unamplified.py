"""C optimized for fixed participation, without amplification: the literature's baselines.

A unit takes part once an epoch, in the same iteration of each (:class:`FixedOrder`). The
sensitivity is then a norm of columns of C, so ‖A C⁻¹‖_F of prefix sums A is minimized over C whose
sensitivity is 1. Every kind keeps that constraint by its parameterization:

- "banded" (Choquette-Choo et al. 2023): columns of one norm, or modes of norm 1 where more bands
  than separation make a unit's columns overlap. With columns of one norm the problem is convex
  in CᵀC, and C is a smooth function of CᵀC, so there is no second optimum to stall in: only
  slow convergence.
- "banded-toeplitz": free coefficients, divided by their largest mode norm; "blt": ω and λ free, the
  same division (Dvijotham et al. 2024, for several participations McMahan and Xiao et al. 2024).
- "dense": the multi-epoch optimum, convex in X = CᵀC (Choquette-Choo et al. 2022), where the
  columns of one unit are orthogonal.

The value is RMSE at sensitivity 1: multiply by the Gaussian mechanism's σ for (ε, δ).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from threadpoolctl import threadpool_limits

from mfopt import query_error
from mfopt._runtime import _check, _quick
from mfopt._runtime._float64 import float64
from mfopt.accounting import unamplified as sensitivities
from mfopt.optimize import parameterization, starts
from mfopt.optimize.fixed_bands import FixedBands
from mfopt.optimize.objective import Evaluation
from mfopt.optimize.optimizers import Trace, descend
from mfopt.sampling import FixedOrder
from mfopt.strategies import BLT, Banded, BandedToeplitz, Dense, Strategy
from mfopt.strategies.fixed import square_root_coefs
from mfopt.workloads import PrefixSums

KINDS = ("banded", "banded-toeplitz", "blt", "dense")
_STEPS = 1000
_TOLERANCE = 1e-8  # relative decrease of the loss in a step at which the search ends
_ROUGH = 1e-5  # the same, of where the search of a banded C begins
_FLOOR = 1e-8


class UnamplifiedOptimum(NamedTuple):
    """An optimized C without amplification.

    Attributes:
      strategy: C, scaled so that its sensitivity is 1.
      sensitivity: as recomputed by :mod:`mfopt.accounting.unamplified`.
      rmse: sensitivity · ‖A C⁻¹‖_F/√n: RMSE per unit of (noise over sensitivity).
      trace: history and the reason for stopping.
    """

    strategy: Strategy
    sensitivity: float
    rmse: float
    trace: Trace


@float64
def optimize(
    scheme: FixedOrder,
    *,
    strategy: str = "banded",
    bands: int = 16,
    buffers: int = 4,
    init: Strategy | None = None,
    equal_columns: bool = True,
    steps: int = _STEPS,
    tolerance: float = _TOLERANCE,
) -> UnamplifiedOptimum:
    """Return the C with the smallest sensitivity · ‖A C⁻¹‖_F under ``scheme``.

    Args:
      scheme: participation; its sensitivity is what is normalized.
      strategy: one of :data:`KINDS`.
      bands: of the banded kinds.
      buffers: of a BLT.
      init: what a dense C starts from; by default the identity.
      equal_columns: give all columns of a banded or dense C one norm, as cyclic Poisson sampling
        needs; False lets the epochs share a unit's budget unequally, for a lower error.
      steps: evaluations at most.
      tolerance: relative decrease of the loss in a step at which the search ends.

    Raises:
      UsageError: unknown kind, or a start without a smooth way from it.
    """
    _check.kind("scheme", scheme, FixedOrder)
    _check.choice("strategy", strategy, KINDS)
    n = scheme.iterations
    bands = min(_check.integer("bands", bands), n)
    trace = Trace()
    found: Strategy
    if strategy == "dense":
        found = _dense(scheme, init, equal_columns, steps, tolerance, trace)
    elif strategy == "banded":
        found = _banded(scheme, bands, equal_columns, steps, tolerance, trace)
    else:
        build, start = _blt(scheme, buffers) if strategy == "blt" else _toeplitz(scheme, bands)
        loss = _quick.jit(
            jax.value_and_grad(lambda x: jnp.log(query_error.rmse(PrefixSums(), build(x), n)))
        )

        def evaluate(x: np.ndarray) -> Evaluation:
            value, gradient = loss(jnp.asarray(x))
            return Evaluation(float(value), np.asarray(gradient), math.nan)

        best = _descend(evaluate, start, steps, tolerance, trace)
        found = jax.tree.map(lambda leaf: np.asarray(leaf), build(jnp.asarray(best)))
    value = sensitivities.sensitivity(found, scheme).value
    plain = float(query_error.rmse(PrefixSums(), found, n))
    return UnamplifiedOptimum(found, value, value * plain, trace)


def _descend(
    evaluate: Callable[[np.ndarray], Evaluation],
    start: np.ndarray,
    steps: int,
    tolerance: float,
    trace: Trace,
    lowest: np.ndarray | None = None,
) -> np.ndarray:
    """L-BFGS-B with x >= ``lowest``: the loss is deterministic, nothing is placed again."""
    # vectors gain nothing from threads of BLAS, whose waiting costs more than the work
    with threadpool_limits(1, user_api="blas"):
        why = descend(evaluate, start, trace, steps=steps, tolerance=tolerance, lowest=lowest)
    trace.status = f"L-BFGS: {why}"
    return start if trace.best is None else trace.best


def _banded(
    scheme: FixedOrder,
    bands: int,
    equal_columns: bool,
    steps: int,
    tolerance: float,
    trace: Trace,
) -> Banded:
    """The entries themselves, bounded below.

    Entries >= 0 is what balls-in-bins needs; no bound was seen active at an optimum. Their
    logarithms would need no bound but converge three times slower.
    """
    n = scheme.iterations
    shape = FixedBands(bands, n, scheme.bins, scheme.epochs, equal_columns)
    # equal entries in each row are a few percent off, and cost next to nothing
    start = _constant(dataclasses.replace(shape, equal=True), square_root_coefs(bands))
    if not equal_columns:
        # the optimum of a diagonal C: errors of early steps stay in more prefix sums
        start = start * np.arange(n, 0, -1) ** 0.25
    lowest = np.zeros((bands, n))
    lowest[0] = _FLOOR
    bounds = np.concatenate([np.full(shape.shares, -np.inf), lowest.ravel()])
    first = np.maximum(shape.parameters(start), bounds)
    return Banded(shape.build(_descend(shape, first, steps, tolerance, trace, bounds)))


def _constant(shape: FixedBands, coefs: np.ndarray) -> np.ndarray:
    """Entries of the best C with equal entries along each of its rows."""

    def evaluate(x: np.ndarray) -> Evaluation:
        at = shape(np.repeat(x, shape.n))
        return at._replace(gradient=at.gradient.reshape(len(x), -1).sum(axis=1))

    lowest = np.where(np.arange(len(coefs)) == 0, _FLOOR, 0.0)
    best = _descend(evaluate, coefs, _STEPS, _ROUGH, Trace(), lowest)
    return np.tile(best[:, None], shape.n)


def _toeplitz(scheme: FixedOrder, bands: int) -> tuple[Callable[[jax.Array], Strategy], np.ndarray]:
    """Ratios of neighbouring coefficients in (0, 1): non-negative and decreasing by construction.

    The earliest and densest participation is then the worst one (Kalinin and Lampert 2024), a
    smooth function of the coefficients. The search begins at those of the square root.
    """
    coefs = square_root_coefs(bands)
    ratios = coefs[1:] / coefs[:-1]

    def build(x: jax.Array) -> Strategy:
        logs = jnp.cumsum(jax.nn.log_sigmoid(x))
        unscaled = jnp.concatenate([jnp.ones(1), jnp.exp(logs)])
        column = jnp.pad(unscaled, (0, scheme.iterations - bands))
        return BandedToeplitz(unscaled / _worst_norm(column, scheme))

    return build, np.log(ratios) - np.log1p(-ratios)


def _blt(scheme: FixedOrder, buffers: int) -> tuple[Callable[[jax.Array], Strategy], np.ndarray]:
    """log ω and the logit of λ; coefficients decrease where Σω <= 1, as at every optimum seen."""
    n = scheme.iterations
    inside = parameterization.blt(starts.spread_blts(buffers, scheme.bins)[0], n)

    def build(x: jax.Array) -> Strategy:
        unscaled: Any = inside.build(x)
        column = jnp.asarray(unscaled.toeplitz_coefs(n))
        return BLT(unscaled.scale, unscaled.decay, unscaled.gain / _worst_norm(column, scheme))

    return build, inside.start


def _worst_norm(column: jax.Array, scheme: FixedOrder) -> jax.Array:
    """Norm of C x for the earliest participation, of the first column (n,) of a Toeplitz C."""
    shifts = range(0, scheme.iterations, scheme.bins)
    worst = sum(jnp.pad(column[: scheme.iterations - i], (i, 0)) for i in shifts)
    return jnp.asarray(jnp.linalg.norm(jnp.asarray(worst)))


def _dense(
    scheme: FixedOrder,
    init: Strategy | None,
    equal_columns: bool,
    steps: int,
    tolerance: float,
    trace: Trace,
) -> Dense:
    """Minimize tr(AᵀA X⁻¹) over positive definite X with X[i, j] = 0 for one unit's pairs.

    With orthogonal columns the sensitivity² is the sum of a unit's diagonal entries, which is
    kept at 1: the constraints are linear and the problem is convex, so its optimum is global.
    """
    bins, epochs, n = scheme.bins, scheme.epochs, scheme.iterations
    lag = np.subtract.outer(np.arange(n), np.arange(n))
    free = np.flatnonzero(((lag > 0) & (lag % bins != 0)).ravel())

    def matrix(x: np.ndarray) -> np.ndarray:
        entries = np.zeros(n * n)
        entries[free] = x[n:]
        lower = entries.reshape(n, n)
        share = np.zeros(n)
        if not equal_columns:
            by_class = x[:n].reshape(epochs, bins)
            share = (by_class - by_class.mean(axis=0)).ravel()
        # units of x: entries of X for columns of norm 1
        return lower + lower.T + np.diag(1 + share)

    def evaluate(x: np.ndarray) -> Evaluation:
        try:
            factor = scipy.linalg.cholesky(matrix(x), lower=True, check_finite=False)
        except np.linalg.LinAlgError:
            return Evaluation(math.inf, np.zeros_like(x), math.nan)
        inverse, _ = scipy.linalg.lapack.dpotri(factor, lower=1)
        inverse = np.tril(inverse) + np.tril(inverse, -1).T
        through = np.cumsum(inverse, axis=0)
        # trace of A X⁻¹ Aᵀ
        total = float(np.sum(np.tril(through)))
        full = -(through.T @ through) / (2 * total)
        diagonal = np.zeros(n)
        if not equal_columns:
            by_class = np.diagonal(full).reshape(epochs, bins)
            diagonal = (by_class - by_class.mean(axis=0)).ravel()
        gradient = np.concatenate([diagonal, 2 * full.ravel()[free]])
        return Evaluation(math.log(total * epochs / n) / 2, gradient, math.nan)

    start = np.zeros(n + len(free))
    if init is not None:
        columns = np.asarray(init.materialize(n))
        columns = columns / np.linalg.norm(columns, axis=0)
        products = columns.T @ columns
        start[n:] = products.ravel()[free]
        if not math.isfinite(evaluate(start).value):
            rule = "a unit's columns are not nearly orthogonal"
            way_out = f"Use one with at most {bins} bands."
            raise _check.reject("init", init.kind, rule, way_out)
    x = _descend(evaluate, start, steps, tolerance, trace)
    # CᵀC = X with C lower triangular: a Cholesky factorization from the last row up
    flipped = np.linalg.cholesky(matrix(x)[::-1, ::-1] / epochs)
    return Dense(np.ascontiguousarray(np.tril(flipped.T[::-1, ::-1])))
