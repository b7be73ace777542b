"""Error of a time-scaled Toeplitz C, any B: all draws are followed at once from step to step.

The draw of step s reaches w_t as g_{t-s} / (r_s d_t), with g the coefficients of B⁻¹, and

    m_t = β m_{t-1} + g_{t-s} / d_t,    y_t = y_{t-1} + η_t m_t    (r_s divides the sum of squares)

for all s are two vectors that move with t: O(n²) time. Their derivative is written out here: JAX's
own takes four times as long at 4,096 steps, and with it the search of a C, which does little else.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

_SEGMENT = 64  # steps whose vectors the backward pass holds at once
_PARTS, _MANY = 4, 2048  # of the run, where it has so many steps: early ones have few draws


class _Steps(NamedTuple):
    """Per-step coefficients of the draws, padded to whole parts.

    Attributes:
      inverse: g, shape (n,).
      fresh: 1/r², shape (n,), 0 where padded.
      out: 1/d, shape (n,).
      rates: η, shape (n,).
    """

    inverse: jax.Array
    fresh: jax.Array
    out: jax.Array
    rates: jax.Array


class _Draws(NamedTuple):
    """m and y of draws 0, 1, …, each for a draw of variance 1."""

    velocity: jax.Array
    total: jax.Array


class _Slopes(NamedTuple):
    """Derivatives as the backward pass gathers them: by m and y of draws, by 1/r² and by g."""

    velocity: jax.Array
    total: jax.Array
    fresh: jax.Array
    backwards: jax.Array


def row_variances(
    inverse: jax.Array, rows: jax.Array, columns: jax.Array, rates: jax.Array, momentum: float
) -> jax.Array:
    """Var y_t for B⁻¹ with the coefficients ``inverse``, shape (n,).

    Args:
      inverse: first column of B⁻¹, shape (n,).
      rows, columns: r and d, shape (n,).
      rates: η, shape (n,).
      momentum: β.
    """
    n = len(inverse)
    parts = _PARTS if n >= _MANY else 1
    padding = -n % (_SEGMENT * parts)
    given = _Steps(inverse, 1 / rows**2, 1 / columns, rates)
    steps = _Steps(*(jnp.pad(x, (0, padding)) for x in given))
    return _variances(float(momentum), parts, steps)[:n]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _variances(momentum: float, parts: int, steps: _Steps) -> jax.Array:
    return _forward(momentum, parts, steps)[0]


def _forward(momentum: float, parts: int, steps: _Steps) -> tuple[jax.Array, Any]:
    """Var y_t, and the draws where each segment begins."""
    backwards, draws = _backwards(steps.inverse), _Draws(jnp.zeros(0), jnp.zeros(0))
    variances, begun = [], []

    def step(fresh: jax.Array, draws: _Draws, at: tuple[Any, ...]) -> tuple[_Draws, jax.Array]:
        draws = _moved(momentum, draws, _lagged(backwards, at[0], len(fresh)), at)
        return draws, jnp.sum(fresh * draws.total**2)

    def segment(fresh: jax.Array, draws: _Draws, at: Any) -> tuple[_Draws, Any]:
        after, found = jax.lax.scan(functools.partial(step, fresh), draws, at)
        return after, (found, draws)

    for part, many in _cut(steps, parts):
        draws = _Draws(*(jnp.pad(x, (0, many - len(x))) for x in draws))
        own = functools.partial(segment, steps.fresh[:many])
        draws, (found, starts) = jax.lax.scan(own, draws, part)
        variances.append(found.reshape(-1))
        begun.append(starts)
    return jnp.concatenate(variances), (steps, begun)


def _backward(momentum: float, parts: int, saved: Any, cotangent: jax.Array) -> tuple[_Steps]:
    """The derivative by all of ``steps``: once more from the last step to the first."""
    steps, begun = saved
    n = len(cotangent)
    backwards = _backwards(steps.inverse)
    weights = cotangent.reshape(-1, _SEGMENT)
    slopes = _Slopes(*(jnp.zeros(size) for size in (n, n, n, 2 * n)))
    finished, by_out, by_rates = [], list[jax.Array](), list[jax.Array]()

    def step(fresh: jax.Array, slopes: _Slopes, at: Any) -> tuple[_Slopes, Any]:
        (t, out, rate), weight, draws = at
        many = len(fresh)
        lagged = _lagged(backwards, t, many)
        pull = weight * draws.total
        total = slopes.total + 2 * fresh * pull
        velocity = rate * total + momentum * slopes.velocity
        place = n - 1 - t
        known = jax.lax.dynamic_slice_in_dim(slopes.backwards, place, many)
        gathered = jax.lax.dynamic_update_slice_in_dim(
            slopes.backwards, known + out * velocity, place, 0
        )
        by_fresh = slopes.fresh + pull * draws.total
        ours = _Slopes(velocity, total, by_fresh, gathered)
        return ours, (velocity @ lagged, total @ draws.velocity)

    def again(draws: _Draws, at: Any) -> tuple[_Draws, _Draws]:
        draws = _moved(momentum, draws, _lagged(backwards, at[0], len(draws.total)), at)
        return draws, draws

    def segment(fresh: jax.Array, slopes: _Slopes, at: Any) -> tuple[_Slopes, Any]:
        draws, at, weight = at
        held = jax.lax.scan(again, draws, at)[1]
        own = functools.partial(step, fresh)
        return jax.lax.scan(own, slopes, (at, weight, held), reverse=True)

    place = len(weights)
    for (part, many), starts in reversed(list(zip(_cut(steps, parts), begun, strict=True))):
        finished.append(slopes.fresh[many:])
        velocity, total, fresh = (x[:many] for x in slopes[:3])
        slopes = _Slopes(velocity, total, fresh, slopes.backwards)
        count = len(part[0])
        place -= count
        inputs = starts, part, weights[place : place + count]
        own = functools.partial(segment, steps.fresh[:many])
        slopes, (out, rates) = jax.lax.scan(own, slopes, inputs, reverse=True)
        by_out.append(out.reshape(-1))
        by_rates.append(rates.reshape(-1))
    fresh = jnp.concatenate([slopes.fresh, *reversed(finished)])
    through = (jnp.concatenate(parts[::-1]) for parts in (by_out, by_rates))
    return (_Steps(slopes.backwards[:n][::-1], fresh, *through),)


_variances.defvjp(_forward, _backward)


def _cut(steps: _Steps, parts: int) -> list[tuple[tuple[jax.Array, ...], int]]:
    """Parts of the run: (t, 1/d, η) by segment and step, and the number of draws known by then."""
    n = len(steps.inverse)
    ends = [n * (i + 1) // parts for i in range(parts)]
    series = jnp.arange(n), steps.out, steps.rates
    return [
        (tuple(x[begin:end].reshape(-1, _SEGMENT) for x in series), end)
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _backwards(inverse: jax.Array) -> jax.Array:
    """g_{n-1}, …, g_0 and zeros: its slice from n - 1 - t on is what draws 0, 1, … give at t."""
    return jnp.concatenate([inverse[::-1], jnp.zeros_like(inverse)])


def _lagged(backwards: jax.Array, t: jax.Array, many: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(backwards, len(backwards) // 2 - 1 - t, many)


def _moved(momentum: float, draws: _Draws, lagged: jax.Array, at: tuple[Any, ...]) -> _Draws:
    _, out, rate = at
    velocity = momentum * draws.velocity + out * lagged
    return _Draws(velocity, draws.total + rate * velocity)
