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

from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import Devices
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
    centre: Scalar


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


def solved(
    law: SampledLaw,
    over: Devices,
    quadratic: PyTree,
    frozen: Frozen,
    epsilon: jax.Array,
    log_delta: jax.Array,
) -> tuple[jax.Array, PyTree]:
    """(log σ, ∂ log σ/∂quadratic) at the target, on the frozen samples.

    The slope is NaN where δ̂ rises with σ there.

    Args:
      law: the sampled law of the scheme; static.
      over: devices that the samples are spread over, in equal parts; static.
      quadratic: sufficient statistic of σ for C.
      frozen: samples and proposal.
      epsilon: ε.
      log_delta: log δ.
    """

    def terms_of(quadratic: PyTree) -> tuple[PyTree, jax.Array]:
        reduced = law.prepared(quadratic)
        return _terms(law, over, reduced, frozen), law.log_scale(reduced)

    # the terms are traced once, for the root and for its slope
    terms, back, log_scale = jax.vjp(terms_of, quadratic, has_aux=True)
    estimate = functools.partial(_log_delta, law, over)
    centre = frozen.centre + log_scale
    root = log_sigma(functools.partial(estimate, terms, epsilon=epsilon), centre, log_delta)
    slopes = jax.grad(estimate, argnums=(0, 1), allow_int=True)
    by_terms, by_theta = slopes(terms, root, epsilon)
    # an estimate that rises with σ is none: its gradient is refused with it
    rate = jnp.where(by_theta < 0, -1 / by_theta, jnp.nan)
    return root, jax.tree.map(lambda leaf: rate * leaf, back(by_terms)[0])


def log_sigma(
    estimate: Callable[[jax.Array], jax.Array], centre: jax.Array, log_delta: jax.Array
) -> jax.Array:
    """log σ with |log δ̂ − ``log_delta``| <= :data:`TOLERANCE`.

    NaN where no such σ is found near ``centre``: a σ that does not meet the target is never
    returned.

    Args:
      estimate: log σ -> log δ̂.
      centre: log of the σ that the proposal was placed for.
      log_delta: log δ.
    """
    top, bottom = centre + _REACH, centre - _REACH

    def unfinished(state: _Bracket) -> jax.Array:
        inside = jnp.isfinite(state.theta) & (state.low < top) & (state.high > bottom)
        return ~state.met & (state.steps < _MAX_ITERATIONS) & inside

    # secant steps, kept inside the bracket
    def iterate(state: _Bracket) -> _Bracket:
        theta = state.theta
        log_estimate = estimate(theta)
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


def _terms(law: SampledLaw, over: Devices, reduced: PyTree, frozen: Frozen) -> PyTree:
    """What δ̂ on the frozen samples is made of at any σ; every device has its part."""
    if len(over) == 1:
        return law.frozen(reduced, frozen.proposal, frozen.draws)

    def own(draws: PyTree, reduced: PyTree, proposal: PyTree) -> PyTree:
        return sharding.stacked(law.frozen(reduced, proposal, draws))

    return sharding.mapped(own, over)(frozen.draws, reduced, frozen.proposal)


def _log_delta(
    law: SampledLaw, over: Devices, terms: PyTree, theta: jax.Array, epsilon: jax.Array
) -> jax.Array:
    """log δ̂ at log σ = ``theta``, by :func:`_terms`."""
    if len(over) == 1:
        return law.log_delta(terms, theta, epsilon)

    def own(terms: PyTree, theta: jax.Array, epsilon: jax.Array) -> jax.Array:
        return law.log_delta(sharding.unstacked(terms), theta, epsilon)[None]

    values = sharding.mapped(own, over)(terms, theta, epsilon)
    return jax.scipy.special.logsumexp(values) - jnp.log(len(over))
