"""Sums of clipped gradients, one for each example."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from mfopt._runtime import _check
from mfopt.torch import checks, per_example, probe, rows

# as in the trainer: float32 norms are rounded, and what is added must stay below the bound; and
# float32 loses the squares of entries below 1e-19
_MARGIN = 1.0 - 2.0**-18
_LEAST = 1e-10
_one_by_one: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # vmap has no rule for these


class Examples:
    """A module that takes examples one at a time, and clips the gradient of each.

    Where a layer has no rule for ``torch.vmap`` (GRU, activation checkpointing, masks that are
    read), a warning says so, and from then on examples go through the model one after the other.

    Args:
      module: with trainable parameters, none narrower than float32; without layers that mix
        examples (batch normalization).
      max_grad_norm: bound on one example's norm over all parameters, in l2.

    Raises:
      UsageError: a bound near 0, layers that add up gradients by themselves.
    """

    def __init__(self, module: torch.nn.Module, max_grad_norm: float) -> None:
        self.bound = max_grad_norm
        # of torch.compile, which knows no vmap
        self.module: torch.nn.Module = getattr(module, "_orig_mod", module)
        self.trained = {k: p for k, p in self.module.named_parameters() if p.requires_grad}
        if self.bound < _LEAST:
            rule = f"must be at least {_LEAST:g}"
            raise _check.reject("max_grad_norm", self.bound, rule, "Scale the loss, and it.")
        checks.refuse_layers(self.module)
        checks.hold_weights(self.module)
        self.device = next(iter(self.trained.values())).device
        self._names = {p: name for name, p in self.module.named_parameters()}
        self._spread = any(map(checks.is_shard, self.trained.values()))
        # gathered where processes have parts of them
        self._whole: dict[str, torch.Tensor] = {
            name: getattr(p.detach(), "full_tensor", p.detach)() for p, name in self._names.items()
        }
        # once in each layer: PyTorch would not put back what it finds twice in one
        self._places = {
            f"{prefix}.{name}".lstrip("."): self._names[p]
            for prefix, layer in self.module.named_modules()
            for name, p in layer._parameters.items()
            if p is not None
        }

    def forward(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        parts: Sequence[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], per_example.Pullback]:
        """(outputs of all examples, what gives gradients of each example from those of outputs).

        Args:
          function: of (what calls the module, *tensors of one example), some tensors.
          parts: tensors, examples along the first axis.
        """
        if self.module in _one_by_one and not self._spread:
            return self._one_by_one(function, parts)

        def of_one(
            copies: Mapping[str, torch.Tensor], *example: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            values = {**self._whole, **copies}
            state = {place: values[name] for place, name in self._places.items()}
            state |= self.module.named_buffers()

            def call(*args: object, **kwargs: object) -> object:
                return functional_call(self.module, state, args, kwargs, tie_weights=False)

            return function(call, *example)

        detached = {name: self._whole[name] for name in self.trained}
        with _eager(self.module):
            try:
                outputs, pullback = per_example.forward(
                    of_one, self.module, detached, self._names, parts
                )
            except RuntimeError as problem:
                return self._without_rule(problem, function, parts)

        def gradients(cotangents: Sequence[torch.Tensor | None]) -> per_example.Gradients:
            try:
                return pullback(cotangents)
            except RuntimeError as problem:  # of checkpoints, which compute layers again
                return self._without_rule(problem, function, parts)[1](cotangents)

        return outputs, gradients

    def _without_rule(
        self,
        problem: RuntimeError,
        function: Callable[..., tuple[torch.Tensor, ...]],
        parts: Sequence[torch.Tensor],
    ) -> tuple[Sequence[torch.Tensor], per_example.Pullback]:
        """Results of :meth:`forward` one example after the other, from now on, with a warning."""
        if isinstance(problem, torch.OutOfMemoryError):
            raise problem
        name, reason = type(self.module).__name__, str(problem).partition("\n")[0]
        why = f"has no rule for torch.vmap ({reason[:200]})"
        if self._spread:
            raise _check.reject("module", f"{name} of fully_shard", why, "Use no fully_shard.")
        result = self._one_by_one(function, parts)
        _one_by_one.add(self.module)
        text = f"{name} {why}: gradients are computed one example after the other"
        warnings.warn(text, stacklevel=6)
        return result

    @contextlib.contextmanager
    def probed(
        self,
        function: Callable[..., tuple[torch.Tensor, ...]],
        parts: Sequence[torch.Tensor],
        ignored: object,
        **roots: object,
    ) -> Iterator[None]:
        """Refuse passes inside that change what can be reached, or what an example adds to a sum.

        Args:
          function, parts: as for :meth:`forward`.
          ignored: object that is left out of what must not change; None: nothing is probed.
          roots: whose content must not change, beside the module's.
        """

        def contribution(company: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            """Gradient and outputs of an example, the first of these, with fixed random numbers."""
            with rows.seeded():
                outputs, gradients = self.forward(function, [x[company] for x in parts])
                # other ones in each row: what centres them would be lost in equal ones
                by_name = gradients([x.detach().sigmoid() for x in outputs])
            each = [x.dense(1) for k in self.trained for x in by_name[k]]
            return each, [x[:1] for x in outputs]

        def state() -> probe.Contents:
            return probe.contents(ignored, module=self.module, **roots)

        if ignored is None:
            yield
            return
        before = state()
        with rows.seeded():  # by vmap, what is kept would be unusable after it
            first = self.forward if self._spread else self._one_by_one
            first(function, [x[:1] for x in parts])
        kept = state()
        probe.refuse_changes(before, kept, made=True)
        reference = contribution([0, 0])
        if self.module in _one_by_one:  # vmap may have drawn random numbers until it failed
            reference = contribution([0, 0])
        probe.refuse_changes(kept, state())
        yield
        probe.refuse_changes(kept, state())
        pairs = zip(reference, contribution([0, -1]), (self.bound, 1.0), strict=True)
        for expected, actual, bound in pairs:
            probe.refuse_difference(expected, actual, bound)

    def _one_by_one(
        self, function: Callable[..., tuple[torch.Tensor, ...]], parts: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], per_example.Pullback]:
        # the module as it is: some keep their weights in lists too
        with _eager(self.module), torch.enable_grad():
            outputs = [function(self.module, *example) for example in zip(*parts, strict=True)]
        trained = list(self.trained.values())

        def gradients(cotangents: Sequence[torch.Tensor | None]) -> per_example.Gradients:
            each = []
            for i, of_example in enumerate(outputs):
                part = [d if d is None else d[i] for d in cotangents]
                each.append(
                    per_example.pulled_back(of_example, part, trained, materialize_grads=True)
                )
            rows_of = zip(self.trained, zip(*each, strict=True), strict=True)
            return {k: [per_example.GradientRows(torch.stack(x))] for k, x in rows_of}

        return [torch.stack([y.detach() for y in x]) for x in zip(*outputs, strict=True)], gradients

    def add(
        self,
        gradients: per_example.Gradients,
        sums: Mapping[torch.Tensor, torch.Tensor],
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Add Σ clip(``scale`` · gradient of one example) to ``sums``, by parameter.

        Returns the norm of each; an example whose gradient is not finite adds nothing.
        """
        with torch.no_grad(), per_example.full_precision(self.device):
            joined = [
                (sums[p], per_example.merged(gradients[name])) for name, p in self.trained.items()
            ]
            bounds = [per_example.norm_bounds(x) for _, x in joined if x]
            if not bounds:
                return torch.zeros(0)
            norm = scale * torch.stack(bounds).norm(dim=0)
            factor = _MARGIN * self.bound / norm.clamp(min=self.bound)
            factor = torch.where(torch.isfinite(norm), scale * factor, 0.0)
            for total, parts in joined:
                for part in parts:
                    part.add_to(total, factor)
            return norm


