"""``make_private`` as in Opacus, for a factorization."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from mfopt._runtime import _check, _extras
from mfopt.factorization import Factorization
from mfopt.noise import for_opacus
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.torch import checks, probe
from mfopt.torch.loader import dataset_of
from mfopt.torch.run import PrivateRun, refuse_private

with _extras.required():
    import opacus
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as Distributed

_REFUSED = {
    "poisson_sampling": "the batches are drawn by the factorization's own scheme",
    "noise_multiplier": "σ is the factorization's",
    "noise_generator": "the noise is the factorization's; `seed` pins it in experiments",
    "data_loader": "the loader is made here, from the data set",
    "target_epsilon": "ε is the factorization's: optimize or calibrate one for another ε",
    "target_delta": "δ is the factorization's: optimize or calibrate one for another δ",
    "epochs": "the number of steps is the factorization's",
}


def make_private(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    factorization: Factorization,
    max_grad_norm: float,
    *,
    criterion: Callable[..., Any] | None = None,
    grad_sample_mode: str = "hooks",
    loss_reduction: str = "mean",
    batch_first: bool = True,
    normalizer: float | None = None,
    seed: int | None = None,
    allow_uncertified: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    key_folder: str | os.PathLike[str] = KEY_FOLDER,
    **loader_options: Any,
) -> tuple[Any, ...]:
    """(module, optimizer, loader) that execute the mechanism of a factorization.

    As ``opacus.PrivacyEngine.make_private``, with the factorization in place of Poisson sampling
    and independent noise. An epoch is one pass over the loader; the loop is Opacus's::

        for epoch in range(factorization.sampling.epochs):
            for x, y in loader:  # may be empty: then the step adds noise only
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                optimizer.step()

    Large batches go through ``opacus.utils.batch_memory_manager.BatchMemoryManager`` as ever: noise
    comes once for each logical step. With
    ``opacus.distributed.DifferentiallyPrivateDistributedDataParallel`` each process takes its part
    of every batch and rank 0 adds the noise; several processes without it are refused. The
    optimizer's ``state_dict`` holds the run, sealed. ``grad`` is empty but inside ``step``: another
    optimizer finds nothing there.

    Formal guarantee: that of :class:`PrivateRun`; a unit is one record of the data set. Opacus's
    own accountant knows neither C nor these batches: it is detached.

    Args:
      module, optimizer: as for Opacus; the optimizer unused so far.
      dataset: with numbered records, or a plain DataLoader of such, whose batch size is not used.
      factorization, max_grad_norm, normalizer, seed, allow_uncertified, key_folder: as for
        :class:`PrivateRun`.
      criterion: for ``grad_sample_mode="ghost"``, the loss that Opacus wraps.
      grad_sample_mode: "hooks", "ew", "functorch" or "ghost".
      loss_reduction: of the loss that the module is trained on; with "sum" nothing is divided.
      batch_first: whether examples lie along the first axis.
      collate_fn, loader_options: as for :meth:`PrivateRun.loader`.

    Returns:
      (module, optimizer, loader), and with ghost clipping (module, optimizer, criterion, loader),
      as Opacus does.

    Raises:
      UsageError: as :class:`PrivateRun` and :meth:`PrivateRun.attach`; an option that contradicts
        the factorization (``poisson_sampling``, ``noise_multiplier``, clipping other than flat), an
        optimizer that lacks trainable parameters of the module, layers that mix examples or keep
        what they see; later, on a step, another clip norm, buffers that batches change, a
        ``GradScaler``; with ghost clipping, autocast.
    """
    for name, reason in _REFUSED.items():
        if loader_options.pop(name, None):
            raise _check.reject(name, "given", reason, "Leave it out.")
    if loader_options.pop("clipping", "flat") != "flat":
        rule = "noise is calibrated to one norm over all parameters"
        raise _check.reject("clipping", "not flat", rule)
    if grad_sample_mode == "ghost" and criterion is None:
        raise _check.reject("criterion", None, "ghost clipping needs the loss", "Give it.")
    _check.kind("module", module, torch.nn.Module)
    refuse_private(optimizer)
    checks.refuse_layers(module)
    checks.refuse_uncovered(module, (p for g in optimizer.param_groups for p in g["params"]))
    run = PrivateRun(
        factorization,
        len(dataset_of(dataset, loader_options)[0]),
        max_grad_norm,
        normalizer=normalizer,
        seed=seed,
        allow_uncertified=allow_uncertified,
        key_folder=key_folder,
    )
    if run.ranks > 1 and not isinstance(module, Distributed):
        rule = f"is in one of {run.ranks} processes, whose sums would not be added: those of rank "
        rule += "1 and above would have no noise"
        way_out = "Wrap it in opacus.distributed.DifferentiallyPrivateDistributedDataParallel."
        raise _check.reject("module", type(module).__name__, rule, way_out)
    loader = run.loader(dataset, collate_fn=collate_fn, **loader_options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Secure RNG turned off")  # its noise is not used
        engine = opacus.PrivacyEngine(accountant="rdp")
    options = {} if criterion is None else {"criterion": criterion}
    wrapped, private, *rest = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        batch_first=batch_first,
        loss_reduction=loss_reduction,
        poisson_sampling=False,
        grad_sample_mode=grad_sample_mode,
        **options,
    )
    private.expected_batch_size = run.normalizer / run.ranks  # Opacus's is for one process
    private.step_hook = None
    wrapped.forbid_grad_accumulation()
    for_opacus.check_optimizer(private, run.stream)
    run.start_noise(private.params)
    for_opacus.install(private, run)
    checks.watch_scaler(private)
    _probe_passes(wrapped, run, 0 if batch_first else 1)
    _watch_steps(wrapped, private, run)
    if grad_sample_mode == "ghost":
        _refuse_autocast(wrapped)
        _count_ghosts(wrapped, private, run)
    else:
        _count_examples(private, run)

    def forget() -> None:
        # a break in the middle of a logical step: its batch comes again, whole
        private._step_skip_queue.clear()
        private._is_last_step_skipped = False
        private.zero_grad(set_to_none=True)

    run.forget = forget
    return (wrapped, private, *rest)


def _probe_passes(module: Any, run: PrivateRun, axis: int) -> None:
    """Probe passes in training; and refuse layers that add up gradients by themselves."""
    probed: list[bool] = []

    def before_forward(_: Any, *arguments: Any) -> None:
        inner = module._module
        probed.clear()
        if module.training and torch.is_grad_enabled():
            checks.refuse_layers(module)
            probed[:] = [run.is_probed(inner, probe.examples_in(arguments, axis))]
            if probed[0]:
                probe.refuse_mixing(inner, arguments, axis, run)

    def after_forward(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and any(probed) and axis == 0 and output.ndim:
            return probe.LossProbe(output).recorded(output)
        return output

    module.register_forward_pre_hook(before_forward, with_kwargs=True)
    module.register_forward_hook(after_forward)


def _watch_steps(module: Any, optimizer: Any, run: PrivateRun) -> None:
    """Refuse steps that clip to another norm, of other parameters, or of a ``GradScaler``."""
    pre_step, bound = optimizer.pre_step, run.stream.clip_norm

    def checked() -> Any:
        checks.refuse_scaler(optimizer)
        checks.refuse_uncovered(module, optimizer.params)
        for owner, name, value in (
            (optimizer, "max_grad_norm", bound),
            (module, "max_grad_norm", bound),
            (optimizer, "expected_batch_size", run.normalizer / run.ranks),
        ):
            current = getattr(owner, name, value)
            if not math.isclose(current, value, rel_tol=1e-12):
                rule = f"was changed in the run, which is for {value}"
                way_out = "Leave it as it was given to make_private."
                raise _check.reject(name, current, rule, way_out)
        return pre_step()

    optimizer.pre_step = checked


def _count_examples(optimizer: Any, run: PrivateRun) -> None:
    """Tell ``run`` of all examples whose clipped gradients the optimizer adds up.

    Opacus takes gradients of single examples from elsewhere than ``grad``, which is emptied.
    """
    add_up = optimizer.clip_and_accumulate

    def counted() -> None:
        examples = len(optimizer._get_flat_grad_sample(optimizer.params[0]))
        run.count(examples, first=_nothing_summed(optimizer))
        add_up()

    optimizer.clip_and_accumulate = counted
    for p in optimizer.params:
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def _count_ghosts(module: Any, optimizer: Any, run: PrivateRun) -> None:
    """Counting as by :func:`_count_examples`, with ghost clipping, in the backward pass.

    Its sums are taken out of ``grad`` as soon as they are made, so that nothing can be added there.
    """
    factors, add_up = module.get_clipping_coef, optimizer.accumulate
    enable, empty = module.enable_hooks, optimizer.zero_grad
    clipped: list[int] = []  # by the backward pass since the last step of the optimizer
    sums: list[torch.Tensor | None] = []

    def get_clipping_coef() -> torch.Tensor:
        found: torch.Tensor = factors()
        clipped[:] = [len(found)]  # gradients of an earlier pass are dropped by Opacus
        return found

    def enable_hooks() -> None:  # the end of the second pass
        enable()
        sums[:] = [p.grad for p in optimizer.params]
        for p in optimizer.params:
            p.grad = None

    def zero_grad(set_to_none: bool = False) -> None:
        empty(set_to_none)
        clipped.clear()
        sums.clear()

    def accumulate() -> None:
        if any(p.grad is not None and bool(p.grad.any()) for p in optimizer.params):
            rule = "the gradients were not clipped: the backward pass was of another loss, or was "
            rule += "taken into account by a step already"
            way_out = "Call backward() on what the returned criterion gives, "
            way_out += "and zero_grad() before."
            raise _check.reject("criterion", "left out", rule, way_out)
        for p, total in zip(optimizer.params, sums or optimizer.params, strict=True):
            p.grad = total if sums and total is not None else torch.zeros_like(p)
        if clipped:
            run.count(sum(clipped), first=_nothing_summed(optimizer))
        clipped.clear()
        sums.clear()
        add_up()
        for p in optimizer.params:
            p.grad = None

    module.get_clipping_coef, module.enable_hooks = get_clipping_coef, enable_hooks
    optimizer.accumulate, optimizer.zero_grad = accumulate, zero_grad


def _nothing_summed(optimizer: Any) -> bool:
    return all(p.summed_grad is None for p in optimizer.params)


def _refuse_autocast(module: torch.nn.Module) -> None:
    """Let every layer that is trained refuse to work under autocast.

    Ghost clipping has PyTorch's own backward pass add up over examples, in the types of the forward
    pass; the sums are float32 again when a step sees them.
    """

    def before_forward(layer: torch.nn.Module, _: Any) -> None:
        kinds = {p.device.type for p in layer.parameters(recurse=False) if p.requires_grad}
        if any(torch.is_autocast_enabled(kind) for kind in kinds):
            rule = f"under autocast the sum of clipped gradients of {type(layer).__name__} would "
            rule += "be formed in 16 bits: its rounding lets one unit move it by more than the "
            rule += "clip norm"
            raise _check.reject("grad_sample_mode", "ghost", rule, 'Use "hooks", or no autocast.')

    for layer in module.modules():
        if any(p.requires_grad for p in layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(before_forward)
