"""C optimized where σ is a norm of C times a number: fixed participation, and cyclic Poisson.

Iterations of one unit are at least so far apart and at most so many (:class:`Participation`). The
sensitivity is then a norm of columns of C, so an error of (C, 1) is minimized over C whose
sensitivity is 1. Under cyclic Poisson sampling σ is proportional to the largest column norm, so
that one participation counts there. Every kind keeps the constraint by its parameterization:

- "banded" (Choquette-Choo et al. 2023): columns of one norm, or modes of norm 1 where more bands
  than separation make a unit's columns overlap. With columns of one norm the problem is convex
  in CᵀC, and C is a smooth function of CᵀC, so there is no second optimum to stall in: only
  slow convergence.
- "banded-toeplitz" and "toeplitz": coefficients that do not increase, divided by the norm of the
  earliest and densest participation; "blt": ω and λ free, the same division (Dvijotham et al. 2024,
  for several participations McMahan and Xiao et al. 2024).
- "dense": the multi-epoch optimum, convex in X = CᵀC (Choquette-Choo et al. 2022), where the
  columns of one unit are orthogonal.

The error is that of (C, σ) with σ at sensitivity 1: it grows with σ, and its optimum does not move.
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

from mfopt._runtime import _check, _quick
from mfopt._runtime._float64 import float64
from mfopt.accounting import unamplified as sensitivities
from mfopt.optimize import parameterization, starts
from mfopt.optimize.defaults import BANDS, BUFFERS
from mfopt.optimize.objective import Evaluation, Loss, log_rmse
from mfopt.optimize.optimizers import Descent, Evaluator, Trace, descend
from mfopt.optimize.question import Form, Search
from mfopt.sampling import CyclicPoisson, FixedOrder, MinSeparation, Scheme
from mfopt.strategies import BLT, Banded, BandedToeplitz, Dense, SquareRoot, Strategy, Toeplitz
from mfopt.workloads import PrefixSums

KINDS = ("banded", "banded-toeplitz", "blt", "dense", "toeplitz")
_STEPS = 1000
_TOLERANCE = 1e-8  # relative decrease of the loss in a step at which the search ends
_FLOOR = 1e-8


class Participation(NamedTuple):
    """Iterations in which one unit may take part.

    Attributes:
      iterations: n.
      separation: between two of a unit at least.
      largest_count: of a unit at most.
      periodic: whether a unit takes part in all iterations of one class modulo ``separation``, so
        that each class has its own budget.
    """

    iterations: int
    separation: int
    largest_count: int
    periodic: bool = False

    @classmethod
    def of_scheme(cls, scheme: Scheme) -> Participation:
        """Participation under a scheme whose σ is a norm of C times a number.

        Raises:
          UsageError: no such scheme.
        """
        # by exact class: a subclass may let units take part otherwise
        if type(scheme) not in _PARTICIPATIONS:
            rule = "must be FixedOrder, MinSeparation or CyclicPoisson"
            raise _check.reject("scheme", type(scheme).__name__, rule)
        return cls(scheme.iterations, *_PARTICIPATIONS[type(scheme)](scheme))

    def norm(self, strategy: Strategy, scheme: Scheme) -> float:
        """Sensitivity of C, or its largest column norm: σ is proportional to it."""
        if scheme.bands_are_groups:
            return float(np.max(sensitivities.column_norms(strategy, self.iterations)))
        return sensitivities.sensitivity(strategy, scheme).value


# separation, participations of a unit at most, whether classes have a budget each
_PARTICIPATIONS: dict[type[Scheme], Callable[[Any], tuple[int, int, bool]]] = {
    FixedOrder: lambda scheme: (scheme.bins, scheme.epochs, True),
    MinSeparation: lambda scheme: (scheme.separation, scheme.participations, False),
    # each iteration is accounted for by its column
    CyclicPoisson: lambda scheme: (scheme.bands, 1, False),
}


class _UnamplifiedOptimum(NamedTuple):
    """An optimized C.

    Attributes:
      strategy: C, scaled so that its sensitivity is 1.
      sensitivity: as recomputed by :mod:`mfopt.accounting.unamplified`; under cyclic Poisson
        sampling the largest column norm.
      trace: history and the reason for stopping.
    """

    strategy: Strategy
    sensitivity: float
    trace: Trace


@float64
def optimize(
    scheme: Scheme,
    form: Form,
    *,
    loss: Loss | None = None,
    search: Search = Search(),  # noqa: B008 - frozen
    equal_columns: bool = True,
    trace: Trace | None = None,
) -> _UnamplifiedOptimum:
    """Return the C of sensitivity 1 with the lowest error under ``scheme``.

    Args:
      scheme: :class:`FixedOrder`, :class:`MinSeparation` or :class:`CyclicPoisson`.
      form: one of :data:`KINDS`, by default 16 bands or 4 buffers.
      loss: of (C, 1), which is minimized; log RMSE of prefix sums if left out.
      search: evaluations at most, the relative decrease of the loss in a step at which it ends, and
        what a dense C starts from, by default the identity.
      equal_columns: give all columns of a banded or dense C one norm, as all schemes but a fixed
        order need; False lets the epochs share a unit's budget unequally, for a lower error.
      trace: record of the evaluations.

    Raises:
      UsageError: unknown kind or scheme, more bands than a scheme permits, an error that a kind is
        not optimized for, or a start without a smooth way from it.
    """
    participation = Participation.of_scheme(scheme)
    (strategy,) = form.strategy or ("",)
    _check.choice("strategy", strategy, KINDS)
    n = participation.iterations
    bands = n if strategy == "toeplitz" else min(form.bands or BANDS, n)
    buffers = min(BUFFERS, n) if form.buffers is None else form.buffers
    trace = Trace() if trace is None else trace
    descent = Descent(trace, search.steps or _STEPS, search.tolerance or _TOLERANCE)
    plain = loss is None or loss == log_rmse(PrefixSums(), n)
    minimized = log_rmse(PrefixSums(), n) if loss is None else loss
    optimum: Strategy
    if strategy == "dense":
        _require_dense(scheme, plain)
        optimum = _dense(participation, search, equal_columns, descent)
    elif strategy == "banded":
        optimum = _banded(minimized, participation, bands, equal_columns, descent)
    else:
        build, start = (
            _blt(participation, buffers)
            if strategy == "blt"
            else _toeplitz(
                participation, bands, Toeplitz if strategy == "toeplitz" else BandedToeplitz
            )
        )
        best = _descend(_traced(minimized, build), start, descent)
        optimum = jax.tree.map(lambda leaf: np.asarray(leaf), build(jnp.asarray(best)))
    return _UnamplifiedOptimum(optimum, participation.norm(optimum, scheme), trace)


def _require_dense(scheme: Scheme, plain: bool) -> None:
    """Refuse a dense C where its problem is not convex, or not known."""
    if not Participation.of_scheme(scheme).periodic:
        rule = f"is not optimized under {scheme.kind}"
        raise _check.reject("strategy", "dense", rule, "Use banded or toeplitz, or a fixed order.")
    if not plain:
        rule = "is optimized for the RMSE of prefix sums in a fixed order"
        raise _check.reject("strategy", "dense", rule, "Use `objective=rmse`, or banded.")


def _traced(loss: Loss, build: parameterization.Build) -> Evaluator:
    """The loss of (C, 1) at parameters, with its gradient."""
    compiled = _quick.jit(jax.value_and_grad(lambda x: loss(build(x), 1.0)))

    def evaluate(x: np.ndarray) -> Evaluation:
        value, gradient = compiled(jnp.asarray(x))
        return Evaluation(float(value), np.asarray(gradient), 1.0)

    return evaluate


def _descend(
    evaluate: Evaluator,
    start: np.ndarray,
    descent: Descent,
    lowest: np.ndarray | None = None,
) -> np.ndarray:
    """L-BFGS-B with x >= ``lowest``: the loss is deterministic, nothing is placed again."""
    # vectors gain nothing from threads of BLAS, whose waiting costs more than the work
    with threadpool_limits(1, user_api="blas"):
        why = descend(evaluate, start, descent, lowest=lowest)
    descent.trace.status = f"L-BFGS: {why}"
    return start if descent.trace.best is None else descent.trace.best


@dataclasses.dataclass(frozen=True)
class FixedBands:
    """Entries of a banded C from parameters: raw entries, scaled to the norms that are due.

    Where columns may differ, a unit's shares of its budget are a softmax of numbers of their own,
    which come first: half as many steps as with entries alone.

    Attributes:
      bands, n: shape of C.
      separation, participations: distance of a unit's iterations, and their number.
      equal: whether all columns have one norm.
    """

    bands: int
    n: int
    separation: int
    participations: int
    equal: bool

    @property
    def overlapping(self) -> bool:
        """True if columns of one unit overlap; its modes are then normalized to norm 1."""
        return self.bands > self.separation

    @property
    def shares(self) -> int:
        """Number of parameters that are shares of a unit's budget."""
        return 0 if self.equal or self.overlapping else self.n

    def parameters(self, entries: np.ndarray) -> np.ndarray:
        """Parameters of the C with these entries, of shape (bands, n)."""
        norms = np.linalg.norm(entries, axis=0)
        return np.concatenate([2 * np.log(norms[: self.shares]), (entries / norms).ravel()])

    def build(self, x: jax.Array) -> jax.Array:
        """Entries of C, shape (bands, n); differentiable."""
        row = np.arange(self.bands)[:, None] + np.arange(self.n)
        raw = jnp.where(row < self.n, x[self.shares :].reshape(self.bands, self.n), 0)
        if self.overlapping:
            position = row * self.separation + np.arange(self.n) % self.separation
            modes = jnp.zeros(int(position.max()) + 1).at[position.ravel()].add(raw.ravel())
            modes = jnp.pad(modes, (0, -len(modes) % self.separation))
            squares = jnp.sum(modes.reshape(-1, self.separation) ** 2, axis=0)
            return raw / jnp.sqrt(jnp.tile(squares, self.participations))
        target = jnp.full(self.n, 1 / self.participations)
        if not self.equal:  # columns that do not overlap are orthogonal: squared norms add up
            logits = x[: self.n].reshape(self.participations, self.separation)
            target = jax.nn.softmax(logits, axis=0).reshape(-1)
        return raw * jnp.sqrt(target / jnp.sum(raw**2, axis=0))


