"""``make_private``: the loop of Opacus, with the engine of :class:`mfopt.torch.PrivateRun`."""

from __future__ import annotations

import os
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from mfopt._runtime import _check
from mfopt.factorization import Factorization
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.torch import checks, rows
from mfopt.torch.clipping import Examples
from mfopt.torch.loader import PrivateLoader, population_of
from mfopt.torch.run import PrivateRun, with_options_of


@with_options_of(DataLoader)
def make_private(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    factorization: Factorization,
    max_grad_norm: float,
    *,
    loss_reduction: str = "mean",
    normalizer: float | None = None,
    seed: int | None = None,
    allow_uncertified: bool = False,
    collate_fn: Callable[[list[Any]], object] | None = None,
    key_folder: str | os.PathLike[str] = KEY_FOLDER,
    **loader_options: Any,
) -> tuple[PrivateModule, torch.optim.Optimizer, PrivateLoader]:
    """(module, optimizer, loader) that execute the mechanism of a factorization.

    As ``opacus.PrivacyEngine.make_private``, with the factorization in place of Poisson sampling
    and independent noise, and without Opacus. An epoch is one pass over the loader; the loop is
    that of Opacus::

        for epoch in range(factorization.sampling.epochs):
            for x, y in loader:  # may be empty: then the step adds noise only
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(x), y).backward()
                optimizer.step()

    In training each example, a row of inputs and outputs, goes through the module by itself, and
    the gradient of its outputs comes from the loss; ``step`` clips and adds. Opacus's
    ``BatchMemoryManager`` splits large batches: noise comes once for each logical step. Several
    processes each take their part of every batch. The optimizer, that of PyTorch, has the run in
    its ``state_dict``, sealed.

    Formal guarantee: that of :class:`PrivateRun`; a unit is one record of the data set.

    Args:
      module, optimizer: whose steps are to be private; the optimizer unused so far.
      dataset: with numbered records.
      factorization, max_grad_norm, normalizer, seed, allow_uncertified, key_folder: as for
        :class:`PrivateRun`.
      loss_reduction: of the loss that the module is trained on, "mean" or "sum".
      collate_fn, loader_options: as for :meth:`PrivateRun.loader`.

    Raises:
      UsageError: as :class:`PrivateRun` and :meth:`PrivateRun.attach`; a keyword of Opacus whose
        value is the factorization's (``poisson_sampling``, ``noise_multiplier``), a model of
        ``fully_shard``; later as :meth:`PrivateRun.backward`, a loss that mixes examples, or two
        passes for one step.
    """
    _check.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    _check.kind("module", module, torch.nn.Module)
    if any(map(checks.is_shard, module.parameters())):
        way_out = "Use PrivateRun and run.backward."
        raise _check.reject("module", module, "has parameters of fully_shard", way_out)
    run = PrivateRun(
        factorization,
        population_of(dataset),
        max_grad_norm,
        normalizer=normalizer,
        seed=seed,
        allow_uncertified=allow_uncertified,
        key_folder=key_folder,
    )
    loader = run.loader(dataset, collate_fn=collate_fn, **loader_options)
    run.attach(optimizer)
    _skip_steps(optimizer, run)
    return PrivateModule(module, run, loss_reduction), optimizer, loader


