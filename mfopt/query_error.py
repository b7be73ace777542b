"""Error of the mechanism that adds C⁻¹z: what A C⁻¹ does to the noise.

The t-th query of A has noise of standard deviation σ·sqrt(row_variances[t]) in each coordinate,
in units of the clip norm. Everything here is differentiable in the strategy's parameters.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from mfopt import time_scaled_error
from mfopt._runtime import _check, _sizes
from mfopt._runtime._float64 import compiled, float64
from mfopt.strategies import (
    Array,
    Banded,
    Buffered,
    Strategy,
    TimeScaled,
    ToeplitzStrategy,
    series,
)
from mfopt.strategies.prefix_recursion import prefix_row_variances
from mfopt.workloads import Workload

# Queries are taken in so many parts at most: value and gradient at n = 2,048 in half the time
_PARTS, _LEAST = 8, 128


def row_variances(workload: Workload, strategy: Strategy, n: int) -> Array:
    """Squared row norms of A C⁻¹, shape (n,): error variance per step at σ = 1.

    Toeplitz × Toeplitz costs O(n log n), momentum with a schedule × Toeplitz O(n²), prefix sums ×
    banded O(n·bands²), time-scaled what :mod:`mfopt.time_scaled_error` says; the rest is a dense
    triangular solve. A custom kind registers a faster way with
    :func:`variances`.
    """
    _check.kind("workload", workload, Workload)
    _check.kind("strategy", strategy, Strategy)
    from_numbers = _of_numbers(strategy, workload, _sizes.iterations(n))
    return _compiled(workload, strategy, n) if from_numbers is None else from_numbers


@np.errstate(all="ignore")  # what leaves double precision is seen in the numbers, as with JAX
def _of_numbers(strategy: Strategy, workload: Workload, n: int) -> np.ndarray | None:
    """:func:`row_variances` where NumPy has them of C's numbers, with nothing compiled for them."""
    if not strategy.of_numbers:
        return None
    method = variances.dispatch(type(strategy))  # a kind may have registered its own
    base = strategy.base if isinstance(strategy, TimeScaled) else strategy
    if method not in (_toeplitz, _time_scaled) or not isinstance(base, ToeplitzStrategy):
        return None
    if not partial_sums(workload, n):
        return None
    inverse = base.inverse_coefs(n)
    if isinstance(inverse, jax.Array):  # traced, with what is around this
        return None
    if not isinstance(strategy, TimeScaled):
        return np.cumsum(np.cumsum(inverse) ** 2)
    rows, columns = map(np.asarray, strategy.diagonals(n))
    result, total = np.empty(n), np.zeros(n)  # the latest query's share of each draw
    for t in range(n):
        total[: t + 1] += inverse[t::-1] / columns[t]
        result[t] = np.sum((total[: t + 1] / rows[: t + 1]) ** 2)
    return result


@compiled("workload", "n")
def _compiled(workload: Workload, strategy: Strategy, n: int) -> Array:
    return variances(strategy, workload, n)


@functools.singledispatch
def variances(strategy: Strategy, workload: Workload, n: int) -> Array:
    """:func:`row_variances` by the class of the strategy: :func:`dense` for any C.

    ``@query_error.variances.register`` adds a class and its subclasses. Differentiable in the
    strategy, which may be traced.
    """
    return dense(strategy, workload, n)


