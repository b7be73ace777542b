"""The objective, the logarithm of an error of (C, σ) with σ calibrated to (ε, δ), and its tangents.

All that σ knows of C is ``SampledLaw.quadratic``: under balls-in-bins the Gram matrix G of its
modes. Over long ways in C log σ is nearly the logarithm of a linear function of G. With
H = ∂ log σ/∂G at G₀, and <H, G₀> = 1/2 because σ grows like the square root of G,

    log σ(G) ≈ log σ₀ + log(2 <H, G>)/2

has the value and the slope of log σ at G₀ and needs no samples. So samples are asked for H once,
the error with this σ is minimized to its end, and that again from there: where a tangent's minimum
stays where it was touched, the gradient of the error itself is 0 (majorize-minimize, Lange 2016,
with a tangent in place of a proven majorant, so every step is checked against the samples).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import final_model, query_error
from mfopt._runtime import _check, _float64, _quick
from mfopt._runtime._arrays import Scalar
from mfopt._runtime._float64 import wide
from mfopt._runtime._types import JsonObject, PyTree
from mfopt.accounting.monte_carlo import chunked, sharding
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.errors import FailureError
from mfopt.optimize import implicit
from mfopt.optimize.parameterization import Build, Parameterization
from mfopt.strategies import Strategy
from mfopt.workloads import PrefixSums, Workload

Loss = Callable[[Strategy, Scalar], jax.Array]
"""A differentiable function of (strategy, σ); it is minimized as it stands."""

# Largest distance of log σ, at a fixed scale of C, from where a proposal was placed: from there
# the proposal is placed again. At ε = 0.5 values on a proposal 0.5 away are 0.14% too low.
KEEP = 0.1
_CLOSE, _ATTEMPTS = 0.03, 4  # the same for a proposal of the point itself, and placements at most


@functools.lru_cache(maxsize=64)
def log_rmse(workload: Workload, n: int) -> Loss:
    """Logarithm of σ·‖A C⁻¹‖_F/√n."""
    return lambda strategy, sigma: jnp.log(query_error.rmse(workload, strategy, n, sigma))


@functools.lru_cache(maxsize=64)
def log_max_error(workload: Workload, n: int) -> Loss:
    """Logarithm of the largest standard deviation of any query."""
    return lambda strategy, sigma: jnp.log(query_error.max_error(workload, strategy, n, sigma))


OBJECTIVES = ("robust", "final", "rmse", "max")


@dataclasses.dataclass(frozen=True)
class Objective:
    """Error of (C, σ) to minimize.

    Attributes:
      name: "robust" mixes the workload's mean squared error and the final model's
        (:class:`mfopt.final_model.MixedError`), "final" is the final model's alone; "rmse" and
        "max" are the workload's.
      schedule: learning rates that the final model is trained with; None stands for
        :data:`mfopt.final_model.DEFAULT_SCHEDULES`, each counted alike.
      workload: A, whose queries' error counts.

    Raises:
      UsageError: another name, or a schedule for an error that has none.
    """

    name: str = "robust"
    schedule: final_model.Schedule | None = None
    workload: Workload = dataclasses.field(default_factory=PrefixSums)

    def __post_init__(self) -> None:
        _check.choice("objective", self.name, OBJECTIVES)
        _check.kind("workload", self.workload, Workload, "ToeplitzWorkload(coefs) makes one.")
        if self.schedule is not None and self.name in ("rmse", "max"):
            rule = f"has no effect with `objective={self.name}`"
            raise _check.reject("schedule", self.schedule, rule, "Leave one of them out.")
        if isinstance(self.schedule, str):
            _check.choice("schedule", self.schedule, final_model.SCHEDULES)

    @classmethod
    def chosen(
        cls, name: str | None, schedule: final_model.Schedule | None, workload: Workload | None
    ) -> Objective:
        """The objective asked for; by default "robust", and "rmse" of a workload of one's own."""
        if name is None:
            own_workload = workload is not None and workload != PrefixSums()
            name = "rmse" if own_workload and schedule is None else "robust"
        return cls(name, schedule, PrefixSums() if workload is None else workload)

    @property
    def any_length(self) -> bool:
        """True where it is defined for every number of iterations."""
        named_schedule = self.schedule is None or isinstance(self.schedule, str)
        return named_schedule and self.workload == PrefixSums()

    def loss(self, n: int) -> Loss:
        """Loss to minimize for n iterations."""
        if self.name == "rmse":
            return log_rmse(self.workload, n)
        if self.name == "max":
            return log_max_error(self.workload, n)
        schedules = final_model.DEFAULT_SCHEDULES if self.schedule is None else (self.schedule,)
        share = final_model.WORKLOAD_SHARE if self.name == "robust" else 0.0
        return final_model.MixedError(self.workload, n, schedules, share)

    def describe(self) -> JsonObject:
        """Record of it, JSON values only."""
        schedule = self.schedule
        if schedule is not None and not isinstance(schedule, str):
            schedule = "rates of its own"
        return {"name": self.name, "schedule": schedule}


