"""Minimization by tangents of σ: few Monte Carlo evaluations, many cheap ones in between.

All that σ knows of C is ``SampledLaw.quadratic``: under balls-in-bins the Gram matrix G of its
modes. Over long ways in C log σ is nearly the logarithm of a linear function of G. With
H = ∂ log σ/∂G at G₀, and <H, G₀> = 1/2 because σ grows like the square root of G,

    log σ(G) ≈ log σ₀ + log(2 <H, G>)/2

has the value and the slope of log σ at G₀ and needs no samples. So the samples are asked for H
once, the error with this σ is minimized to its end, and that again from there: where a tangent's
minimum stays where it was touched, the gradient of the error itself is 0 (majorize-minimize, Lange
2016, with a tangent in place of a proven majorant, so every step is checked against the samples).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from threadpoolctl import ThreadpoolController

from mfopt import _kept, _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import spread
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.optimize import implicit, quasi_newton
from mfopt.optimize.drivers import Trace
from mfopt.optimize.objective import AmplifiedObjective, Evaluation, Loss, Objective
from mfopt.optimize.parameterization import Parameterization
from mfopt.strategies import Strategy

Model = Callable[[np.ndarray], tuple[float, np.ndarray]]

# Tangents of each round: short at first, while C still moves far and the shifts must follow.
_ROUNDS = (2, 2, 4, 8, 16, 32)
REACH = 5.0  # of a step, in each parameter
_WILD = 0.1  # relative increase of the error beyond which a step tells nothing but that it was long
_SHORTER = 4  # times, after a step that did not lower the error
_RESOLVED = 3  # tolerances: a promise that another placement of the shifts makes as well
_INNER = 150  # evaluations of one model at most
_PAIRS = 30  # steps whose curvature is remembered, from model to model
# The end of a minimization, which takes most of its evaluations, adds less than a tangent is off
# by: so many evaluations have to bring this share of what all of them did.
_WINDOW, _ADDED = 5, 0.05
_LOST = 0.3  # decrease of the error that no tangent is believed in
# Increase of the error, once the shifts are placed where a round has ended, by which it has found
# what they did not see. Two placements differ by 0.01% under balls-in-bins, 0.8% with bins thrown
# afresh at ε = 8, where a search once ended 5% high.
_UNSEEN = 0.01

_beside = ThreadPoolExecutor(2, "compiling")


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

    def refresh(self, parameters: np.ndarray, known: float = math.nan) -> None:
        """As :class:`Objective`'s, for the σ that is ``known`` there, or about that."""

    def tangent(self, parameters: np.ndarray) -> Tangent:
        """The model that touches the objective at ``parameters``."""


