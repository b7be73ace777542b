"""Sums of clipped gradients, one for each example."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from mfopt._runtime import _check
from mfopt.noise.for_torch import refuse_narrow
from mfopt.torch import checks, per_example, probe

# as in the trainer: float32 norms are rounded, and what is added must stay below the bound; and
# float32 loses the squares of entries below 1e-19
_MARGIN = 1.0 - 2.0**-18
_LEAST = 1e-10
_REENTRANT = (
    "Give use_reentrant=False: torch.utils.checkpoint.checkpoint(..., use_reentrant=False), "
    'gradient_checkpointing_kwargs={"use_reentrant": False} in transformers.'
)
_one_by_one: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # vmap has no rule for these


def add_clipped(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    batch: Any,
    max_grad_norm: float,
    sum_of: Callable[[torch.Tensor], torch.Tensor],
    *,
    microbatch: int | None = None,
    probed: Any = None,
) -> torch.Tensor:
    """Add Σ clip(gradient of one example) to ``sum_of(parameter)`` for every trainable parameter.

    In place of ``loss(module, batch).backward()``: the loss is computed for batches of one example
    each, and each one's gradient is scaled down to norm ``max_grad_norm`` over all parameters
    before they are added. An example whose gradient is not finite adds nothing. Where a layer has
    no rule for ``torch.vmap`` (GRU, activation checkpointing, masks that are read), a warning
    names it, and from then on examples go through the model one after the other.

    Args:
      module: without layers that mix examples (batch normalization).
      loss: ``loss(module, batch)``, a scalar; ``module`` is to be called as usual.
      batch: tensors, or nested tuples, lists and dictionaries of them, examples along the first
        axis; one of no examples adds 0.
      max_grad_norm: bound on one example's norm, in l2.
      sum_of: gives the tensor, of its shape, that a parameter's sum is added to.
      microbatch: examples whose gradients are held at once; all of them if left out.
      probed: asks for a probe (:mod:`mfopt.torch.probe`) of this pass, which leaves this object out
        of what must not change: the one that keeps the sums.

    Returns:
      The mean loss, detached: not private.

    Raises:
      UsageError: no module, a loss that is no scalar or does not call the module that it is given,
        no trainable parameters or such as are narrower than float32 (their sums would be too),
        layers that add up gradients by themselves, or tensors of unequal length; what a probe shows
        to remember examples.
    """
    bound = _check.positive("max_grad_norm", max_grad_norm)
    module = getattr(module, "_orig_mod", module)  # of torch.compile, which knows no vmap
    trained = trained_in(module)
    if not callable(loss):
        raise _check.reject("loss", type(loss).__name__, "must be a function of (module, batch)")
    if bound < _LEAST:
        rule = f"must be at least {_LEAST:g}"
        raise _check.reject("max_grad_norm", bound, rule, "Scale the loss, and it.")
    checks.refuse_layers(module)
    tensors, structure = _split(batch)
    place = next(iter(trained.values())).device
    tensors = [leaf.to(place) for leaf in tensors]
    names = {p: name for name, p in module.named_parameters()}
    frozen = {name: _whole(p) for p, name in names.items() if name not in trained}
    buffers = dict(module.named_buffers())
    # once in each layer: PyTorch would not put back what it finds twice in one
    places = {
        f"{prefix}.{name}".lstrip("."): names[p]
        for prefix, layer in module.named_modules()
        for name, p in layer._parameters.items()
        if p is not None
    }
    calls = [0]

    def of_one(parameters: dict[str, torch.Tensor] | None, *example: torch.Tensor) -> torch.Tensor:
        alone = pytree.tree_unflatten([part.unsqueeze(0) for part in example], structure)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if parameters is None:
                return module(*args, **kwargs)
            values = {**parameters, **frozen}
            placed = {place: values[name] for place, name in places.items()}
            return functional_call(module, {**placed, **buffers}, args, kwargs, tie_weights=False)

        value = loss(call, alone)
        if not isinstance(value, torch.Tensor) or value.ndim:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise _check.reject("loss", given, "must give a scalar tensor", "Return its mean().")
        if not calls[0]:
            called = getattr(loss, "__name__", type(loss).__name__)
            rule = "does not call the module that it is given: its gradient would be 0"
            way_out = "Call the first argument of loss(module, batch), "
            way_out += "and not the model by its name."
            raise _check.reject("loss", called, rule, way_out)
        return value

    detached = {name: _whole(p) for name, p in trained.items()}
    spread = any(map(checks.is_shard, trained.values()))

    def one_by_one(parts: tuple[torch.Tensor, ...]) -> tuple[per_example.Gradients, torch.Tensor]:
        rows, losses = [], []
        for example in zip(*parts, strict=True):
            with torch.enable_grad():
                value = of_one(None, *example)
                try:  # of the module as it is: layers that keep their weights in lists see these
                    of = list(trained.values())
                    rows.append(torch.autograd.grad(value, of, materialize_grads=True))
                except RuntimeError as problem:
                    if "heckpoint" not in str(problem) or ".grad()" not in str(problem):
                        raise
                    rule = "recomputes by reentrant checkpoints, which give no gradient of an "
                    rule += "example"
                    name = type(module).__name__
                    raise _check.reject("module", name, rule, _REENTRANT) from None
            losses.append(value.detach())
        stacked = [per_example.GradientRows(torch.stack(x)) for x in zip(*rows, strict=True)]
        return {name: [x] for name, x in zip(trained, stacked, strict=True)}, torch.stack(losses)

    def each(parts: tuple[torch.Tensor, ...]) -> tuple[per_example.Gradients, torch.Tensor]:
        if module not in _one_by_one:
            eager = torch.compiler.set_stance("force_eager")
            with eager, _entered(module) as layers, _unhooked(module if spread else None):
                try:
                    return per_example.gradients(of_one, module, detached, names, parts)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as problem:
                    where, why = layers[-1] if layers else "its loss", str(problem)
        if spread:
            rule = f"has no rule for torch.vmap ({why.splitlines()[0][:200]}), as it must here"
            way_out = "Use a ZeroRedundancyOptimizer and no fully_shard."
            raise _check.reject(where, "in a model of fully_shard", rule, way_out)
        found = one_by_one(parts)
        if module not in _one_by_one:
            _one_by_one.add(module)
            text = f"{where} has no rule for torch.vmap ({why.splitlines()[0][:200]}): gradients "
            warnings.warn(f"{text}are computed one example after the other", stacklevel=4)
        return found

    def add(gradients: per_example.Gradients, sums: list[torch.Tensor]) -> None:
        with torch.no_grad(), per_example.full_precision({place.type}):
            joined = [
                (total, per_example.merged(gradients[k]))
                for total, k in zip(sums, trained, strict=True)
            ]
            bounds = [per_example.norm_bounds(x) for _, x in joined if x]
            if not bounds:
                return
            norm, rounding = (torch.stack(x).norm(dim=0) for x in zip(*bounds, strict=True))
            norm += rounding
            factor = _MARGIN * bound / norm.clamp(min=bound)
            factor = torch.where(torch.isfinite(norm), factor, 0.0)
            for total, parts in joined:
                for part in parts:
                    part.add_to(total, factor)

    def alone() -> list[torch.Tensor]:
        """The clipped gradient of the first example, with random numbers of its own."""
        contribution = [torch.zeros_like(total) for total in sums]
        with probe.seeded(tensors):  # by vmap, what is kept would be unusable after it
            gradients, _ = (each if spread else one_by_one)(tuple(leaf[:1] for leaf in tensors))
        add(gradients, contribution)
        return contribution

    def state() -> probe.Contents:
        return probe.contents([probed], module=module, loss=loss)

    sums = [sum_of(p) for p in trained.values()]
    count = len(tensors[0])
    if not count:
        return torch.zeros(())
    if probed is not None:
        before, contribution, kept = state(), alone(), state()
        probe.refuse_changes(before, kept, made=True)
    block = count if microbatch is None else _check.integer("microbatch", microbatch)
    loss_sum = torch.zeros((), device=tensors[0].device)
    for parts in zip(*(torch.split(leaf, block) for leaf in tensors), strict=True):
        gradients, losses = each(parts)
        loss_sum += losses.detach().sum()
        add(gradients, sums)
    if probed is not None:
        probe.refuse_changes(kept, state())
        probe.refuse_difference(contribution, alone(), bound)
    return loss_sum / count


def trained_in(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trainable parameters by name; raises as :func:`add_clipped` without any, or in 16 bits."""
    _check.kind("module", module, torch.nn.Module)
    for layer in module.modules():
        reshard: Any = getattr(layer, "reshard", None)
        if reshard is not None:  # FSDP2 may have left whole parameters in place
            reshard()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise _check.reject("module", type(module).__name__, "has no trainable parameters")
    refuse_narrow("module", trained.values())
    return trained