def _banded(
    loss: Loss, participation: Participation, bands: int, equal_columns: bool, descent: Descent
) -> Banded:
    """The banded C of lowest loss: its parameters are the entries themselves, bounded below.

    Entries >= 0 is what balls-in-bins needs; no bound was seen active at an optimum. Their
    logarithms would need no bound but converge three times slower.
    """
    n, separation, participations, periodic = participation
    if not periodic and bands > separation:
        rule = f"must be at most {separation}, so that a unit's columns do not overlap"
        raise _check.reject("bands", bands, rule, "Use blt or toeplitz for a longer memory.")
    shape = FixedBands(bands, n, separation, participations, equal_columns or not periodic)
    entries = np.tile(SquareRoot().toeplitz_coefs(bands)[:, None], shape.n)
    if not shape.equal:
        # the optimum of a diagonal C: errors of early steps stay in more prefix sums
        entries = entries * np.arange(shape.n, 0, -1) ** 0.25
    lowest = np.zeros((shape.bands, shape.n))
    lowest[0] = _FLOOR
    bounds = np.concatenate([np.full(shape.shares, -np.inf), lowest.ravel()])
    start = np.maximum(shape.parameters(entries), bounds)

    def build(x: jax.Array) -> Strategy:
        return Banded(shape.build(x))

    best = _descend(_traced(loss, build), start, descent, bounds)
    return Banded(np.asarray(shape.build(jnp.asarray(best))))


