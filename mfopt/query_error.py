"""Error of the mechanism that adds C⁻¹z: what A C⁻¹ does to the noise.

The t-th query of A has noise of standard deviation σ·sqrt(row_variances[t]) in each coordinate,
in units of the clip norm. Everything here is differentiable in the strategy's parameters.

A time-scaled Toeplitz C = diag(r) B diag(d) needs no n×n solve: the noise w = C⁻¹z is B⁻¹ with
draws divided by r and outputs divided by d. Prefix sums and momentum under a learning-rate schedule
η read it through two running numbers,

    m_t = β m_{t-1} + w_t,    y_t = y_{t-1} + η_t m_t    (prefix sums: β = 0, η = 1),

so the variance of y_t follows from how these numbers vary together with the state of B⁻¹. For a
BLT that state is one number a buffer, and every covariance obeys z_t = a z_{t-1} + x_t with a
constant a: all of them cost O(n · buffers²). For any other B all draws are followed at once, in
O(n²) time: the draw of step s reaches w_t as g_{t-s} / (r_s d_t), with g the coefficients of B⁻¹.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from mfopt._runtime import _check, _sizes
from mfopt._runtime._float64 import compiled, float64
from mfopt._runtime._types import PyTree
from mfopt.strategies import (
    BLT,
    Array,
    Banded,
    Buffered,
    Strategy,
    TimeScaled,
    ToeplitzStrategy,
    WaveBLT,
    series,
)
from mfopt.strategies.prefix_recursion import prefix_row_variances
from mfopt.workloads import Workload

# Queries are taken in so many parts at most: value and gradient at n = 2,048 in half the time
_PARTS, _LEAST = 8, 128
_SEGMENT = 64  # steps whose numbers the backward pass of a time-scaled C holds at once


def row_variances(workload: Workload, strategy: Strategy, n: int) -> Array:
    """Squared row norms of A C⁻¹, shape (n,): error variance per step at σ = 1.

    Toeplitz × Toeplitz costs O(n log n), momentum with a schedule × Toeplitz O(n²), prefix sums ×
    banded O(n·bands²), time-scaled O(n·buffers²) or O(n²); the rest is a dense triangular solve.
    A custom kind registers a faster way with :func:`variances`.
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
            return _by_draws(inverse, ones, ones, jnp.asarray(rates), momentum)
        velocity = jnp.asarray(momentum ** jnp.arange(n))
        impulse = series.convolve(velocity, inverse) if momentum else inverse
        return jnp.cumsum((rates[0] * jnp.cumsum(impulse)) ** 2)
    if (coefs := workload.toeplitz_coefs(n)) is not None:
        return jnp.cumsum(series.convolve(jnp.asarray(coefs), inverse) ** 2)
    return dense(strategy, workload, n)


@variances.register
def _time_scaled(strategy: TimeScaled, workload: Workload, n: int) -> Array:
    recursive = None
    if (running := workload.recurrence(n)) is not None:
        rates, momentum = running
        rows, columns = map(jnp.asarray, strategy.diagonals(n))
        recursive = _scaled(strategy.base, rows, columns, jnp.asarray(rates), momentum)
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


