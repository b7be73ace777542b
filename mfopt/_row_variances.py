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
      output_scale: 1/d, shape (n,).
      rates: η, shape (n,).
    """

    inverse: jax.Array
    fresh: jax.Array
    output_scale: jax.Array
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
      rows: r, shape (n,).
      columns: d, shape (n,).
      rates: η, shape (n,).
      momentum: β.
    """
    n = len(inverse)
    parts = _PARTS if n >= _MANY else 1
    padding = -n % (_SEGMENT * parts)
    unpadded = _Steps(inverse, 1 / rows**2, 1 / columns, rates)
    steps = _Steps(*(jnp.pad(x, (0, padding)) for x in unpadded))
    return _variances(float(momentum), parts, steps)[:n]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _variances(momentum: float, parts: int, steps: _Steps) -> jax.Array:
    return _forward(momentum, parts, steps)[0]


def _forward(momentum: float, parts: int, steps: _Steps) -> tuple[jax.Array, Any]:
    """Var y_t, and the draws where each segment begins."""
    backwards, draws = _backwards(steps.inverse), _Draws(jnp.zeros(0), jnp.zeros(0))
    variances, begun = [], []

    def step(fresh: jax.Array, draws: _Draws, factors: tuple[Any, ...]) -> tuple[_Draws, jax.Array]:
        draws = _moved(momentum, draws, _lagged(backwards, factors[0], len(fresh)), factors)
        return draws, jnp.sum(fresh * draws.total**2)

    def segment(fresh: jax.Array, draws: _Draws, factors: Any) -> tuple[_Draws, Any]:
        moved, squares = jax.lax.scan(functools.partial(step, fresh), draws, factors)
        return moved, (squares, draws)

    for part, draw_count in _cut(steps, parts):
        draws = _Draws(*(jnp.pad(x, (0, draw_count - len(x))) for x in draws))
        follow = functools.partial(segment, steps.fresh[:draw_count])
        draws, (segment_variances, starts) = jax.lax.scan(follow, draws, part)
        variances.append(segment_variances.reshape(-1))
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

    def step(fresh: jax.Array, slopes: _Slopes, inputs: Any) -> tuple[_Slopes, Any]:
        (t, output_scale, rate), weight, draws = inputs
        draw_count = len(fresh)
        lagged = _lagged(backwards, t, draw_count)
        pull = weight * draws.total
        total = slopes.total + 2 * fresh * pull
        velocity = rate * total + momentum * slopes.velocity
        begin = n - 1 - t
        gathered_before = jax.lax.dynamic_slice_in_dim(slopes.backwards, begin, draw_count)
        gathered = jax.lax.dynamic_update_slice_in_dim(
            slopes.backwards, gathered_before + output_scale * velocity, begin, 0
        )
        by_fresh = slopes.fresh + pull * draws.total
        ours = _Slopes(velocity, total, by_fresh, gathered)
        return ours, (velocity @ lagged, total @ draws.velocity)

    def repeat(draws: _Draws, factors: Any) -> tuple[_Draws, _Draws]:
        draws = _moved(momentum, draws, _lagged(backwards, factors[0], len(draws.total)), factors)
        return draws, draws

    def segment(fresh: jax.Array, slopes: _Slopes, inputs: Any) -> tuple[_Slopes, Any]:
        draws, factors, weight = inputs
        trajectory = jax.lax.scan(repeat, draws, factors)[1]
        step_back = functools.partial(step, fresh)
        return jax.lax.scan(step_back, slopes, (factors, weight, trajectory), reverse=True)

    segments_left = len(weights)
    for (part, draw_count), starts in reversed(list(zip(_cut(steps, parts), begun, strict=True))):
        finished.append(slopes.fresh[draw_count:])
        velocity, total, fresh = (x[:draw_count] for x in slopes[:3])
        slopes = _Slopes(velocity, total, fresh, slopes.backwards)
        count = len(part[0])
        segments_left -= count
        inputs = starts, part, weights[segments_left : segments_left + count]
        segment_back = functools.partial(segment, steps.fresh[:draw_count])
        slopes, (output_scales, rates) = jax.lax.scan(segment_back, slopes, inputs, reverse=True)
        by_out.append(output_scales.reshape(-1))
        by_rates.append(rates.reshape(-1))
    fresh = jnp.concatenate([slopes.fresh, *reversed(finished)])
    through = (jnp.concatenate(parts[::-1]) for parts in (by_out, by_rates))
    return (_Steps(slopes.backwards[:n][::-1], fresh, *through),)


_variances.defvjp(_forward, _backward)


def _cut(steps: _Steps, parts: int) -> list[tuple[tuple[jax.Array, ...], int]]:
    """Parts of the run: (t, 1/d, η) by segment and step, and the number of draws known by then."""
    n = len(steps.inverse)
    ends = [n * (i + 1) // parts for i in range(parts)]
    series = jnp.arange(n), steps.output_scale, steps.rates
    return [
        (tuple(x[begin:end].reshape(-1, _SEGMENT) for x in series), end)
        for begin, end in itertools.pairwise([0, *ends])
    ]


def _backwards(inverse: jax.Array) -> jax.Array:
    """g_{n-1}, …, g_0 and zeros: its slice from n - 1 - t on is what draws 0, 1, … give at t."""
    return jnp.concatenate([inverse[::-1], jnp.zeros_like(inverse)])


def _lagged(backwards: jax.Array, t: jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(backwards, len(backwards) // 2 - 1 - t, count)


def _moved(momentum: float, draws: _Draws, lagged: jax.Array, factors: tuple[Any, ...]) -> _Draws:
    _, output_scale, rate = factors
    velocity = momentum * draws.velocity + output_scale * lagged
    return _Draws(velocity, draws.total + rate * velocity)
