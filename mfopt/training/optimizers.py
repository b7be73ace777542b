"""Optimizers by name, for the command line; any optax transformation works in the loop itself.

The optimizer sees only the noised mean, so whatever it does is post-processing and costs no
privacy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from mfopt import _check

if TYPE_CHECKING:
    import optax

OptimizerName = Literal["sgd", "momentum", "adam", "adamw", "adafactor"]
ScheduleName = Literal["constant", "cosine", "linear"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerName)
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


def schedule(name: str, learning_rate: float, steps: int, warmup: int = 0) -> optax.Schedule:
    """Learning rate by step: a linear rise over ``warmup`` steps, then ``name`` down to 0.

    "constant" stays at ``learning_rate``; "cosine" and "linear" reach 0 at ``steps``.

    Args:
      name: "constant", "cosine" or "linear".
      learning_rate: the highest rate.
      steps: number of steps.
      warmup: steps of the rise.
    """
    import optax

    rate = _check.positive("learning_rate", learning_rate)
    warmup = _check.integer("warmup", warmup, at_least=0)
    rest = max(1, _check.integer("steps", steps) - warmup)
    shapes = {
        "constant": lambda: optax.constant_schedule(rate),
        "cosine": lambda: optax.cosine_decay_schedule(rate, rest),
        "linear": lambda: optax.linear_schedule(rate, 0.0, rest),
    }
    if name not in shapes:
        raise _check.reject("schedule", name, f"must be one of {', '.join(SCHEDULES)}")
    if not warmup:
        return shapes[name]()
    # step t of the warm-up uses (t + 1) / warmup of the rate, so that no step is wasted at 0
    rise = optax.linear_schedule(rate / warmup, rate, max(1, warmup - 1))
    return optax.join_schedules([rise, shapes[name]()], [warmup])


def make_optimizer(
    name: str,
    learning_rate: float | optax.Schedule,
    *,
    momentum: float = 0.9,
    beta1: float = 0.9,
    beta2: float = 0.999,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """The optax optimizer ``name``.

    Args:
        name: "sgd", "momentum", "adam", "adamw" or "adafactor".
        learning_rate: a number or a schedule.
        momentum: of "momentum".
        beta1, beta2: of "adam" and "adamw".
        weight_decay: of "adamw"; decoupled, for all parameters.
    """
    import optax

    makers = {
        "sgd": lambda: optax.sgd(learning_rate),
        "momentum": lambda: optax.sgd(learning_rate, momentum=momentum),
        "adam": lambda: optax.adam(learning_rate, b1=beta1, b2=beta2),
        "adamw": lambda: optax.adamw(learning_rate, b1=beta1, b2=beta2, weight_decay=weight_decay),
        "adafactor": lambda: optax.adafactor(learning_rate, multiply_by_parameter_scale=False),
    }
    if name not in makers:
        raise _check.reject("optimizer", name, f"must be one of {', '.join(OPTIMIZERS)}")
    if not 0 <= momentum < 1:
        raise _check.reject("momentum", momentum, "must lie in [0, 1)")
    return makers[name]()
