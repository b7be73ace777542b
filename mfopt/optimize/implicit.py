"""σ as a differentiable function of C: root finding with frozen samples, implicit gradients.

σ(G) solves log δ̂(log σ, G) = log δ, so d log σ/dG = −(∂ log δ̂/∂G)/(∂ log δ̂/∂ log σ)
(Choquette-Choo et al. 2024, section 4.2): nothing is differentiated through the root finder.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mfopt.accounting.monte_carlo.protocol import SampledLaw

_TOLERANCE = 1e-7  # of a Newton step that has been taken: what is left is its square
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
    """

    draws: Any
    proposal: Any
    centre: jax.Array
    start: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def log_sigma(
    law: SampledLaw, reduced: Any, frozen: Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> jax.Array:
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
    terms = law.frozen(reduced, frozen.proposal, frozen.draws)
    centre = frozen.centre + law.log_scale(reduced)

    def function(theta: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, slope = jax.jvp(
            lambda t: law.log_delta(terms, t, epsilon), (theta,), (jnp.ones(()),)
        )
        return value - log_delta, slope

    def unfinished(state: tuple[Any, ...]) -> jax.Array:
        _, _, _, step, count = state
        result: jax.Array = (jnp.abs(step) > _TOLERANCE) & (count < _MAX_ITERATIONS)
        return result

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        theta, low, high, _, count = state
        value, slope = function(theta)
        low = jnp.where(value > 0, jnp.maximum(low, theta), low)
        high = jnp.where(value > 0, high, jnp.minimum(high, theta))
        # δ̂ = 0 (value −inf) means that σ is far too large
        newton = jnp.where(jnp.isfinite(value) & (slope < 0), -value / slope, jnp.sign(value))
        moved = theta + jnp.clip(newton, -_MAX_STEP, _MAX_STEP)
        settled = jnp.abs(newton) <= _TOLERANCE
        inside = (moved > low) & (moved < high)
        moved = jnp.where(settled | inside, moved, (low + high) / 2)
        return jnp.where(jnp.isnan(value), jnp.nan, moved), low, high, moved - theta, count + 1

    start = jnp.clip(frozen.start, centre - _REACH / 2, centre + _REACH / 2)
    state = (start, centre - _REACH, centre + _REACH, jnp.full_like(start, jnp.inf), 0)
    theta = jax.lax.while_loop(unfinished, iterate, state)[0]
    return jnp.where(jnp.abs(theta - centre) < 0.999 * _REACH, theta, jnp.nan)


def _forward(
    law: SampledLaw, reduced: Any, frozen: Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> tuple[jax.Array, tuple[Any, ...]]:
    solution = log_sigma(law, reduced, frozen, epsilon, log_delta)
    return solution, (reduced, frozen, epsilon, solution)


def _backward(law: SampledLaw, saved: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    reduced, frozen, epsilon, solution = saved

    def value(reduced: Any, theta: jax.Array) -> jax.Array:
        terms = law.frozen(reduced, frozen.proposal, frozen.draws)
        return law.log_delta(terms, theta, epsilon)

    by_reduced, by_theta = jax.grad(value, argnums=(0, 1))(reduced, solution)
    rate = -cotangent / by_theta
    return jax.tree.map(lambda leaf: rate * leaf, by_reduced), None, None, None


log_sigma.defvjp(_forward, _backward)