def dense(strategy: Strategy, workload: Workload, n: int) -> Array:
    """:func:`row_variances` from the dense C, in O(n³)."""
    _sizes.require("n", n, lambda n: 24.0 * n**2)
    query, matrix = jnp.asarray(workload.materialize(n)), jnp.asarray(strategy.materialize(n))
    size = max(_LEAST, -(-n // _PARTS))
    # no query knows of a later step: of C it needs the corner before its end
    ends = [min(start + size, n) for start in range(0, n, size)]
    parts = [
        solve_triangular(matrix[:end, :end], rows[:, :end].T, lower=True, trans=1)
        for end, rows in zip(ends, jnp.split(query, ends[:-1]), strict=True)
    ]
    return jnp.concatenate([jnp.sum(part**2, axis=0) for part in parts])


@variances.register
def _toeplitz(strategy: ToeplitzStrategy, workload: Workload, n: int) -> Array:
    inverse = jnp.asarray(strategy.inverse_coefs(n))
    if (running := workload.recurrence(n)) is not None:
        rates, momentum = running
        if np.ptp(rates) > 0:
            ones = jnp.ones(n)
            return time_scaled_error.by_draws(inverse, ones, ones, jnp.asarray(rates), momentum)
        velocity = jnp.asarray(momentum ** jnp.arange(n))
        impulse = series.convolve(velocity, inverse) if momentum else inverse
        return jnp.cumsum((rates[0] * jnp.cumsum(impulse)) ** 2)
    if (coefs := workload.toeplitz_coefs(n)) is not None:
        return jnp.cumsum(series.convolve(jnp.asarray(coefs), inverse) ** 2)
    return dense(strategy, workload, n)


@variances.register
def _time_scaled(strategy: TimeScaled, workload: Workload, n: int) -> Array:
    recursive = time_scaled_error.row_variances(workload, strategy, n)
    return dense(strategy, workload, n) if recursive is None else recursive


@variances.register
def _buffered(strategy: Buffered, workload: Workload, n: int) -> Array:
    return _time_scaled(TimeScaled(strategy), workload, n)


@variances.register
def _banded(strategy: Banded, workload: Workload, n: int) -> Array:
    # the recursion on covariances is sequential: it pays while its blocks are small
    if partial_sums(workload, n) and strategy.bands < n // 2:
        return prefix_row_variances(jnp.asarray(strategy.entries(n)))
    return dense(strategy, workload, n)


def rmse(
    workload: Workload, strategy: Strategy, n: int, noise_multiplier: Array | float = 1.0
) -> Array:
    """Root mean squared error over the n queries: σ·‖A C⁻¹‖_F/√n, per coordinate, in clip norms.

    Args:
      workload: A.
      strategy: kind of C.
      n: iterations.
      noise_multiplier: σ relative to the clip norm, for C as stored.

    Raises:
      UsageError: it is differentiated in JAX without float64.

    >>> from mfopt import strategies, workloads
    >>> found = rmse(workloads.PrefixSums(), strategies.Identity(), 3, noise_multiplier=2.0)
    >>> round(float(found), 6)  # 2 √((1 + 2 + 3)/3)
    2.828427
    """
    if jnp.result_type(float) != np.float64 and any(
        hasattr(leaf, "primal") for leaf in jax.tree.leaves((strategy, noise_multiplier))
    ):  # the way back runs outside of this function, in the width of the host program
        rule = "is differentiated, and JAX has no float64"
        way_out = "Differentiate inside `with jax.enable_x64(True):`."
        raise _check.reject("strategy", None, rule, way_out)
    return _rmse(workload, strategy, n, noise_multiplier)


@float64
def _rmse(workload: Workload, strategy: Strategy, n: int, noise_multiplier: Array | float) -> Array:
    variances = row_variances(workload, strategy, n)
    # the same program as whoever asks for the variances themselves: not a second one around it
    numbers = jnp if isinstance(variances, jax.Array) else np
    return noise_multiplier * numbers.sqrt(numbers.mean(variances))


@compiled("workload", "n")
def max_error(
    workload: Workload, strategy: Strategy, n: int, noise_multiplier: Array | float = 1.0
) -> Array:
    """Largest standard deviation of any query: σ·max_t sqrt(row_variances[t]), in clip norms.

    Args:
      workload: A.
      strategy: kind of C.
      n: iterations.
      noise_multiplier: σ relative to the clip norm, for C as stored.
    """
    return noise_multiplier * jnp.sqrt(jnp.max(jnp.asarray(row_variances(workload, strategy, n))))


def partial_sums(workload: Workload, n: int) -> bool:
    """Return True if A computes prefix sums, whatever its name."""
    running = workload.recurrence(n)
    return running is not None and running[1] == 0 and bool(np.all(running[0] == 1))