def _toeplitz(
    participation: Participation, bands: int, form: type[Toeplitz | BandedToeplitz]
) -> tuple[parameterization.Build, np.ndarray]:
    """Ratios of neighbouring coefficients in (0, 1): non-negative and decreasing by construction.

    The earliest and densest participation is then the worst one (Kalinin and Lampert 2024), a
    smooth function of the coefficients. The search begins at those of the square root.
    """
    coefs = SquareRoot().toeplitz_coefs(bands)
    ratios = coefs[1:] / coefs[:-1]

    def build(x: jax.Array) -> Strategy:
        logs = jnp.cumsum(jax.nn.log_sigmoid(x))
        unscaled = jnp.concatenate([jnp.ones(1), jnp.exp(logs)])
        column = jnp.pad(unscaled, (0, participation.iterations - bands))
        return form(unscaled / _worst_norm(column, participation))

    return build, np.log(ratios) - np.log1p(-ratios)


def _blt(participation: Participation, buffers: int) -> tuple[parameterization.Build, np.ndarray]:
    """log ω and the logit of λ; coefficients decrease where Σω <= 1, as at every optimum seen."""
    n = participation.iterations
    inside = parameterization.blt(starts.spread_blts(buffers, participation.separation)[0], n)

    def build(x: jax.Array) -> Strategy:
        unscaled: Any = inside.build(x)
        column = jnp.asarray(unscaled.toeplitz_coefs(n))
        return BLT(
            unscaled.scale, unscaled.decay, unscaled.gain / _worst_norm(column, participation)
        )

    return build, inside.start


def _worst_norm(column: jax.Array, participation: Participation) -> jax.Array:
    """Norm of C x for the earliest participation, of the first column (n,) of a Toeplitz C."""
    n, separation, participations, _ = participation
    shifts = range(0, n, separation)[:participations]
    worst = sum(jnp.pad(column[: n - i], (i, 0)) for i in shifts)
    return jnp.asarray(jnp.linalg.norm(jnp.asarray(worst)))


def _dense(
    participation: Participation, search: Search, equal_columns: bool, descent: Descent
) -> Dense:
    """Minimize tr(AᵀA X⁻¹) over positive definite X with X[i, j] = 0 for one unit's pairs.

    With orthogonal columns the sensitivity² is the sum of a unit's diagonal entries, which is
    kept at 1: the constraints are linear and the problem is convex, so its optimum is global.
    """
    n, bins, epochs, _ = participation
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
    for init in search.starts:
        columns = np.asarray(init.materialize(n))
        columns = columns / np.linalg.norm(columns, axis=0)
        products = columns.T @ columns
        start[n:] = products.ravel()[free]
        if not math.isfinite(evaluate(start).value):
            rule = "a unit's columns are not nearly orthogonal"
            way_out = f"Use one with at most {bins} bands."
            raise _check.reject("init", init.kind, rule, way_out)
    x = _descend(evaluate, start, descent)
    # CᵀC = X with C lower triangular: a Cholesky factorization from the last row up
    flipped = np.linalg.cholesky(matrix(x)[::-1, ::-1] / epochs)
    return Dense(np.ascontiguousarray(np.tril(flipped.T[::-1, ::-1])))