class Evaluation(NamedTuple):
    """Objective value, gradient (parameters,), σ on the frozen samples, largest mode norm of C."""

    value: float
    gradient: np.ndarray
    noise_multiplier: float
    mode_norm: float = 1.0

    @property
    def usable(self) -> bool:
        """True where value and gradient are finite."""
        return math.isfinite(self.value) and bool(np.all(np.isfinite(self.gradient)))


class Placement(NamedTuple):
    """A proposal, and log of the σ that it was placed at over the scale of its C."""

    proposal: PyTree
    centre: float


class Tangent(NamedTuple):
    """The objective at one point, and the model that touches it there.

    Attributes:
      point: parameters.
      evaluation: value, gradient and σ on the frozen samples.
      placement: where the samples were put.
      drift: log σ over the scale of C, less the placement's centre.
      touch: (log σ, ∂ log σ/∂quadratic).
    """

    point: np.ndarray
    evaluation: Evaluation
    placement: Placement
    drift: float
    touch: tuple[Scalar, PyTree]


class _Statistic(NamedTuple):
    """What σ knows of one C.

    Attributes:
      quadratic: ``SampledLaw.quadratic``.
      reduced: what δ depends on.
      norm: largest mode norm of C.
      log_scale: log of the scale of C.
    """

    quadratic: PyTree
    reduced: PyTree
    norm: Scalar
    log_scale: Scalar


@wide
def built(build: Build, parameters: np.ndarray) -> Strategy:
    """The strategy of these parameters, of numpy arrays.

    Compiled as one: operation by operation its first call would take seconds.
    """
    strategy: Strategy = jax.device_get(_compiled(build)(np.asarray(parameters)))
    return strategy


_compiled = functools.lru_cache(maxsize=16)(_quick.jit)