class TangentObjective(AmplifiedObjective):
    """The loss under amplification, with its tangents."""

    _last: tuple[bytes, Evaluation] | None = None

    @float64
    def __init__(self, loss: Loss, parameterization: Parameterization, *job: Any, **more: Any):
        super().__init__(loss, parameterization, *job, **more)
        leaves, structure = jax.tree.flatten(self._draws)
        spread_out = len(self._devices) > 1
        shapes = tuple(
            jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding if spread_out else None
            )
            for leaf in leaves
        )
        parts = self._loss, self._law, self._build, len(parameterization.start)
        # a thread does not see the caller's choice of a device
        device = getattr(jax.config, "jax_default_device")  # noqa: B009 - not in its stubs
        self._compiled = _programs(*parts, structure, shapes, device)

    def __call__(self, parameters: np.ndarray) -> Evaluation:
        """As the parent's, from the compiled parts of the tangent: nothing else is compiled."""
        if self._last is not None and self._last[0] == np.asarray(parameters).tobytes():
            return self._last[1]
        return self.tangent(parameters).at

    def refresh(self, parameters: np.ndarray, known: float = math.nan) -> None:
        """As the parent's."""
        super().refresh(parameters, known)
        self._last = None

    @float64
    def tangent(self, parameters: np.ndarray) -> Tangent:
        """The model that touches the objective at ``parameters``."""
        if self._proposal is None:
            self.refresh(parameters)
        # NumPy's arrays as they are: `jnp.asarray` would be compiled for each of their shapes
        near: list[Any] = [np.asarray(self._centre), np.asarray(self._start)]
        frozen = implicit.Frozen(self._draws, self._proposal, *near)
        target = np.asarray(self._epsilon), np.asarray(math.log(self._delta))
        quadratic = self.quadratic(parameters)
        touch, compiled = self._compiled.result()
        (log_sigma, norm), slope = touch(quadratic, frozen, *target)
        if math.isfinite(float(log_sigma)):
            self._start = float(log_sigma)
        where = spread.gathered((jnp.asarray(log_sigma), slope), self._devices)

        @float64
        def model(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = compiled(x, *where)
            return float(value), np.asarray(gradient)

        value, gradient = model(parameters)
        at = Evaluation(value, gradient, math.exp(float(log_sigma)), float(norm))
        self._last = np.asarray(parameters).tobytes(), at
        return Tangent(at, model)


@functools.lru_cache(maxsize=16)
def _programs(
    loss: Loss,
    law: SampledLaw,
    build: Callable[[jax.Array], Strategy],
    parameters: int,
    structure: Any,
    draws: tuple[jax.ShapeDtypeStruct, ...],
    device: Any,
) -> Future[tuple[Callable[..., Any], Callable[..., Any]]]:
    """:func:`_slope` and :func:`_model`, compiled beside whatever comes before their first use.

    Args:
      loss, law, build: static in them.
      parameters: how many.
      structure, draws: the tree of frozen draws, and its leaves.
      device: where they run, or None for JAX's own choice.
    """

    model = _model(loss, law, build)

    @float64
    def shapes() -> tuple[Any, Any, implicit.Frozen, Any]:
        number: Any = jax.ShapeDtypeStruct((), jnp.float64)
        point = jax.ShapeDtypeStruct((parameters,), jnp.float64)
        quadratic = jax.eval_shape(lambda x: law.quadratic(build(x)), point)
        proposal = law.proposal_shape(jax.eval_shape(law.prepared, quadratic))
        frozen = implicit.Frozen(jax.tree.unflatten(structure, draws), proposal, number, number)
        return number, point, frozen, quadratic

    def lower_slope(alone: bool) -> Any:
        number, _, frozen, quadratic = shapes()
        return _slope.lower_for(alone, law, quadratic, frozen, number, number)

    def lower_model(alone: bool) -> Any:
        number, point, _, quadratic = shapes()
        return model.lower_for(alone, point, number, quadratic)

    @float64
    def compiled() -> tuple[Callable[..., Any], Callable[..., Any]]:
        with jax.default_device(device):
            # by what the shapes follow from, which are themselves traced
            same = law, build, parameters, structure, draws
            touch = _kept.program(lower_slope, "slope", *same)
            return touch, _kept.program(lower_model, "model", loss, *same)

    return _beside.submit(compiled)


@functools.partial(_quick.jit, static_argnums=0)
def _slope(
    law: SampledLaw,
    quadratic: Any,
    frozen: implicit.Frozen,
    epsilon: jax.Array,
    log_delta: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """((log σ, norm of C), ∂ log σ/∂G); compiled once for all strategies."""

    def value(quadratic: Any) -> tuple[jax.Array, jax.Array]:
        reduced = law.prepared(quadratic)
        log_sigma = implicit.log_sigma(law, reduced, frozen, epsilon, log_delta)
        return log_sigma, law.norm(reduced)

    return jax.value_and_grad(value, has_aux=True)(quadratic)


@functools.lru_cache(maxsize=16)
def _model(loss: Loss, law: SampledLaw, build: Callable[[jax.Array], Strategy]) -> Any:
    """(loss, gradient) with log σ ≈ ``log_sigma`` + log(2 <slope, G>)/2."""

    def value(x: jax.Array, log_sigma: jax.Array, slope: Any) -> jax.Array:
        strategy = build(x)
        weight = 2 * law.product(slope, strategy)
        return loss(strategy, jnp.exp(log_sigma) * jnp.sqrt(weight))

    return _quick.jit(jax.value_and_grad(value))


def minimize(
    objective: Touchable,
    start: np.ndarray,
    trace: Trace,
    *,
    steps: int,
    tolerance: float,
    reach: float = REACH,
    drift: float = math.inf,
    sigma: float = math.nan,
) -> None:
    """At most ``steps`` tangents, in rounds; between rounds the frozen shifts follow.

    The search ends where a round promises and gains less than another placement of the shifts would
    change: the first one only where its shifts were placed by a σ that is known. A round that ends
    higher than an earlier one, once the shifts are placed where it ended, is taken back.

    Args:
      objective: what is minimized.
      start: parameters, shape (p,).
      trace: is told of every tangent, and keeps the best.
      steps: tangents at most.
      tolerance: relative change of the error that the samples resolve.
      reach: of the first step, in each parameter.
      drift: of log σ, at a mode norm of 1, from where the shifts were placed: beyond it they are
        not believed. A search that begins near its end needs no more, and would otherwise find
        what stale shifts do not see.
      sigma: at the start, or about that, where a search on other samples ended there.
    """
    point, bend, width = start, _Bend(), reach
    curvature = quasi_newton.Curvature(_PAIRS)
    lowest: _Placed | None = None
    for number, length in enumerate(_ROUNDS):
        if len(trace.history) >= steps:
            break
        objective.refresh(point, math.nan if number else sigma)
        trace.restart()  # another estimate: values before and after do not compare
        anchor = objective.tangent(point)
        trace.record(point, anchor.at)
        if lowest is not None and lowest.unseen(anchor.at):
            if len(trace.history) >= steps:
                break
            bend, width = _Bend(), float(np.max(np.abs(point - lowest.point))) / _SHORTER
            point = lowest.point
            objective.refresh(point)
            anchor = objective.tangent(point)
            trace.record(point, anchor.at)
        if math.isfinite(anchor.at.value) and (lowest is None or anchor.at.value < lowest.at.value):
            lowest = _Placed(anchor.at, point)
        placed = anchor.at
        for count in range(length):
            model = bend.added(anchor.model, point)
            least, reached = _minimum(model, point, width, anchor.at.value, tolerance, curvature)
            promised = anchor.at.value - least
            if promised < (tolerance if count else _RESOLVED * tolerance):
                gained = placed.value - anchor.at.value
                small = (count == 0 or gained > 0) and gained < _RESOLVED * tolerance
                if small and (number > 0 or not math.isnan(sigma)):
                    trace.status = f"tangents: converged to a relative {tolerance:g}"
                    return
                # is it what the bends forbid? The next round begins without
                bend, width = _Bend(), reach
                break
            if len(trace.history) >= steps:
                break
            there = objective.tangent(reached)
            if _strayed(placed, there.at, drift):
                trace.record(reached, there.at._replace(value=math.nan))
                width = float(np.max(np.abs(reached - point))) / 4
                continue
            trace.record(reached, there.at)
            if there.at.value < anchor.at.value:
                bend.learn(reached - point, there.at.gradient - anchor.model(reached)[1])
                point, anchor, width = reached, there, min(2 * width, REACH)
            else:
                # a curvature read far outside the tangent's range would forbid all further steps
                near = there.at.value < anchor.at.value + _WILD
                known = near and np.all(np.isfinite(there.at.gradient))
                change = there.at.gradient - anchor.model(reached)[1] if known else 0 * point
                bend.learn(reached - point, change)
                # shorter also where it did: one curvature of many does not make a long step right
                width = float(np.max(np.abs(reached - point))) / _SHORTER
    trace.status = "tangents: no further decrease that the samples confirm"
    if len(trace.history) >= steps:
        trace.status = f"step limit {steps} reached"
    # the last round ended where no shifts have been placed
    if lowest is None or trace.best is None:
        return
    if not np.array_equal(trace.best, lowest.point):
        objective.refresh(trace.best)
        if lowest.unseen(objective.tangent(trace.best).at):
            trace.best = np.array(lowest.point)
            trace.take(lowest.at)


class _Placed(NamedTuple):
    """A value on shifts that were placed where it is, and where."""

    at: Evaluation
    point: np.ndarray

    def unseen(self, there: Evaluation) -> bool:
        """Whether such a value elsewhere is much higher, or no number."""
        return not there.value <= self.at.value + _UNSEEN


def _strayed(placed: Evaluation, there: Evaluation, drift: float) -> bool:
    """Whether log σ at a mode norm of 1 is further than ``drift`` from where it was; NaN is."""
    if math.isinf(drift):
        return False
    before, after = (at.noise_multiplier / at.mode_norm for at in (placed, there))
    return not abs(math.log(after) - math.log(before)) <= drift


class _Bend:
    """What the tangents lack: how log σ bends in C, a matrix K >= 0 learned on the way.

    Where a step s ends, the samples' gradient less the tangent's is about K s. Symmetric rank-one
    updates (Nocedal and Wright 2006, section 6.2) from K = 0, and only those that keep K >= 0:
    without a step there is no correction, and a step that went too far is shorter next time.
    """

    def __init__(self) -> None:
        self._vectors: list[np.ndarray] = []

    def times(self, x: np.ndarray) -> np.ndarray:
        """K x."""
        total = np.zeros_like(x)
        for vector in self._vectors:
            total += (vector @ x) * vector
        return total

    def learn(self, step: np.ndarray, change: np.ndarray) -> bool:
        """Take in that K ``step`` is about ``change``; False where K stays as it is."""
        left = change - self.times(step)
        along = float(left @ step)
        if along > 1e-8 * np.linalg.norm(left) * np.linalg.norm(step):
            self._vectors.append(left / math.sqrt(along))
            return True
        return False

    def added(self, model: Model, centre: np.ndarray) -> Model:
        """``model`` + (x - centre)ᵀ K (x - centre)/2."""

        def bent(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = model(x)
            away = x - centre
            push = self.times(away)
            return value + float(away @ push) / 2, gradient + push

        return bent


class _EnoughError(Exception):
    """Ends the minimization of a model."""


def _settled(course: list[float], value: float) -> bool:
    """Whether the last of the lowest values so far add little to what all of them took off."""
    if len(course) <= _WINDOW:
        return False
    return course[-1 - _WINDOW] - course[-1] < _ADDED * (value - course[-1])


@functools.cache
def _blas() -> ThreadpoolController:
    """The libraries that are loaded: they are looked for once."""
    return ThreadpoolController()


def _minimum(
    model: Model,
    start: np.ndarray,
    reach: float,
    value: float,
    tolerance: float,
    curvature: quasi_newton.Curvature,
) -> tuple[float, np.ndarray]:
    """(lowest value, where) of one model within ``reach`` of each parameter.

    It ends before the minimum where the rest cannot be worth it, or the model cannot be believed.
    """
    lowest, best = value, start
    course = []

    def function(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal lowest, best
        at, slope = model(parameters)
        if at < lowest and np.all(np.isfinite(slope)):
            lowest, best = at, parameters
        course.append(lowest)
        # no error falls below 0, nor its logarithm so far: where a tangent's σ does, it is lost
        if value - lowest > _LOST * max(1.0, abs(value)) or _settled(course, value):
            raise _EnoughError
        return at, slope

    # some hundred products of small matrices: threads of the BLAS would only wait for one another
    with _blas().limit(limits=1, user_api="blas"), contextlib.suppress(_EnoughError):
        quasi_newton.minimize(
            function,
            start,
            steps=_INNER,
            tolerance=tolerance / 30,
            window=1,
            box=(start - reach, start + reach),
            curvature=curvature,
        )
    return lowest, best
