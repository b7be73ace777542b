"""Correlated noise in the noise step of an Opacus optimizer."""

from __future__ import annotations

import math
from typing import Any

from mfopt import _extras

try:
    from opacus.optimizers import DPOptimizer
    from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
    from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
        DistributedDPOptimizerFastGradientClipping,
    )
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt import _check
from mfopt.noise.for_torch import TorchNoise
from mfopt.noise.stream import NoiseStream

_KNOWN = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DistributedDPOptimizer,
    DistributedDPOptimizerFastGradientClipping,
)
_STATE = "mfopt_noise"


def replace_noise(
    optimizer: DPOptimizer, stream: NoiseStream, *, seed: int | None = None, key: Any = None
) -> TorchNoise:
    """Make ``optimizer`` add the correlated noise of ``stream`` in place of its own.

    Clipping, accumulation, scaling and the optimizer itself stay Opacus's. Noise is added once
    per *logical* step: physical batches that Opacus skips (``signal_skip_step``) use none. With
    several processes rank 0 adds the noise, as in Opacus.

    Opacus's accountant knows neither the matrix nor the sampling of the factorization: no ε that
    it prints holds for this mechanism. Make the optimizer with ``noise_multiplier=0``, for which
    it reports no finite ε, and quote the factorization's guarantee. The data loader must execute
    the factorization's sampling scheme (``poisson_sampling=False`` and batches from the scheme).

    The state of the noise, **secret**, is part of the optimizer's ``state_dict`` from now on, and
    ``load_state_dict`` takes it from there: Opacus's ``save_checkpoint`` and ``load_checkpoint`` go
    on with the run. Write such files inside :func:`mfopt.noise.owner_only`. Replace first and load
    afterwards: an optimizer that has loaded a state already is refused where it shows, and plain
    SGD does not show it.

    Returns:
      The noise, for ``save`` and ``load``.

    Raises:
      UsageError: if the optimizer clips to another norm than ``stream``, has a noise multiplier
        other than 0 or that of ``stream``, is in ``secure_mode`` (which this does not provide),
        or is of a type whose noise is not a single addition to the sum of clipped gradients
        (adaptive or per-layer clipping, FSDP). If the noise was replaced before, or the optimizer
        has gradients or a state: what it released had other noise.
    """
    if type(optimizer) not in _KNOWN:
        raise _check.reject(
            "optimizer",
            type(optimizer).__name__,
            f"must be one of {[known.__name__ for known in _KNOWN]}",
        )
    _refuse_used(optimizer)
    if not math.isclose(optimizer.max_grad_norm, stream.clip_norm, rel_tol=1e-12):
        raise _check.reject(
            "optimizer.max_grad_norm",
            optimizer.max_grad_norm,
            f"differs from the clip norm of the stream, {stream.clip_norm}",
        )
    if optimizer.noise_multiplier not in (0, stream.noise_multiplier):
        raise _check.reject(
            "optimizer.noise_multiplier",
            optimizer.noise_multiplier,
            f"must be 0, or that of the factorization, {stream.noise_multiplier}",
            "Use 0: Opacus's accountant then claims nothing.",
        )
    if optimizer.secure_mode:
        raise _check.reject("optimizer.secure_mode", True, "is not provided by correlated noise")
    noise = TorchNoise(stream, optimizer.params, seed=seed, key=key)
    rank = getattr(optimizer, "rank", 0)

    def add_noise() -> None:
        made = noise.next() if rank == 0 else None
        for i, parameter in enumerate(optimizer.params):
            _check_processed_flag(parameter.summed_grad)
            total = parameter.summed_grad
            if made is not None:
                total = (total + made[i]).to(total.dtype)
            parameter.grad = total.view_as(parameter)
            _mark_as_processed(parameter.summed_grad)

    plain_state, plain_load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        return {**plain_state(), _STATE: noise.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        rest = dict(state)
        found = rest.pop(_STATE, None)
        if found is None:
            raise _check.reject(
                "state_dict",
                sorted(rest),
                "holds no noise state: the noise would start again, "
                "with another key, on a run whose first steps are released",
                "Load what this optimizer saved after replace_noise, or start a new run.",
            )
        noise.check_state_dict(found)
        plain_load(rest)
        noise.load_state_dict(found)

    optimizer.add_noise = add_noise
    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict
    return noise


def _refuse_used(optimizer: DPOptimizer) -> None:
    """Raise :class:`UsageError` for an optimizer whose noise was replaced, or that has worked."""
    if "add_noise" in vars(optimizer):
        raise _check.reject(
            "optimizer",
            type(optimizer).__name__,
            "has its noise replaced already: a second stream would start at step 0",
            "Make a new optimizer for a new run.",
        )
    worked = optimizer.original_optimizer.state or any(
        p.grad is not None or p.summed_grad is not None for p in optimizer.params
    )
    if worked or getattr(optimizer.original_optimizer, "_opt_called", False):
        raise _check.reject(
            "optimizer",
            type(optimizer).__name__,
            "has gradients or a state from earlier steps, whose noise was not this stream's",
            "Replace the noise before the first backward pass.",
        )