class PrivateModule(torch.nn.Module):
    """A module whose training passes take the examples of a batch one by one.

    Args:
      module: that is trained; its attributes are found here too.
      run: whose optimizer sums the clipped gradients.
      loss_reduction: what the loss is said to be of examples, "mean" or "sum".
    """

    def __init__(self, module: torch.nn.Module, run: PrivateRun, loss_reduction: str) -> None:
        super().__init__()
        self._module, self._run = module, run
        self._declared, self._passes = loss_reduction, dict[int, list[float]]()

    def __getattr__(self, name: str) -> Any:
        own = "_modules" not in vars(self) or name == "_module"
        return super().__getattr__(name) if own else getattr(self._module, name)

    # torch.compiler.disable, which would import the compiler here
    @_disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Outputs of the module; those of a training pass await the gradients of a loss."""
        given = pytree.tree_leaves((args, kwargs))
        args, kwargs = pytree.tree_map(rows.plain, (args, kwargs))
        if not (self.training and torch.is_grad_enabled()):
            return self._module(*args, **kwargs)
        run = self._run
        units, is_probed = run.begin_pass(self._module, given)
        examples, count = Examples(self._module, run.stream.clip_norm), len(units)
        reduction = rows.Reduction(self._declared, count, self._passes, defaultdict(frozenset))

        def marked(x: Any) -> Any:
            return rows.UnitRows.of(x, units, is_probed=is_probed, reduction=reduction)

        def is_batched(x: Any) -> bool:
            return rows.is_array(x) and len(x) == count

        if not count:
            with torch.no_grad():
                outputs = self._module(*args, **kwargs)
            return pytree.tree_map(lambda x: marked(_leaf(x)), outputs)
        of_example: list[Any] = [None]  # outputs

        def of_one(call: Callable[..., object], *example: torch.Tensor) -> tuple[torch.Tensor, ...]:
            remaining = iter(example)
            one_args, one_kwargs = pytree.tree_map(
                lambda x: next(remaining).unsqueeze(0) if is_batched(x) else x, (args, kwargs)
            )
            of_example[0] = call(*one_args, **one_kwargs)
            tensors = [x for x in pytree.tree_leaves(of_example) if isinstance(x, torch.Tensor)]
            return tuple(x.squeeze(0) if x.ndim else x for x in tensors)

        parts = [x for x in pytree.tree_leaves((args, kwargs)) if is_batched(x)]
        is_probed |= len(self._passes) == 1 and count not in self._passes
        with examples.probed(of_one, parts, run if is_probed else None):
            outputs, pullback = examples.forward(of_one, parts)
        outputs = [_leaf(x) for x in outputs]
        scale = count if self._declared == "mean" else 1

        def add() -> None:
            reduction.refuse_another()
            run.take(units)
            run.norms.append(examples.add(pullback([x.grad for x in outputs]), run.sums, scale))

        run.passes.append((outputs, add))
        remaining = iter(outputs)

        def of_all(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            y = next(remaining)
            # or a number of each example
            return marked(y) if x.ndim else getattr(torch, self._declared)(y)

        return pytree.tree_map(of_all, of_example[0])


def _leaf(output: object) -> Any:
    """A tensor without its graph, which gradients are wanted of."""
    if not isinstance(output, torch.Tensor):
        return output
    return output.detach().requires_grad_(output.is_floating_point())


def _skip_steps(optimizer: torch.optim.Optimizer, run: PrivateRun) -> None:
    """Give ``optimizer`` what Opacus's ``BatchMemoryManager`` splits the batch of a step by."""
    plain_step, plain_zero_grad = optimizer.step, optimizer.zero_grad
    skips: list[bool] = []  # of the physical batches that were drawn: whether their step is none
    inside = False  # a step

    def signal_skip_step(do_skip: bool = True) -> None:
        skips.append(do_skip)

    def step(_: object, *arguments: Any, **named: Any) -> Any:
        nonlocal inside
        inside = bool(skips and skips.pop(0))
        return run.collect() if inside else plain_step(*arguments, **named)

    def zero_grad(set_to_none: bool = True) -> None:
        if inside:
            run.passes.clear()
        else:
            plain_zero_grad(set_to_none)

    def forget() -> None:
        # a break in the middle of a logical step: its batch comes again, whole
        nonlocal inside
        inside = False
        skips.clear()
        plain_zero_grad()

    vars(optimizer).update(
        signal_skip_step=signal_skip_step,
        step=types.MethodType(step, optimizer),  # schedulers wrap a bound method
        zero_grad=zero_grad,
    )
    run.forget = forget
