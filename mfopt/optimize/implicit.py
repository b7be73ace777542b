"""σ and its slope in C: root finding with frozen samples, implicit differentiation.

σ(G) solves log δ̂(log σ, G) = log δ, so d log σ/dG = −(∂ log δ̂/∂G)/(∂ log δ̂/∂ log σ)
(Choquette-Choo et al. 2024, section 4.2): the root finder itself is not differentiated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mfopt._runtime._types import PyTree
from mfopt.accounting.monte_carlo import sharding
from mfopt.accounting.monte_carlo.protocol import SampledLaw

# Largest |log δ̂ − log δ| at which σ is returned: log σ is then off by a tenth of that or less.
TOLERANCE = 1e-8
_SLOPE = -2.0  # of -log(-log δ̂) in log σ, for the first step: that of a Gaussian tail
_APART = 1e-7  # distance of two points from which a slope is read: closer ones tell of rounding
_MAX_ITERATIONS, _MAX_STEP = 60, 0.5
_REACH = 0.7  # in log σ: the frozen proposal says nothing further away


class Frozen(NamedTuple):
    """Constants of the differentiation.

    Attributes:
      draws: samples.
      proposal: importance-sampling proposal, placed for some C and σ.
      centre: log of that σ over the scale of that C.
    """

    draws: PyTree
    proposal: PyTree
    centre: jax.Array


class _Bracket(NamedTuple):
    """State of the root finder: a point, the point before it, and a bracket."""

    theta: jax.Array
    previous: jax.Array
    height_before: jax.Array
    slope: jax.Array
    low: jax.Array
    high: jax.Array
    met: jax.Array
    steps: jax.Array


def log_sigma(
    law: SampledLaw, reduced: PyTree, frozen: Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> jax.Array:
    """log σ with |log δ̂ − ``log_delta``| <= :data:`TOLERANCE` on the frozen samples.

    NaN where no such σ is found near ``frozen.centre``: a σ that does not meet the target is never
    returned.

    Args:
      law: the sampled law of the scheme; static.
      reduced: what δ depends on.
      frozen: samples and proposal.
      epsilon: ε.
      log_delta: log δ.
    """
    estimate = _estimate(law, reduced, frozen)
    centre = frozen.centre + law.log_scale(reduced)
    top, bottom = centre + _REACH, centre - _REACH

    def unfinished(state: _Bracket) -> jax.Array:
        inside = jnp.isfinite(state.theta) & (state.low < top) & (state.high > bottom)
        return ~state.met & (state.steps < _MAX_ITERATIONS) & inside

    # secant steps, kept inside the bracket
    def iterate(state: _Bracket) -> _Bracket:
        theta = state.theta
        log_estimate = estimate(theta, epsilon)
        value = log_estimate - log_delta
        # nearly straight in log σ, as a Gaussian tail is; δ̂ may be above 1
        height = jnp.where(log_estimate < 0, jnp.log(log_delta / log_estimate), jnp.inf)
        low = jnp.where(value > 0, jnp.maximum(state.low, theta), state.low)
        high = jnp.where(value > 0, state.high, jnp.minimum(state.high, theta))
        distance = theta - state.previous
        read = (height - state.height_before) / distance
        slope = jnp.where(
            (jnp.abs(distance) > _APART) & (read < 0) & jnp.isfinite(read), read, state.slope
        )
        # δ̂ = 0 (value −inf) means that σ is far too large
        step = jnp.where(jnp.isfinite(height), -height / slope, jnp.sign(value))
        moved = jnp.clip(theta + jnp.clip(step, -_MAX_STEP, _MAX_STEP), bottom, top)
        inside = (moved > low) & (moved < high)
        moved = jnp.where(inside, moved, (jnp.maximum(low, bottom) + jnp.minimum(high, top)) / 2)
        met = jnp.abs(value) <= TOLERANCE
        moved = jnp.where(met, theta, jnp.where(jnp.isnan(value), jnp.nan, moved))
        return _Bracket(moved, theta, height, slope, low, high, met, state.steps + 1)

    far = jnp.full_like(centre, jnp.inf)
    begin = _Bracket(
        centre, far, far, jnp.full_like(centre, _SLOPE), -far, far, jnp.array(False), jnp.array(0)
    )
    end = jax.lax.while_loop(unfinished, iterate, begin)
    return jnp.where(end.met, end.theta, jnp.nan)


def devices(law: SampledLaw, draws: PyTree) -> sharding.Devices:
    """The devices that the draws are spread over, in equal parts."""
    return sharding.dividing(draws) if law.divisible else sharding.devices()[:1]


def _estimate(
    law: SampledLaw, reduced: PyTree, frozen: Frozen
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """(log σ, ε) -> log δ̂ on the frozen samples, of which every device has its part."""
    over = devices(law, frozen.draws)
    if len(over) == 1:
        terms = law.frozen(reduced, frozen.proposal, frozen.draws)
        return functools.partial(law.log_delta, terms)

    def own_terms(draws: PyTree, reduced: PyTree, proposal: PyTree) -> PyTree:
        return sharding.stacked(law.frozen(reduced, proposal, draws))

    def own_value(terms: PyTree, theta: jax.Array, epsilon: jax.Array) -> jax.Array:
        return law.log_delta(sharding.unstacked(terms), theta, epsilon)[None]

    parts = sharding.mapped(own_terms, over)(frozen.draws, reduced, frozen.proposal)

    def value(theta: jax.Array, epsilon: jax.Array) -> jax.Array:
        values = sharding.mapped(own_value, over)(parts, theta, epsilon)
        return jax.scipy.special.logsumexp(values) - jnp.log(len(over))

    return value


def slope(
    law: SampledLaw, quadratic: PyTree, frozen: Frozen, log_sigma: jax.Array, epsilon: jax.Array
) -> PyTree:
    """∂ log σ/∂quadratic where δ̂ at ``log_sigma`` is the target's; NaN where δ̂ rises with σ there.

    Args:
      law: the sampled law of the scheme; static.
      quadratic: sufficient statistic of σ for C.
      frozen: samples and proposal.
      log_sigma: solution for that statistic.
      epsilon: ε.
    """

    def value(quadratic: PyTree, theta: jax.Array) -> jax.Array:
        return _estimate(law, law.prepared(quadratic), frozen)(theta, epsilon)

    by_quadratic, by_theta = jax.grad(value, argnums=(0, 1))(quadratic, log_sigma)
    # an estimate that rises with σ is none: its gradient is refused with it
    rate = jnp.where(by_theta < 0, -1 / by_theta, jnp.nan)
    return jax.tree.map(lambda leaf: rate * leaf, by_quadratic)