@functools.singledispatch
def _scaled(
    base: Strategy, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array | None:
    """Var y_t by the class of the base; None where no short way is known.

    Args:
      base: B.
      rows: r, shape (n,).
      columns: d, shape (n,).
      rates: η, shape (n,).
      momentum: β.
    """
    return None


@_scaled.register
def _scaled_toeplitz(
    base: ToeplitzStrategy, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    inverse = jnp.asarray(base.inverse_coefs(len(rows)))
    return _by_draws(inverse, rows, columns, rates, momentum)


def _by_draws(
    inverse: jax.Array, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t for any Toeplitz B, shape (n,), by m_t and y_t of each draw.

    Args:
      inverse: g, the first column of B⁻¹, shape (n,).
      rows, columns, rates, momentum: as for :func:`_scaled`.
    """
    n = len(inverse)
    fresh = 1 / rows**2
    padding = -n % _SEGMENT
    series = (jnp.pad(x, (0, padding)) for x in (inverse, 1 / columns, rates))

    def step(
        state: tuple[jax.Array, ...], factors: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        reach, velocity, total = state  # of draws 0, 1, …: g_{t-s}, m_t and y_t
        coefficient, output_scale, rate = factors
        reach = jnp.concatenate([coefficient[None], reach[:-1]])
        velocity = momentum * velocity + output_scale * reach
        total = total + rate * velocity
        return (reach, velocity, total), fresh @ total**2

    @jax.checkpoint  # the backward pass makes the numbers of a segment again
    def segment(state: tuple[jax.Array, ...], factors: tuple[jax.Array, ...]) -> PyTree:
        return jax.lax.scan(step, state, factors)

    segments = tuple(x.reshape(-1, _SEGMENT) for x in series)
    variances: jax.Array = jax.lax.scan(segment, (jnp.zeros(n),) * 3, segments)[1]
    return variances.reshape(-1)[:n]


@_scaled.register
def _by_covariances(
    base: BLT, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t for a BLT: u_t = z_t / r_t, s_{t+1} = λ̂ s_t + u_t, w_t = (u_t + ω̂·s_t)/(g d_t)."""
    if type(base) is not BLT:  # a subclass may have another C
        return _scaled_toeplitz(base, rows, columns, rates, momentum)
    read, decay = base.inverse()
    fresh, output_scale = 1 / rows**2, 1 / (jnp.asarray(base.gain) * columns)
    buffers = len(read)

    def lasting(decay: jax.Array, x: jax.Array) -> jax.Array:
        return _filter(decay, x) if momentum else x  # without momentum only the latest counts

    # all pairs of buffers at once: Cov(s_t), then its product with ω̂, and Var(u_t + ω̂·s_t)
    pairs = (decay[:, None] * decay[None, :]).reshape(-1)
    state = _before(_filter(pairs, jnp.broadcast_to(fresh[:, None], (len(fresh), buffers**2))))
    state_read = state.reshape(-1, buffers, buffers) @ read
    power = (fresh + state_read @ read) * output_scale**2  # Var w_t
    entered = fresh * output_scale
    with_noise = decay * state_read * output_scale[:, None] + entered[:, None]  # Cov(s_{t+1}, w_t)

    with_velocity = lasting(momentum * decay, with_noise)  # Cov(s_{t+1}, m_t)
    ahead = _before(with_velocity) @ read * output_scale  # Cov(m_{t-1}, w_t)
    velocity = lasting(jnp.full(1, momentum**2), (power + 2 * momentum * ahead)[:, None])[:, 0]
    with_sum = _filter(decay, rates[:, None] * with_velocity)  # Cov(s_{t+1}, y_t)
    entering = _before(with_sum) @ read * output_scale  # Cov(y_{t-1}, w_t)
    gained = rates * velocity
    with_total = lasting(jnp.full(1, momentum), (entering + gained)[:, None])[:, 0]  # Cov(m_t, y_t)
    return jnp.cumsum(rates * (2 * with_total - gained))


@_scaled.register(Buffered)
@_scaled.register(WaveBLT)
def _by_state(
    base: Buffered | WaveBLT, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t where the state of B⁻¹ moves otherwise at each step, shape (n,): O(n · buffers³).

    The state (s, m, y) is one vector x_{t+1} = A_t x_t + b_t u_t, and its covariance is carried on.
    """
    if isinstance(base, WaveBLT) and type(base) is not WaveBLT:  # it may have another C
        return _scaled_toeplitz(base, rows, columns, rates, momentum)
    read, decay, feed = (jnp.asarray(table) for table in base.tables(len(rows)))
    buffers = read.shape[1]
    gain = 1 / jnp.asarray(base.gain)

    def step(
        covariance: jax.Array, coefficients: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        read, decay, feed, output_scale, fresh, rate = coefficients
        velocity = jnp.concatenate([-read * output_scale, jnp.array([momentum, 0.0])])
        inside = jnp.pad(jnp.diag(decay) - jnp.outer(feed, read), ((0, 0), (0, 2)))
        total = (rate * velocity).at[buffers + 1].add(1)
        matrix = jnp.concatenate([inside, velocity[None], total[None]])
        entering = gain * jnp.concatenate([feed, jnp.stack([output_scale, rate * output_scale])])
        # sums of products become one loop; of matrices as small as these a product is a call
        half = jnp.sum(matrix[:, :, None] * covariance, axis=1)
        moved = jnp.sum(half[:, None, :] * matrix, axis=2)
        new = moved + fresh * jnp.outer(entering, entering)
        return new, new[-1, -1]

    series = (read, decay, feed, 1 / columns, 1 / rows**2, rates)
    return jax.lax.scan(step, jnp.zeros((buffers + 2, buffers + 2)), series)[1]


def _filter(decay: jax.Array, x: jax.Array) -> jax.Array:
    """z_t = decay·z_{t-1} + x_t by column: ``decay`` (k,), ``x`` (n, k) -> (n, k).

    A loop: on a CPU it is faster than a convolution by FFT, whose rounding would also drown small
    numbers among large ones.
    """

    def step(state: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = decay * state + entering
        return new, new

    return jax.lax.scan(step, jnp.zeros(x.shape[1]), x)[1]


def _before(x: jax.Array) -> jax.Array:
    """x one step later, 0 at the first."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


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
