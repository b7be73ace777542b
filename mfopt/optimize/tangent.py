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

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import spread
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.optimize import implicit
from mfopt.optimize.objective import AmplifiedObjective, Evaluation, Loss, Objective
from mfopt.strategies import Strategy

Model = Callable[[np.ndarray], tuple[float, np.ndarray]]


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
    _touched: tuple[Any, Any] | None = None  # log σ and ∂ log σ/∂G, of the last tangent

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
        target = np.asarray(self._epsilon), np.asarray(math.log(self._delta))
        touching = _model(self._loss, self._law, self._build)
        quadratic = self.quadratic(parameters)
        frozen = self._frozen(self._foreseen(quadratic))
        (root, norm), slope = _slope(self._law, quadratic, frozen, *target)
        log_sigma = self._learned(root)
        where = spread.gathered((jnp.asarray(root.log_sigma), slope), self._devices)
        if math.isfinite(log_sigma):
            self._touched = where

        @float64
        def model(x: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = touching(x, *where)
            return float(value), np.asarray(gradient)

        value, gradient = model(parameters)
        at = Evaluation(value, gradient, math.exp(log_sigma), float(norm))
        self._last = np.asarray(parameters).tobytes(), at
        return Tangent(at, model)

    def _foreseen(self, quadratic: Any) -> float:
        """log σ by the tangent before."""
        if self._touched is None:
            return self._start
        log_sigma, slope = self._touched
        parts = zip(jax.tree.leaves(slope), jax.tree.leaves(quadratic), strict=True)
        # without the BLAS, whose threads would go on waiting for more beside the samples' own
        product = 2 * sum(float(np.sum(np.asarray(h) * np.asarray(g))) for h, g in parts)
        near = float(log_sigma) + math.log(product) / 2 if product > 0 else math.nan
        return near if math.isfinite(near) else self._start


@functools.partial(_quick.jit, static_argnums=0)
def _slope(
    law: SampledLaw,
    quadratic: Any,
    frozen: implicit.Frozen,
    epsilon: jax.Array,
    log_delta: jax.Array,
) -> tuple[tuple[implicit.Root, jax.Array], Any]:
    """((root, norm of C), ∂ log σ/∂G); compiled once for all strategies."""

    def value(quadratic: Any) -> tuple[jax.Array, tuple[implicit.Root, jax.Array]]:
        reduced = law.prepared(quadratic)
        root = implicit.root(law, reduced, frozen, epsilon, log_delta)
        return root.log_sigma, (root, law.norm(reduced))

    (_, found), slope = jax.value_and_grad(value, has_aux=True)(quadratic)
    return found, slope


@functools.lru_cache(maxsize=16)
def _model(loss: Loss, law: SampledLaw, build: Callable[[jax.Array], Strategy]) -> Any:
    """(loss, gradient) with log σ ≈ ``log_sigma`` + log(2 <slope, G>)/2."""

    def value(x: jax.Array, log_sigma: jax.Array, slope: Any) -> jax.Array:
        strategy = build(x)
        weight = 2 * law.product(slope, strategy)
        return loss(strategy, jnp.exp(log_sigma) * jnp.sqrt(weight))

    return _quick.jit(jax.value_and_grad(value))
