"""σ as a differentiable function of C: root finding with frozen samples, implicit gradients.

σ(G) solves log δ̂(log σ, G) = log δ, so d log σ/dG = −(∂ log δ̂/∂G)/(∂ log δ̂/∂ log σ)
(Choquette-Choo et al. 2024, section 4.2): nothing is differentiated through the root finder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt.accounting.monte_carlo import spread
from mfopt.accounting.monte_carlo.protocol import SampledLaw

_TOLERANCE = 1e-9  # of a secant step that has been taken: what is left is far less
_SQUARED = 1e-10  # of it times the step before, over which its slope was read: of what is left
_ROUNDING = 1e-6  # steps below that which do not shrink further are of rounding
_SLOPE = -10.0  # of log δ̂ in log σ, or about that: for the first step, which is no shorter than
_FIRST = 1e-3
_APART = 1e-5  # of two points that a slope is read off: closer, and rounding is in it
_MAX_ITERATIONS = 60
_MAX_STEP = 0.5
_REACH = 0.7  # in log σ: beyond it the frozen shifts are too far off to be trusted


class Frozen(NamedTuple):
    """What stays fixed while C moves.

    Attributes:
      draws: samples.
      proposal: where they are put, for some C and σ.
      centre: log of that σ over the scale of that C.
      start: where the search for log σ begins (any value; a good one saves steps).
      slope: of log δ̂ in log σ there, or about that; NaN where nothing is known of it.
    """

    draws: Any
    proposal: Any
    centre: jax.Array
    start: jax.Array
    slope: jax.Array


class Root(NamedTuple):
    """What solves log δ̂ = log δ.

    Attributes:
      log_sigma: log σ, differentiable in C.
      slope: of log δ̂ in log σ, as it was read off last; a constant to whoever differentiates.
    """

    log_sigma: jax.Array
    slope: jax.Array


class _Search(NamedTuple):
    """Where log σ is looked for: the last point but one and its value, and the step from it."""

    theta: jax.Array
    value: jax.Array
    slope: jax.Array
    low: jax.Array
    high: jax.Array
    step: jax.Array
    taken: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def root(
    law: SampledLaw, reduced: Any, frozen: Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> Root:
    """log σ with log δ̂ = ``log_delta`` on the frozen samples.

    NaN where no such σ lies near ``frozen.centre``: with shifts placed for a very different
    mechanism the estimator has no precision left, and far away it is not even monotone.

    Args:
      law: the sampled law of the scheme; static.
      reduced: what δ depends on, differentiable in C.
      frozen: samples, and where they were put.
      epsilon: ε.
      log_delta: log δ.
    """
    estimate = _estimate(law, reduced, frozen)
    centre = frozen.centre + law.log_scale(reduced)
    top = centre + _REACH

    def unfinished(state: _Search) -> jax.Array:
        result: jax.Array = (jnp.abs(state.step) > 0) & (state.taken < _MAX_ITERATIONS)
        return result

    # by secants: δ̂ alone costs a quarter of δ̂ with its slope
    def iterate(state: _Search) -> _Search:
        theta, step, known = state.theta, state.step, state.value
        value = estimate(theta, epsilon) - log_delta
        low = jnp.where(value > 0, jnp.maximum(state.low, theta), state.low)
        high = jnp.where(value > 0, state.high, jnp.minimum(state.high, theta))
        read = (value - known) / step
        new = (jnp.abs(step) > _APART) & (read < 0)
        slope = jnp.where(new, read, state.slope)
        # δ̂ = 0 (value −inf) means that σ is far too large
        secant = jnp.where(jnp.isfinite(value), -value / slope, jnp.sign(value))
        least = jnp.where((state.taken == 0) & ~known_slope, _FIRST, 0.0)
        secant = jnp.sign(secant) * jnp.maximum(jnp.abs(secant), least)
        moved = jnp.minimum(theta + jnp.clip(secant, -_MAX_STEP, _MAX_STEP), top)
        length = jnp.abs(secant)
        stuck = (length <= _ROUNDING) & (length > jnp.abs(step) / 8)
        # where even the largest σ in reach is too small, nothing between is looked at
        close = new & (length * jnp.abs(step) <= _SQUARED)
        settled = (length <= _TOLERANCE) | close | stuck | (low >= top)
        inside = (moved > low) & (moved < high)
        moved = jnp.where(settled | inside, moved, (low + jnp.minimum(high, top)) / 2)
        moved = jnp.where(jnp.isnan(value), jnp.nan, moved)
        ahead = jnp.where(settled, 0.0, moved - theta)
        return _Search(moved, value, slope, low, high, ahead, state.taken + 1)

    start = jnp.clip(frozen.start, centre - _REACH / 2, centre + _REACH / 2)
    known_slope = frozen.slope < 0
    far, slope = jnp.full_like(start, jnp.inf), jnp.where(known_slope, frozen.slope, _SLOPE)
    begin = _Search(start, far, slope, centre - _REACH, far, far, jnp.zeros((), int))
    end = jax.lax.while_loop(unfinished, iterate, begin)
    near = jnp.abs(end.theta - centre) < 0.999 * _REACH
    return Root(jnp.where(near, end.theta, jnp.nan), end.slope)


def devices(law: SampledLaw, draws: Any) -> spread.Devices:
    """Those that draws are cut over; none of them has more than another."""
    return spread.dividing(draws) if law.divisible else spread.devices()[:1]


def _estimate(
    law: SampledLaw, reduced: Any, frozen: Frozen
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(log σ, ε) -> log δ̂ on the frozen samples, of which every device has its part."""
    over = devices(law, frozen.draws)
    if len(over) == 1:
        terms = law.frozen(reduced, frozen.proposal, frozen.draws)
        return functools.partial(law.log_delta, terms)

    def own_terms(draws: Any, reduced: Any, proposal: Any) -> Any:
        return spread.stacked(law.frozen(reduced, proposal, draws))

    def own_value(terms: Any, theta: jax.Array, epsilon: jax.Array) -> jax.Array:
        return law.log_delta(spread.unstacked(terms), theta, epsilon)[None]

    parts = spread.mapped(own_terms, over)(frozen.draws, reduced, frozen.proposal)

    def value(theta: jax.Array, epsilon: jax.Array) -> jax.Array:
        values = spread.mapped(own_value, over)(parts, theta, epsilon)
        result: jax.Array = jax.scipy.special.logsumexp(values) - jnp.log(len(over))
        return result

    return value


def _forward(
    law: SampledLaw, reduced: Any, frozen: Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> tuple[Root, tuple[Any, ...]]:
    solution = root(law, reduced, frozen, epsilon, log_delta)
    return solution, (reduced, frozen, epsilon, solution.log_sigma)


def _backward(law: SampledLaw, saved: tuple[Any, ...], cotangent: Root) -> tuple[Any, ...]:
    reduced, frozen, epsilon, solution = saved

    def value(reduced: Any, theta: jax.Array) -> jax.Array:
        return _estimate(law, reduced, frozen)(theta, epsilon)

    by_reduced, by_theta = jax.grad(value, argnums=(0, 1))(reduced, solution)
    rate = -cotangent.log_sigma / by_theta
    return jax.tree.map(lambda leaf: rate * leaf, by_reduced), None, None, None


root.defvjp(_forward, _backward)
