"""Error of a time-scaled Toeplitz C = diag(r) B diag(d), without an n×n solve.

The noise w = C⁻¹z of such a C is B⁻¹ with draws divided by r and outputs divided by d. Prefix sums
and momentum under a learning-rate schedule η read it through two running numbers,

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

from mfopt._runtime._types import PyTree
from mfopt.strategies import BLT, Buffered, Strategy, TimeScaled, ToeplitzStrategy, WaveBLT
from mfopt.workloads import Workload

_SEGMENT = 64  # steps whose numbers the backward pass holds at once


def row_variances(workload: Workload, strategy: TimeScaled, n: int) -> jax.Array | None:
    """Squared row norms of A C⁻¹, shape (n,), or None where no short way is known.

    Short ways: workloads with a recurrence, for a Toeplitz base. Differentiable in the strategy;
    call it in a float64 scope.
    """
    if (running := workload.recurrence(n)) is None:
        return None
    rates, momentum = running
    rows, columns = map(jnp.asarray, strategy.diagonals(n))
    return through(strategy.base, rows, columns, jnp.asarray(rates), momentum)


@functools.singledispatch
def through(
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


@through.register
def _toeplitz(
    base: ToeplitzStrategy, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    inverse = jnp.asarray(base.inverse_coefs(len(rows)))
    return by_draws(inverse, rows, columns, rates, momentum)


def by_draws(
    inverse: jax.Array, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t for any Toeplitz B, shape (n,), by m_t and y_t of each draw.

    Args:
      inverse: g, the first column of B⁻¹, shape (n,).
      rows, columns, rates, momentum: as for :func:`through`.
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


@through.register
def _by_covariances(
    base: BLT, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t for a BLT: u_t = z_t / r_t, s_{t+1} = λ̂ s_t + u_t, w_t = (u_t + ω̂·s_t)/(g d_t)."""
    if type(base) is not BLT:  # a subclass may have another C
        return _toeplitz(base, rows, columns, rates, momentum)
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


@through.register(Buffered)
@through.register(WaveBLT)
def _by_state(
    base: Buffered | WaveBLT, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t where the state of B⁻¹ moves otherwise at each step, shape (n,): O(n · buffers³).

    The state (s, m, y) is one vector x_{t+1} = A_t x_t + b_t u_t, and its covariance is carried on.
    """
    if isinstance(base, WaveBLT) and type(base) is not WaveBLT:  # it may have another C
        return _toeplitz(base, rows, columns, rates, momentum)
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
