"""Error of the final model: what the noise of a whole run leaves in the parameters at its end.

RMSE of prefix sums weighs all iterates alike, and does not order mechanisms by the model they train
to. Under a quadratic loss with curvature h along a direction, gradient descent with learning rates
η_t forgets the noise of step s at the rate of the later steps, so that the final model moves by
w_h·(C⁻¹z)σ with

    w_h[s] = η_s·exp(-h·Σ_{r>s} η_r),

and the excess loss is Σ_h ρ(h)·h·‖C⁻ᵀw_h‖²·σ²/2 (the noisy quadratic model; Koloskova et al. 2023
and Choquette-Choo et al. 2023 analyse C by it). ρ is log-uniform over h·Σ_t η_t from 0.1, a
direction that training hardly moves along, to 5, one that has converged: the range, among 0.01 to
0.3 and 1 to 100, that predicts test losses of 34 mechanisms well, and whose optima train best.
Directions of higher curvature are few in a model, and would weigh the noise of the last steps more
than it is felt. Directions are scaled to Σ_h ρ(h)·h·‖w_h‖² = 1, so the error of
independent noise is its noise multiplier: the *final-model error* of (C, σ) is the noise multiplier
of independent noise that would disturb the final model as much.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import query_error
from mfopt._runtime import _check, _sizes
from mfopt._runtime._arrays import Scalar
from mfopt.strategies import (
    Identity,
    Strategy,
)
from mfopt.workloads import SHAPES, Workload

CURVATURES = np.geomspace(0.1, 5, 10)  # h·Σ η
AVERAGED = 8  # "averaged" is the mean of the iterates of the last 1/8 of a run
# Share of the workload's mean squared error in the default objective. Of 0.3 to 0.6 on two models
# and five schedules at ε = 2, 0.4 has the smallest largest loss over the best peer's in each cell.
WORKLOAD_SHARE = 0.4
# Singular values of W, relative to the largest, below which they change an error by 1e-8 of it.
_NEGLIGIBLE = 1e-4
_BYTES = 480  # that an iteration takes for each schedule, while an error is computed

SCHEDULES = tuple(SHAPES)
DEFAULT_SCHEDULES = ("constant", "averaged", "linear", "wsd")
"""What the default C is for: no schedule is known, so none may be a trap."""

Schedule = str | Sequence[float] | np.ndarray
"""One of :data:`SCHEDULES`, or the learning rate of each iteration, shape (n,)."""


def learning_rates(schedule: Schedule, n: int) -> np.ndarray:
    """Learning rates η, shape (n,), up to a factor.

    Args:
      schedule: "constant", "averaged" (constant, and the model is the mean of the last iterates),
        "linear" and "cosine" (decay from the first step to 0 after the last), "wsd" (warm-up over
        the first tenth, constant, linear decay to 0 over the last quarter), or n rates >= 0.
      n: iterations.

    Raises:
      UsageError: another name, or rates that are not n finite numbers >= 0, one of them > 0.

    >>> learning_rates("linear", 4)
    array([1.  , 0.75, 0.5 , 0.25])
    """
    n = _sizes.iterations(n)
    if isinstance(schedule, str):
        shape = SHAPES[_check.choice("schedule", schedule, SCHEDULES)]
        return shape(1 - np.arange(n) / n)
    try:
        rates = np.asarray(schedule, np.float64)
    except (TypeError, ValueError):
        rates = np.zeros(0)
    if rates.shape != (n,) or not (np.all(np.isfinite(rates) & (rates >= 0)) and rates.any()):
        rule = (
            f"must be one of {', '.join(SCHEDULES)}, or {n} finite learning rates >= 0, one for "
            "each iteration, and not all 0"
        )
        raise _check.reject("schedule", schedule, rule)
    return rates


def directions(schedules: Sequence[Schedule], n: int) -> np.ndarray:
    """W, shape (directions, n): the squared final-model error is ‖W C⁻¹‖_F²σ².

    Its rows are sqrt(ρ(h)·h)·w_h; each schedule weighs the same and all together sum to ‖W‖_F = 1.

    Args:
      schedules: for each of which the final model counts.
      n: iterations.
    """
    if not (isinstance(schedules, list | tuple) and schedules):
        raise _check.reject("schedules", schedules, "must be a list or tuple of some schedules")
    _sizes.iterations(n, _BYTES * len(schedules))
    with _check.renamed_arguments({"schedule": "schedules"}):
        parts = [_directions(schedule, n) for schedule in schedules]
    return np.concatenate([part / np.linalg.norm(part) for part in parts]) / np.sqrt(len(parts))


def _directions(schedule: Schedule, n: int) -> np.ndarray:
    rates = learning_rates(schedule, n)
    curvatures = CURVATURES / rates.sum()
    forgotten = np.exp(-np.outer(curvatures, np.cumsum(rates)))  # by step t: exp(-h·Σ_{r<=t} η_r)
    averaged_steps = (
        -(-n // AVERAGED) if isinstance(schedule, str) and schedule == "averaged" else 1
    )
    ends = np.where(np.arange(n) >= n - averaged_steps, forgotten / averaged_steps, 0)
    later = np.cumsum(ends[:, ::-1], axis=1)[:, ::-1]  # of the iterates that a step is part of
    moved = rates * later / forgotten
    return np.sqrt(curvatures)[:, None] * moved


def error(
    strategy: Strategy,
    n: int,
    noise_multiplier: float,
    schedules: Sequence[Schedule] = DEFAULT_SCHEDULES,
) -> float:
    """Final-model error: the noise multiplier of independent noise that is as bad for the model.

    Args:
      strategy: C.
      n: iterations.
      noise_multiplier: σ relative to the clip norm, for C as stored.
      schedules: learning rates that count, alike.

    >>> from mfopt.strategies import Identity
    >>> round(error(Identity(), 16, 2.0), 12)
    2.0
    """
    _check.kind("strategy", strategy, Strategy)
    sigma = _check.positive("noise_multiplier", noise_multiplier)
    noise = strategy.solve_transposed(directions(schedules, n).T)
    return sigma * float(np.linalg.norm(noise))


class MixedError:
    """Logarithm of an error of (C, σ) to minimize: workload and final model, mixed.

    The square of the error is a weighted mean of two, each of which independent noise has at σ²:
    the workload's mean squared error over that of C = I, and the squared final-model error.
    """

    def __init__(
        self,
        workload: Workload,
        n: int,
        schedules: Sequence[Schedule] = DEFAULT_SCHEDULES,
        workload_share: float = WORKLOAD_SHARE,
    ) -> None:
        self._workload, self._n, self._share = workload, n, workload_share
        # directions of neighbouring curvatures nearly agree: fewer rows with the same ‖W C⁻¹‖_F
        _, sizes, axes = np.linalg.svd(directions(schedules, n), full_matrices=False)
        kept = sizes > _NEGLIGIBLE * sizes[0]
        self._rows = sizes[kept, None] * axes[kept]
        # compiled functions are cached by the objective
        self._content = (workload, n, workload_share, self._rows.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MixedError) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    def __call__(self, strategy: Strategy, noise_multiplier: Scalar) -> jax.Array:
        """log of the error, differentiable in the strategy and σ."""
        noise = jnp.asarray(strategy.solve_transposed(self._rows.T))
        total = (1 - self._share) * jnp.sum(noise**2)
        if self._share:
            variances = query_error.row_variances(self._workload, strategy, self._n)
            mean = jnp.mean(jnp.asarray(variances)) / _independent(self._workload, self._n)
            total = total + self._share * mean
        return jnp.log(noise_multiplier) + jnp.log(total) / 2


@functools.lru_cache(maxsize=16)
def _independent(workload: Workload, n: int) -> float:
    """Mean squared error of the workload with C = I and σ = 1."""
    return float(np.mean(query_error.row_variances(workload, Identity(), n)))