class AmplifiedObjective:
    """A loss of (C, σ(C)) under amplification, on frozen samples.

    Args:
      loss: see :data:`Loss`.
      parameterization: how parameters make a strategy.
      law: sampled law of a scheme.
      target: ε and δ (add-remove, remove direction; the add direction is checked when the result
        is calibrated).
      samples: an even number of frozen Monte Carlo samples.
      seed: pinned seed of these, or None for the operating system's entropy.

    Attributes:
      disagreement: largest difference of log error between two proposals of a point's own.
    """

    @wide
    def __init__(
        self,
        loss: Loss,
        parameterization: Parameterization,
        law: SampledLaw,
        target: tuple[float, float],
        samples: int,
        seed: int | None,
    ) -> None:
        self._build, self._law, self.disagreement = parameterization.build, law, law.disagreement
        self._epsilon, self._delta = target
        count = _check.integer("samples", samples, at_least=64)
        draws = self._law.draws(chunked.subkey(chunked.seed_key(seed), 0), count)
        self._devices = sharding.dividing(draws) if law.divisible else _float64.devices()[:1]
        self._draws = sharding.placed(draws, self._devices)
        hashable_loss = loss if isinstance(loss, Hashable) else functools.partial(loss)
        self._compiled_model = _model(hashable_loss, self._law, parameterization.build)

    def __call__(self, parameters: np.ndarray) -> Evaluation:
        """Value and gradient on a proposal placed at ``parameters`` themselves."""
        return self.placed(parameters).evaluation

    @wide
    def placed(
        self, parameters: np.ndarray, sigma: float = math.nan, anywhere: bool = True
    ) -> Tangent:
        """The tangent on a proposal placed at its own σ; its value is NaN where none was found.

        Args:
          parameters: where.
          sigma: σ there, or about that, where it is known.
          anywhere: whether σ is searched for from anywhere where none is found near that one.
        """
        statistic = self._statistic(parameters)
        nothing = np.full(np.shape(parameters), math.nan)
        tangent = Tangent(
            np.asarray(parameters),
            Evaluation(math.nan, nothing, math.nan, math.nan),
            Placement(None, math.nan),
            math.nan,
            (math.nan, ()),
        )
        is_known = math.isfinite(sigma) and sigma > 0
        for search in (False, True) if anywhere else (False,) if is_known else ():
            with contextlib.suppress(FailureError):  # no σ, or one beyond numerical range
                guessed = self._guess(parameters, search) if search or not is_known else sigma
                for _ in range(_ATTEMPTS):
                    if not (math.isfinite(guessed) and guessed > 0):
                        break
                    proposal = self._law.proposal(statistic.reduced, guessed, self._epsilon)
                    centre = math.log(guessed) - float(statistic.log_scale)
                    tangent = self._tangent(parameters, statistic, Placement(proposal, centre))
                    if abs(tangent.drift) <= _CLOSE:
                        return tangent
                    guessed = tangent.evaluation.noise_multiplier
        return tangent

    @wide
    def follow(self, parameters: np.ndarray, neighbour: Tangent, anywhere: bool = True) -> Tangent:
        """The tangent on the proposal of ``neighbour`` while that serves, else on its own."""
        statistic = self._statistic(parameters)
        log_sigma, slope = neighbour.touch
        parts = zip(jax.tree.leaves(slope), jax.tree.leaves(statistic.quadratic), strict=True)
        weight = 2 * sum(float(np.sum(np.asarray(h) * np.asarray(g))) for h, g in parts)
        # by the tangent; NaN where that is none
        log_sigma = float(log_sigma) + math.log(weight) / 2 if weight > 0 else math.nan
        # samples are not asked on a proposal that will not serve
        distance = log_sigma - float(statistic.log_scale) - neighbour.placement.centre
        if not abs(distance) > KEEP:
            tangent = self._tangent(parameters, statistic, neighbour.placement)
            if abs(tangent.drift) <= KEEP:
                return tangent
        return self.placed(parameters, math.exp(log_sigma), anywhere)

    @wide
    def tangent(self, parameters: np.ndarray, placement: Placement) -> Tangent:
        """The tangent on a given proposal; its value is NaN where no σ near it meets the target."""
        return self._tangent(parameters, self._statistic(parameters), placement)

    def _tangent(
        self, parameters: np.ndarray, statistic: _Statistic, placement: Placement
    ) -> Tangent:
        frozen = implicit.Frozen(self._draws, placement.proposal, placement.centre)
        target = np.asarray(self._epsilon), np.asarray(math.log(self._delta))
        log_sigma, slope = _slope(self._law, self._devices, statistic.quadratic, frozen, *target)
        touch = sharding.gathered((jnp.asarray(log_sigma), slope), self._devices)
        value, gradient = self._compiled_model(parameters, *touch)
        evaluation = Evaluation(
            float(value), np.asarray(gradient), math.exp(log_sigma), float(statistic.norm)
        )
        drift = float(log_sigma) - float(statistic.log_scale) - placement.centre
        return Tangent(np.asarray(parameters), evaluation, placement, drift, touch)

    @wide
    def model(self, tangent: Tangent, parameters: np.ndarray) -> tuple[float, np.ndarray]:
        """(value, gradient) at parameters with the σ of ``tangent``, without samples."""
        value, gradient = self._compiled_model(parameters, *tangent.touch)
        return float(value), np.asarray(gradient)

    def _statistic(self, parameters: np.ndarray) -> _Statistic:
        found: _Statistic = jax.device_get(_statistic(self._law, built(self._build, parameters)))
        return found

    def _guess(self, parameters: np.ndarray, search: bool) -> float:
        loss = self._law.near(built(self._build, parameters))
        if not search:
            return loss.start(self._epsilon, self._delta)
        model = OneUnit(loss, rough=True)
        return model.sought_noise_multiplier(self._epsilon, self._delta).value


@functools.partial(_quick.jit, static_argnums=0)
def _statistic(law: SampledLaw, strategy: Strategy) -> _Statistic:
    quadratic = law.quadratic(strategy)
    reduced = law.prepared(quadratic)
    return _Statistic(quadratic, reduced, law.norm(reduced), law.log_scale(reduced))


# compiled for all strategies
_slope = _quick.jit(implicit.solved, static_argnums=(0, 1))


@functools.lru_cache(maxsize=16)
def _model(loss: Loss, law: SampledLaw, build: Build) -> Any:
    """(loss, gradient) with log σ ≈ ``log_sigma`` + log(2 <slope, quadratic>)/2."""

    def value(x: jax.Array, log_sigma: jax.Array, slope: PyTree) -> jax.Array:
        strategy = build(x)
        weight = 2 * law.product(slope, strategy)
        return loss(strategy, jnp.exp(log_sigma) * jnp.sqrt(weight))

    return _quick.jit(jax.value_and_grad(value))