def examples_in(batch: Any) -> int:
    """Number of examples in a batch; raises as :func:`add_clipped` for what is no batch."""
    return int(_split(batch)[0][0].shape[0])


def _split(batch: Any) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a batch, equally long, and what they stand in."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # kinds of dictionaries that PyTorch's trees do not know
    leaves, structure = pytree.tree_flatten(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in tensors}
    if len(tensors) != len(leaves) or len(sizes) != 1 or None in sizes:
        rule = "must be tensors with as many examples each along the first axis"
        raise _check.reject("batch", [tuple(leaf.shape) for leaf in tensors], rule)
    return tensors, structure


@contextlib.contextmanager
def _entered(module: torch.nn.Module) -> Iterator[list[str]]:
    """Names of the layers that a forward pass is in, the innermost last, also once it failed."""
    names = {layer: f"module.{name}" for name, layer in module.named_modules()}
    inside: list[str] = []

    def enter(layer: torch.nn.Module, _: Any) -> None:
        inside.append(f"{names.get(layer, 'a layer')} ({type(layer).__name__})")

    def leave(*_: Any) -> None:
        inside.pop()

    hooks = torch.nn.modules.module
    with contextlib.ExitStack() as stack:
        for hook in (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave),
        ):
            stack.callback(hook.remove)
        yield inside


def _whole(p: Any) -> torch.Tensor:
    """A parameter without its gradient; gathered where processes have parts of it."""
    alone = p.detach()
    return alone.full_tensor() if checks.is_shard(alone) else alone


@contextlib.contextmanager
def _unhooked(module: torch.nn.Module | None) -> Iterator[None]:
    """Without the hooks of FSDP2, which would put its parameters in place of those given."""
    kept = []
    for layer in module.modules() if module else ():
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            kept.append((hooks, dict(hooks)))
            for number, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del hooks[number]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