def add_clipped(
    module: torch.nn.Module,
    loss: Callable[[Any, Any], torch.Tensor],
    batch: object,
    max_grad_norm: float,
    sums: Mapping[torch.Tensor, torch.Tensor],
    *,
    microbatch: int | None = None,
    run: Any = None,
    probed: bool = False,
) -> torch.Tensor:
    """Add Σ clip(gradient of one example) to ``sums[parameter]`` for every trainable parameter.

    In place of ``loss(module, batch).backward()``: the loss is computed for batches of one example
    each, and each one's gradient is scaled down to norm ``max_grad_norm`` over all parameters
    before they are added (:class:`Examples`).

    Args:
      module, max_grad_norm: as for :class:`Examples`.
      loss: ``loss(module, batch)``, a scalar; ``module`` is to be called as usual.
      batch: tensors, or nested tuples, lists and dictionaries of them, examples along the first
        axis; one of no examples adds 0.
      sums: the tensor, of its shape, that a parameter's sum is added to, for each.
      microbatch: examples whose gradients are held at once; all of them if left out.
      run: that keeps the sums, and the norms of what they are made of.
      probed: asks for a probe (:mod:`mfopt.torch.probe`) of this pass.

    Returns:
      The mean loss, detached: not private.

    Raises:
      UsageError: as :class:`Examples`; a loss that is no scalar, tensors of unequal length; what a
        probe shows to remember examples.
    """
    examples = Examples(module, max_grad_norm)
    tensors, structure = split(batch)
    tensors = [rows.plain(leaf).to(examples.device) for leaf in tensors]

    def of_one(call: Callable[..., object], *example: torch.Tensor) -> tuple[torch.Tensor]:
        alone = pytree.tree_unflatten([part.unsqueeze(0) for part in example], structure)
        try:
            value = loss(call, alone)
        except (TypeError, AttributeError) as error:
            if getattr(error, "obj", call) is not call:
                raise
            kind = type(error).__name__
            rule = f"is called as loss(module, batch), and raised {kind}: {error}"
            way_out = "Write def loss(module, batch): return F.cross_entropy(module(batch[0]), "
            way_out += "batch[1]), and pass it after the module: backward(module, loss, batch). "
            way_out += "It calls its module only: take attributes of the model by its own name."
            raise _check.reject("loss", loss, rule, way_out) from error
        if not isinstance(value, torch.Tensor) or value.ndim:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise _check.reject("loss", given, "must give a scalar tensor", "Return its mean().")
        if isinstance(value, rows.UnitRows):
            rule = "uses rows of the loader beside its example: each gradient would be of others"
            raise _check.reject("loss", "of other rows", rule, "Use the batch that it is given.")
        return (value,)

    count = len(tensors[0])
    if not count:
        return torch.zeros(())
    block = count if microbatch is None else _check.integer("microbatch", microbatch)
    loss_sum = torch.zeros((), device=examples.device)
    with examples.probed(of_one, tensors, run if probed else None, loss=loss):
        while len(tensors[0]):
            size = 1 if examples.module in _one_by_one else block  # one graph at a time
            (losses,), gradients = examples.forward(of_one, [leaf[:size] for leaf in tensors])
            norms = examples.add(gradients([torch.ones_like(losses)]), sums)
            if run is not None:
                run.norms.append(norms)
            loss_sum += losses.detach().sum()
            tensors = [leaf[size:] for leaf in tensors]
    return loss_sum / count


def split(batch: object) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a batch, equally long, and what they stand in; raises as `add_clipped`."""
    leaves, structure = pytree.tree_flatten(batch)
    with torch._C.DisableTorchFunctionSubclass():  # of rows, which need a while to answer
        sizes = [tuple(getattr(leaf, "shape", ())) or type(leaf).__name__ for leaf in leaves]
        are_arrays = all(map(rows.is_array, leaves))
    if not are_arrays or len({size[0] for size in sizes}) != 1:
        rule = "must be tensors with as many examples each along the first axis"
        way_out = "In collate_fn, make numbers of labels that are texts, and leave out the rest."
        raise _check.reject("batch", [*dict.fromkeys(sizes)], rule, way_out)
    return leaves, structure


@contextlib.contextmanager
def _eager(module: torch.nn.Module) -> Iterator[None]:
    """Nothing compiled; no hooks of FSDP2, which would put its parameters in place of these."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for layer in module.modules():
            for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
                before = dict(hooks)
                for number, hook in before.items():
                    if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                        del hooks[number]
                stack.callback(hooks.update, before)
                stack.callback(hooks.clear)
        yield
