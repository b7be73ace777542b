"""What is minimized: the logarithm of an error of (C, σ), with σ calibrated to (ε, δ)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _check, _float64, _quick, query_error
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, spread
from mfopt.accounting.monte_carlo.calibrate import rough
from mfopt.accounting.monte_carlo.protocol import SampledLaw, law
from mfopt.optimize import implicit
from mfopt.optimize.parameterization import Parameterization, built
from mfopt.strategies import Strategy
from mfopt.workloads import Workload

Loss = Callable[[Strategy, jax.Array], jax.Array]
"""A differentiable function of (strategy, σ); it is minimized as it stands."""


class Evaluation(NamedTuple):
    """Objective value, gradient (parameters,), σ on the frozen samples, largest mode norm of C."""

    value: float
    gradient: np.ndarray
    noise_multiplier: float
    mode_norm: float = 1.0


class Objective(Protocol):
    """A deterministic smooth function of the parameters."""

    def __call__(self, parameters: np.ndarray) -> Evaluation:
        """Value and gradient at ``parameters``."""

    def refresh(self, parameters: np.ndarray) -> None:
        """Move what is frozen to ``parameters``; the function changes within its noise."""


@functools.lru_cache(maxsize=64)
def log_rmse(workload: Workload, n: int) -> Loss:
    """log of σ·‖A C⁻¹‖_F/√n."""
    return lambda strategy, sigma: jnp.log(query_error.rmse(workload, strategy, n, sigma))


@functools.lru_cache(maxsize=64)
def log_max_error(workload: Workload, n: int) -> Loss:
    """log of the largest standard deviation of any query."""
    return lambda strategy, sigma: jnp.log(query_error.max_error(workload, strategy, n, sigma))


LOSSES = {"rmse": log_rmse, "max": log_max_error}


class AmplifiedObjective:
    """A loss of (C, σ(C)) under balls-in-bins amplification, on frozen samples.

    Args:
      loss: see :data:`Loss`.
      parameterization: how parameters make a strategy.
      scheme: one that a sampled privacy loss is known for, or such a law itself.
      epsilon, delta: privacy target (add-remove, remove direction; the add direction is
        checked when the result is calibrated).
      samples: frozen samples, even.
      seed: pinned seed of the samples, or None.
    """

    def __init__(
        self,
        loss: Loss,
        parameterization: Parameterization,
        scheme: Any,
        epsilon: float,
        delta: float,
        *,
        samples: int,
        seed: int | None,
    ) -> None:
        self._build = parameterization.build
        self._law = scheme if isinstance(scheme, SampledLaw) else law(scheme)
        self._epsilon, self._delta = epsilon, delta
        samples = _check.integer("samples", samples, at_least=64)
        key = chunked.seed_key(seed)
        self._calibration_key = chunked.subkey(key, 1)
        with _float64.scope():
            draws = self._law.draws(chunked.subkey(key, 0), samples)
            self._devices = implicit.devices(self._law, draws)
            self._draws = spread.placed(draws, self._devices)
        known = loss if isinstance(loss, Hashable) else functools.partial(loss)
        self._loss = known
        self._evaluate = _evaluation(known, parameterization.build, self._law)
        self._start = self._centre = self._fall = math.nan
        self._proposal: Any = None

    @float64
    def refresh(self, parameters: np.ndarray, known: float = math.nan) -> None:
        """Place the proposal at the σ that these parameters need, where it is not ``known``."""
        sigma = known
        if not math.isfinite(sigma) and self._proposal is not None:
            sigma = self(parameters).noise_multiplier
        if not math.isfinite(sigma):
            loss = self._law.near(built(self._build, parameters))
            sigma = rough(loss, self._epsilon, self._delta, self._calibration_key)
        reduced, log_scale = _reduced(self._law, self.quadratic(parameters))
        self._proposal = self._law.proposal(reduced, sigma, self._epsilon)
        self._start = math.log(sigma)
        self._centre = self._start - float(log_scale)

    @float64
    def quadratic(self, parameters: np.ndarray) -> Any:
        """All that σ knows of C at ``parameters``."""
        return _quadratic(self._law, built(self._build, parameters))

    @float64
    def __call__(self, parameters: np.ndarray) -> Evaluation:
        if self._proposal is None:
            self.refresh(parameters)
        target = np.asarray(self._epsilon), np.asarray(math.log(self._delta))
        (value, (root, norm)), gradient = self._evaluate(
            jnp.asarray(parameters), self._frozen(self._start), *target
        )
        log_sigma = self._learned(root)
        return Evaluation(float(value), np.asarray(gradient), math.exp(log_sigma), float(norm))

    def _frozen(self, start: float) -> implicit.Frozen:
        """What is frozen, for a search that begins at this log σ."""
        # NumPy's arrays as they are: `jnp.asarray` would be compiled for each of their shapes
        numbers: list[Any] = [np.asarray(x) for x in (self._centre, start, self._fall)]
        return implicit.Frozen(self._draws, self._proposal, *numbers)

    def _learned(self, root: implicit.Root) -> float:
        """log σ; the next search begins with what this one found."""
        log_sigma = float(root.log_sigma)
        if math.isfinite(log_sigma):
            self._start, self._fall = log_sigma, float(root.slope)
        return log_sigma


@functools.partial(_quick.jit, static_argnums=0)
def _quadratic(law: SampledLaw, strategy: Strategy) -> Any:
    return law.quadratic(strategy)


@functools.partial(_quick.jit, static_argnums=0)
def _reduced(law: SampledLaw, quadratic: Any) -> tuple[Any, jax.Array]:
    reduced = law.prepared(quadratic)
    return reduced, law.log_scale(reduced)


@functools.lru_cache(maxsize=16)
def _evaluation(
    loss: Loss, build: Callable[[jax.Array], Strategy], law: SampledLaw
) -> Callable[..., tuple[Any, ...]]:
    """((loss, (root, mode norm)), gradient) of (parameters, frozen, ε, log δ), for all ε, δ."""

    def value(
        parameters: jax.Array, frozen: implicit.Frozen, epsilon: jax.Array, log_delta: jax.Array
    ) -> tuple[jax.Array, tuple[implicit.Root, jax.Array]]:
        strategy = build(parameters)
        reduced = law.reduced(strategy)
        root = implicit.root(law, reduced, frozen, epsilon, log_delta)
        return loss(strategy, jnp.exp(root.log_sigma)), (root, law.norm(reduced))

    return _quick.jit(jax.value_and_grad(value, has_aux=True))
