"""Correlated noise in the noise step of an Opacus optimizer."""

from __future__ import annotations

import math
import os
from typing import Any

from mfopt._runtime import _check, _extras
from mfopt.noise.for_torch import STATE, SilentNoise, TorchNoise, refuse_narrow, split_state
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.noise.sealed import KeyFile, SealedNoise
from mfopt.noise.stream import NoiseStream

with _extras.required():
    from opacus import optimizers
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed

_KNOWN = (
    optimizers.DPOptimizer,
    optimizers.DPOptimizerFastGradientClipping,
    optimizers.DistributedDPOptimizer,
    optimizers.DistributedDPOptimizerFastGradientClipping,
)


def replace_noise(
    optimizer: optimizers.DPOptimizer,
    stream: NoiseStream,
    *,
    seed: int | None = None,
    key: Any = None,
    key_folder: str | os.PathLike[str] = KEY_FOLDER,
) -> TorchNoise | SilentNoise:
    """Make ``optimizer`` add the correlated noise of ``stream`` in place of its own; returns it.

    :func:`mfopt.torch.make_private` does this and the rest: sampling, normalizer, refusals. Here
    clipping, accumulation, scaling and the optimizer itself stay Opacus's, and so does the number
    that the noised sum is divided by: Opacus sets ``expected_batch_size`` from the loader, and for
    a loader that it does not know it is wrong. Noise is added once per *logical* step: physical
    batches that Opacus skips (``signal_skip_step``) use none. With several processes rank 0 adds
    the noise and keeps buffers; on other ranks something stands in for it.

    Opacus's accountant knows neither the matrix nor the sampling of the factorization: no ε that
    it prints holds for this mechanism. Make the optimizer with ``noise_multiplier=0``, for which
    it reports no finite ε, and quote the factorization's guarantee. The data loader must execute
    the factorization's sampling scheme (``poisson_sampling=False`` and batches from the scheme).

    The state of the noise, sealed, is part of the optimizer's ``state_dict`` from now on: Opacus's
    ``save_checkpoint`` and ``load_checkpoint`` resume the run. Replace first and load afterwards:
    an optimizer that has loaded a state is refused where it shows, and plain SGD does not.

    Args:
      optimizer: of Opacus, flat clipping, unused so far.
      stream: strategy, scale and types; its clip norm is the optimizer's ``max_grad_norm``.
      seed, key: as for :class:`~mfopt.noise.for_torch.TorchNoise`.
      key_folder: where the key of the optimizer's states is kept, readable by the owner only.

    Raises:
      UsageError: if the optimizer clips to another norm than ``stream``, has a noise multiplier
        other than 0 or that of ``stream``, is in ``secure_mode`` (which this does not provide),
        or is of a type whose noise is not a single addition to the sum of clipped gradients
        (adaptive or per-layer clipping, FSDP). If its parameters are narrower than float32, which
        Opacus adds gradients up in. If the noise was replaced before, or the optimizer
        has gradients or a state: what it released had other noise.
    """
    check_optimizer(optimizer, stream)
    noise: TorchNoise | SilentNoise = SilentNoise(stream)
    if getattr(optimizer, "rank", 0) == 0:
        noise = TorchNoise(stream, optimizer.params, seed=seed, key=key)
    install(optimizer, SealedNoise(noise, KeyFile(key_folder)))
    return noise


def check_optimizer(optimizer: Any, stream: NoiseStream) -> None:
    """Raise the errors of :func:`replace_noise`."""
    if type(optimizer) not in _KNOWN:
        rule = f"must be one of {[known.__name__ for known in _KNOWN]}"
        raise _check.reject("optimizer", type(optimizer).__name__, rule)
    _refuse_used(optimizer)
    refuse_narrow("optimizer.params", optimizer.params)
    if not math.isclose(optimizer.max_grad_norm, stream.clip_norm, rel_tol=1e-12):
        rule = f"differs from the clip norm of the stream, {stream.clip_norm}"
        raise _check.reject("optimizer.max_grad_norm", optimizer.max_grad_norm, rule)
    if optimizer.noise_multiplier not in (0, stream.noise_multiplier):
        rule = f"must be 0, or that of the factorization, {stream.noise_multiplier}"
        way_out = "Use 0: Opacus's accountant then claims nothing."
        raise _check.reject("optimizer.noise_multiplier", optimizer.noise_multiplier, rule, way_out)
    if optimizer.secure_mode:
        raise _check.reject("optimizer.secure_mode", True, "is not provided by correlated noise")


def install(optimizer: optimizers.DPOptimizer, source: Any) -> None:
    """Make the noise step, ``state_dict`` and ``load_state_dict`` of ``optimizer`` use ``source``.

    ``source``: a noise that seals its state, or a run. ``source.add_to(sums)`` gets one tensor for
    each of ``optimizer.params``; where another process adds the noise, it leaves them as they are.
    """

    def add_noise() -> None:
        for parameter in optimizer.params:
            _check_processed_flag(parameter.summed_grad)
        source.add_to([p.summed_grad.view_as(p) for p in optimizer.params])
        for parameter in optimizer.params:
            parameter.grad = parameter.summed_grad.view_as(parameter)
            _mark_as_processed(parameter.summed_grad)

    plain_state, plain_load = optimizer.state_dict, optimizer.load_state_dict

    def state_dict() -> dict[str, Any]:
        return {**plain_state(), STATE: source.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        rest, found = split_state(state)
        source.check_state_dict(found)
        plain_load(rest)
        source.load_state_dict(found)

    optimizer.add_noise = add_noise
    optimizer.state_dict, optimizer.load_state_dict = state_dict, load_state_dict


def _refuse_used(optimizer: optimizers.DPOptimizer) -> None:
    """Raise :class:`UsageError` for an optimizer whose noise was replaced, or that has worked."""
    if "add_noise" in vars(optimizer):
        rule = "has its noise replaced already: a second stream would start at step 0"
        way_out = "Make a new optimizer for a new run."
        raise _check.reject("optimizer", type(optimizer).__name__, rule, way_out)
    worked = optimizer.original_optimizer.state or any(
        p.grad is not None or p.summed_grad is not None for p in optimizer.params
    )
    if worked or getattr(optimizer.original_optimizer, "_opt_called", False):
        rule = "has gradients or a state from earlier steps, whose noise was not this stream's"
        way_out = "Replace the noise before the first backward pass."
        raise _check.reject("optimizer", type(optimizer).__name__, rule, way_out)
