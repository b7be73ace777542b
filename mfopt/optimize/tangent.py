"""Minimization by tangents of σ: few Monte Carlo evaluations, many cheap ones in between.

All that σ knows of C is the Gram matrix G of its modes, and over long ways in C log σ is nearly
the logarithm of a linear function of G. With H = ∂ log σ/∂G at G₀, and <H, G₀> = 1/2 because σ
grows like the square root of G,

    log σ(G) ≈ log σ₀ + log(2 <H, G>)/2

has the value and the slope of log σ at G₀ and needs no samples. So the samples are asked for H
once, the error with this σ is minimized to its end, and that again from there: where a tangent's
minimum stays where it was touched, the gradient of the error itself is 0 (majorize-minimize, Lange
2016, with a tangent in place of a proven majorant, so every step is checked against the samples).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.optimize import implicit
from mfopt.optimize.drivers import Trace
from mfopt.optimize.objective import AmplifiedObjective, Evaluation, Loss, Objective
from mfopt.sampling import BallsInBins
from mfopt.strategies import Strategy

Model = Callable[[np.ndarray], tuple[float, np.ndarray]]

_SETTLING = 3  # tangents for which the shifts move along: C still goes far
_INNER = 150  # evaluations of one model at most
_HALVINGS = 6


class Tangent(NamedTuple):
    """The objective at one point, and the model that touches it there.

    Attributes:
      at: value, gradient and σ on the frozen samples.
      model: parameters -> (value, gradient), without samples.
    """

    at: Evaluation
    model: Model


class Touchable(Objective, Protocol):
    """An objective that knows its tangents."""

    def tangent(self, parameters: np.ndarray) -> Tangent:
        """The model that touches the objective at ``parameters``."""


class TangentObjective(AmplifiedObjective):
    """The loss under amplification, with its tangents."""

    @float64
    def tangent(self, parameters: np.ndarray) -> Tangent:
        """The model that touches the objective at ``parameters``."""
        assert self._weights is not None
        frozen = implicit.Frozen(
            self._draws, self._weights, jnp.asarray(self._centre), jnp.asarray(self._start)
        )
        target = jnp.asarray(self._epsilon), jnp.asarray(math.log(self._delta))
        gram = _gram(self._build, self._scheme)(jnp.asarray(parameters))
        log_sigma, slope = _slope(gram, frozen, *target)
        if math.isfinite(float(log_sigma)):
            self._start = float(log_sigma)
        compiled = _model(self._loss, self._build, self._scheme)

        @float64
        def model(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = compiled(jnp.asarray(x), log_sigma, slope)
            return float(value), np.asarray(gradient)

        value, gradient = model(parameters)
        return Tangent(Evaluation(value, gradient, math.exp(float(log_sigma))), model)


@jax.jit
def _slope(
    gram: jax.Array, frozen: implicit.Frozen, epsilon: jax.Array, log_delta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(log σ, ∂ log σ/∂G); compiled once for all strategies."""

    def value(gram: jax.Array) -> jax.Array:
        return implicit.log_sigma(dominating_pair.jittered(gram), frozen, epsilon, log_delta)

    return jax.value_and_grad(value)(gram)


@functools.lru_cache(maxsize=16)
def _gram(build: Callable[[jax.Array], Strategy], scheme: BallsInBins) -> Callable[..., jax.Array]:
    return jax.jit(lambda x: build(x).gram(scheme))


@functools.lru_cache(maxsize=16)
def _model(
    loss: Loss, build: Callable[[jax.Array], Strategy], scheme: BallsInBins
) -> Callable[..., tuple]:
    """(loss, gradient) with log σ ≈ ``log_sigma`` + log(2 <slope, G>)/2."""

    def value(x: jax.Array, log_sigma: jax.Array, slope: jax.Array) -> jax.Array:
        strategy = build(x)
        weight = 2 * jnp.sum(slope * jnp.asarray(strategy.gram(scheme)))
        return loss(strategy, jnp.exp(log_sigma) * jnp.sqrt(weight))

    return jax.jit(jax.value_and_grad(value))


def minimize(
    objective: Touchable, start: np.ndarray, trace: Trace, *, steps: int, tolerance: float
) -> None:
    """At most ``steps`` tangents, until one promises less than ``tolerance``.

    A minimum that the samples do not confirm is taken back half the way, several times if need be.
    """
    anchor = point = start
    halvings = 0
    for count in range(steps):
        settling = count <= _SETTLING
        if settling:
            objective.refresh(point)  # another estimate: values before and after do not compare
            trace.restart()
        here = objective.tangent(point)
        worse = not here.at.value <= trace.best_value + tolerance
        trace.record(point, here.at)
        if worse and count > 0:
            halvings += 1
            if halvings > _HALVINGS:
                trace.status = "tangents: no further decrease"
                return
            point = (anchor + point) / 2
            continue
        anchor, halvings = point, 0
        lowest, point = _minimum(here.model, point, here.at.value, tolerance)
        if here.at.value - lowest < tolerance and not settling:
            trace.status = f"tangents: converged to a relative {tolerance:g}"
            return
    trace.status = f"step limit {steps} reached"


def _minimum(
    model: Model, start: np.ndarray, value: float, tolerance: float
) -> tuple[float, np.ndarray]:
    """(lowest value, where) of one model, by L-BFGS-B; not a number counts as a step too far."""
    lowest, best = value, start
    gradient = np.zeros_like(start)

    def function(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal lowest, best, gradient
        at, slope = model(parameters)
        if not (math.isfinite(at) and np.all(np.isfinite(slope))):
            return lowest + 1.0, gradient
        if at < lowest:
            lowest, best = at, np.array(parameters)
        gradient = slope
        return at, slope

    scipy.optimize.minimize(
        function, start, jac=True, method="L-BFGS-B",
        options={
            "maxfun": _INNER, "maxiter": _INNER, "maxcor": 30 if len(start) < 10**5 else 8,
            "ftol": tolerance / 30, "gtol": 1e-12,
        },
    )  # fmt: skip
    return lowest, best
