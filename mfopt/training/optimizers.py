"""Optimizers by name, for the command line; any optax transformation works in the loop itself.

The optimizer sees only the noised mean, so whatever it does is post-processing. The noise's
variance is public: :func:`fitting_rate` fits rates to it (``docs/training/rates.md``), and
:func:`corrected_adam` takes it out of Adam's second moment, which estimates signal² + noise².
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt._runtime._types import PyTree
from mfopt.training.config import NOISE_MOVE, TrainConfig

BETA1, BETA2 = 0.9, 0.999  # decays of both moments of Adam


def schedule(name: str, learning_rate: float, steps: int) -> optax.Schedule:
    """Learning rate by step.

    "constant" stays at ``learning_rate``; the others reach 0 at ``steps``, where no step is taken
    any more: "cooldown" stays for the first half and then falls in a line.

    Args:
      name: one of "constant", "cooldown", "cosine", "linear".
      learning_rate, steps: the highest rate, and the number of all steps.
    """
    half = steps // 2
    shapes = {
        "cooldown": optax.linear_schedule(learning_rate, 0.0, steps - half, half),
        "constant": optax.constant_schedule(learning_rate),
        "cosine": optax.cosine_decay_schedule(learning_rate, steps),
        "linear": optax.linear_schedule(learning_rate, 0.0, steps),
    }
    return shapes[_check.choice("schedule", name, shapes)]


def make_optimizer(
    settings: TrainConfig,
    learning_rate: float | optax.Schedule,
    noise_variance: ArrayLike = 0.0,
) -> optax.GradientTransformation:
    """The optax optimizer of a run's settings.

    ``noise_variance``: that of each coordinate of the mean, by step, shape (n,), which "adam-bc"
    takes out.
    """
    optimizers = {
        "sgd": optax.sgd(learning_rate),
        "momentum": optax.sgd(learning_rate, momentum=settings.momentum),
        "adam": optax.adam(learning_rate),
        "adam-bc": corrected_adam(learning_rate, noise_variance),
    }
    return optimizers[settings.optimizer]


def fitting_rate(
    name: str,
    noises: tuple[float, float],
    *,
    steps: int,
    move: float = NOISE_MOVE,
    momentum: float = 0.9,
) -> float:
    """The learning rate at which, held constant, the noise alone moves a parameter by ``move``.

    With SGD the parameters are a sum of steps, so the rate is move / (noise of the sums).
    Adam and its kin divide by the size of a step, which is about that of its noise; "adam-bc" by
    what is left of it where there is nothing but noise, its floor.

    Args:
      name, steps: the optimizer, and the steps of the run.
      noises: standard deviation in a coordinate of the released mean, root mean square over
        steps; and the same of the sums of all means up to a step.
      move: root mean square over the steps of a run.
      momentum: of "momentum", which multiplies moves by 1 / (1 - momentum).
    """
    noise, noise_of_sums = noises
    if not noise * noise_of_sums > 0:
        raise _check.reject("noise", noise, "must be positive to fit a rate to it")
    rate = _check.positive("move", move) / noise_of_sums
    if name == "sgd":
        return rate
    if name == "momentum":
        return rate * (1 - momentum)
    if name == "adam-bc":  # root mean square of what a step is divided by less
        shares = _floor(np.arange(1, steps + 1), BETA2)
        noise /= float(np.sqrt(np.mean(1 / shares)))
    return rate * noise


def _floor(step: Any, beta2: float) -> Any:
    """Least share of the noise's variance that "adam-bc" leaves in the second moment at a step.

    sqrt(2 / k), the relative standard error of a Gaussian's variance from k values; k is the number
    of equal weights with the same sum of squares as those of the moment.
    """
    weights = (1 - beta2**step) ** 2 * (1 + beta2) / ((1 - beta2) * (1 - beta2 ** (2 * step)))
    return (2 / weights) ** 0.5


class _CorrectedState(NamedTuple):
    """State of :func:`corrected_adam`: that of Adam, and the noise's part of its second moment."""

    adam: Any
    noise: jax.Array


def corrected_adam(
    learning_rate: float | optax.Schedule,
    noise_variance: ArrayLike,
    beta1: float = BETA1,
    beta2: float = BETA2,
) -> optax.GradientTransformation:
    """Adam whose second moment is freed of the known variance of the noise.

    m̂ / sqrt(max(v̂ - φ̂, φ̂ sqrt(2 / k), 10⁻¹⁶)), where φ̂ is the mean of ``noise_variance`` with the
    weights of v̂, and k the number of steps that v̂ is a mean over: what is left may be no smaller
    than the standard error of the estimate v̂ of a Gaussian's variance φ̂.

    Args:
      learning_rate, beta1, beta2: a number or a schedule; decays of the two moments.
      noise_variance: of each coordinate of the released mean, by step, shape (n,), or a number. The
        last entry stands for all later steps.

    Source: Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC), with a fixed floor in place of k.
    """
    variances = jnp.atleast_1d(jnp.asarray(noise_variance, jnp.float32))

    adam = optax.scale_by_adam(beta1, beta2)

    def init(params: PyTree) -> _CorrectedState:
        return _CorrectedState(adam.init(params), jnp.float32(0))

    def update(
        updates: PyTree, state: _CorrectedState, params: PyTree = None
    ) -> tuple[PyTree, _CorrectedState]:
        earlier = state.adam.count
        variance = variances[jnp.minimum(earlier, len(variances) - 1)]
        _, moments = adam.update(updates, state.adam)
        step = moments.count
        noise = beta2 * state.noise + (1 - beta2) * variance
        mean_bias = 1 - beta1**step
        square_bias = 1 - beta2**step
        phi = noise / square_bias
        floor = jnp.maximum(phi * _floor(step, beta2), 1e-16)
        rate = learning_rate(earlier) if callable(learning_rate) else learning_rate
        moved = jax.tree.map(
            lambda m, v: (
                -rate * (m / mean_bias) / jnp.sqrt(jnp.maximum(v / square_bias - phi, floor))
            ),
            moments.mu,
            moments.nu,
        )
        return moved, _CorrectedState(moments, noise)

    return optax.GradientTransformation(init, update)
