"""One private run in PyTorch: batches, clipping, noise and the steps released so far."""

from __future__ import annotations

import functools
import inspect
import os
import random
from collections.abc import Callable
from typing import Any, ParamSpec

import torch
from torch.utils.data import DataLoader, default_collate

from mfopt import noise
from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject, T
from mfopt.factorization import Factorization
from mfopt.guarantee import require_guarantee
from mfopt.noise.files import Contents
from mfopt.noise.for_torch import (
    STATE,
    SilentNoise,
    TorchNoise,
    refuse_narrow,
    release_content,
    split_state,
)
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.noise.sealed import KeyFile
from mfopt.noise.state import no_copy, set_once
from mfopt.sampling import UnitSampler
from mfopt.torch import checks, clipping, loader, probe, rows

_BATCHES = "the batches are drawn by the factorization's own scheme"
# what the factorization or the run decides, with what stands for it
_DECIDED = {
    **dict.fromkeys(("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"), _BATCHES),
    "poisson_sampling": _BATCHES,
    "noise_multiplier": "σ is that of `factorization`, as mfopt.load(FILE) gives it",
    "clip_norm": "the clip norm is `max_grad_norm`",
    "data_loader": "the loader is made here, from `dataset`: that of yours is data_loader.dataset",
    "target_epsilon": "ε is the factorization's: optimize or calibrate one for another ε",
    "target_delta": "δ is the factorization's: optimize or calibrate one for another δ",
    "epochs": "the number of steps is the factorization's",
    "optimizer": "a run is given its optimizer by attach(optimizer)",
    "clipping": "σ is for one norm over all parameters, flat in the words of Opacus",
}
_FIXED = {"factorization", "normalizer", "sampler", "stream"}
P = ParamSpec("P")


def with_options_of(others: Callable[..., object]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator of a call whose further keywords are those of ``others``.

    Any other keyword, as of Opacus, is refused by its name, also where arguments are missing; what
    the factorization decides may be left to it (None, False).
    """

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        allowed = {*inspect.signature(others).parameters} - {*_DECIDED}
        allowed.update(inspect.signature(call).parameters)

        @functools.wraps(call)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
            for name in sorted(keywords.keys() - allowed):
                if (value := keywords.pop(name)) or name not in _DECIDED:
                    rule = _DECIDED.get(name, "is no argument here")
                    raise _check.reject(name, value, rule, "Leave it out.")
            return call(*arguments, **keywords)

        return checked

    return decorate


class PrivateRun:
    """Batches, clipping and noise of a factorization in a PyTorch loop, without other libraries.

    ::

        run = PrivateRun(factorization, len(dataset), max_grad_norm=1.0)
        run.attach(optimizer)  # from here on every step adds noise and divides
        for batch in run.loader(dataset):  # one epoch; a batch may be empty
            run.backward(model, loss, batch)
            optimizer.step()
            optimizer.zero_grad()

    ``backward`` keeps the sum of clipped gradients separate from ``grad``; only ``step`` writes it
    there, with its noise. Other optimizers find no gradient, and a gradient in ``grad`` raises.
    Who clips by code of their own adds the noise by
    :class:`~mfopt.noise.for_torch.TorchNoise`. With several
    processes (an initialized ``torch.distributed``) each one takes its part of every batch, the
    sums are added over the processes, and rank 0 alone has a key, buffers and noise. With a model
    of ``fully_shard`` (FSDP2) each process makes, from one key, the noise of its share of every
    parameter. ``backward``, called equally often in all of
    them, holds whole parameters and their sum also where they are sharded.

    The optimizer's ``state_dict`` holds the run, sealed: the key lies in a file of ``key_folder``,
    readable by its owner only, and is **as secret as the data**. Load after ``attach``.

    Formal guarantee: ``print(run.guarantee)``, where a unit is one element of the data set, if
    the file is right: ``factorization.proved_here`` says whether this machine proved it. Units have
    positions: under a fixed order that is a guarantee for zero-out, not add-remove. What can be
    seen is refused: rows of other units than the step's, of one twice, or of several (MixUp); a
    step without a row of each, without noise, past the last; parameters that are trained elsewhere,
    layers and buffers that keep what they see. Never seen is a record of the data set that holds
    what belongs to other units.

    Args:
      factorization: C, σ and the sampling scheme.
      population: number of units in the data set.
      max_grad_norm: bound on the norm of one unit's contribution to a step's sum.
      normalizer: what noised sums are divided by, a public number; the expected batch if left out.
      seed: pins batches and noise: such a run protects nothing.
      allow_uncertified: take a seed, or a factorization that is an estimate: for experiments and
        tests. ``guarantee`` then says "none".
      key_folder: where the key of the optimizer's states is kept.
      options: of :class:`mfopt.noise.NoiseStream` (``buffer_dtype``, ``past``).
    """

    @with_options_of(noise.NoiseStream)
    def __init__(
        self,
        factorization: Factorization,
        population: int,
        max_grad_norm: float,
        *,
        normalizer: float | None = None,
        seed: int | None = None,
        allow_uncertified: bool = False,
        key_folder: str | os.PathLike[str] = KEY_FOLDER,
        **options: Any,
    ) -> None:
        self.factorization = factorization
        with _check.renamed_arguments({"clip_norm": "max_grad_norm"}):
            self.stream = noise.from_factorization(
                factorization,
                clip_norm=max_grad_norm,
                allow_uncertified=allow_uncertified,
                **options,
            )
        self._seed = seed
        require_guarantee(
            factorization.guarantee, pinned=seed is not None, allow_uncertified=allow_uncertified
        )
        self.rank, self.ranks = checks.place()
        sampler = checks.gathered(factorization.sampler(population, seed))[0]
        self.sampler = sampler.part(self.rank, self.ranks)
        expected = self.sampler.expected_batch
        self.normalizer = _check.positive(
            "normalizer", expected if normalizer is None else normalizer
        )
        self.noise: TorchNoise | SilentNoise | None = None
        self._drop()
        self.keys = KeyFile(key_folder)
        self.parameters: list[torch.Tensor] = []  # of the attached optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        self._process = os.getpid()
        self._module = torch.nn.Module()  # of the last pass
        self._probes = 0  # steps whose first pass was probed
        self._modes: tuple[bool, ...] = ()  # of the layers in the last pass, whether they train

    def __setattr__(self, name: str, value: object) -> None:
        (set_once if name in _FIXED else object.__setattr__)(self, name, value)

    def __repr__(self) -> str:
        return f"PrivateRun({self.sampler!r}, step {self.step} of {self.stream.iterations})"

    @property
    def guarantee(self) -> str:
        """Guarantee of the run, or "none" and the reason."""
        return self.factorization.statement(pinned=self.sampler.pinned)

    @property
    def step(self) -> int:
        """Steps that were released."""
        return 0 if self.noise is None else self.noise.step

    @with_options_of(DataLoader)
    def loader(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], object] | None = None,
        **options: Any,
    ) -> loader.PrivateLoader:
        """A DataLoader whose batches are those of the run, one pass over it an epoch.

        Args:
          dataset: with numbered records, one for each unit.
          collate_fn: of batches that are not empty; PyTorch's default if left out.
          options: others of :class:`torch.utils.data.DataLoader` (``num_workers``, ...).

        Raises:
          UsageError: a data set without numbered records, or of another size than the population;
            options that draw batches.
        """
        if (size := loader.population_of(dataset)) != self.sampler.population:
            rule = f"the run is for a population of {self.sampler.population}"
            raise _check.reject("dataset", f"{size} records", rule)
        return loader.PrivateLoader(dataset, self, collate_fn or default_collate, **options)

    def backward(
        self,
        module: torch.nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        batch: object,
        *,
        microbatch: int | None = None,
    ) -> torch.Tensor:
        """Add Σ clip(gradient of one example) of a batch to the sum of this step.

        In place of ``loss(module, batch).backward()``, as :func:`mfopt.torch.clipping.add_clipped`
        with the run's clip norm, and not in ``grad``. ``zero_grad()`` of the optimizer drops it.
        Returns the mean loss, detached: not private.

        Args:
          module: the model; the attached optimizer has all of its trainable parameters.
          loss, batch, microbatch: as for :func:`~mfopt.torch.clipping.add_clipped`.
        """
        units, probed = self.begin_pass(module, clipping.split(batch)[0])
        self.take(units)
        try:
            return clipping.add_clipped(
                module,
                loss,
                batch,
                self.stream.clip_norm,
                self.sums,
                microbatch=microbatch,
                run=self,
                probed=probed,
            )
        except _check.UsageError:
            self._drop()  # a sum that was refused is not released later
            raise

    def _drop(self) -> None:
        """Begin a step, or begin it again, without a sum."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}  # of this step, by parameter
        self.units: list[int] = []  # whose rows are in the sum
        self.norms: list[torch.Tensor] = []  # of what is in the sum, before it was clipped
        # outputs that await gradients, and what adds those of their examples to sums
        self.passes: list[tuple[list[torch.Tensor], Callable[..., None]]] = []

    @property
    def sums(self) -> dict[torch.Tensor, torch.Tensor]:
        """Of the clipped gradients of this step so far, by parameter, in the optimizer's order."""
        # whole also where a process has a part of the parameter
        self._sums = self._sums or {
            p: torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self.parameters
        }
        return self._sums

    def begin_pass(
        self, module: torch.nn.Module, tensors: list[Any]
    ) -> tuple[tuple[int, ...], bool]:
        """(units of the rows of ``tensors``, whether their pass through ``module`` is probed).

        Those of the first two steps are, those in another mode, and drawn ones.

        Raises:
          UsageError: rows that are not each of one unit, no optimizer that has what is trained.
        """
        self.started()
        checks.refuse_uncovered(module, self.parameters)
        units = rows.units_of(tensors)
        self._module = module
        if not units:
            return units, False
        modes = tuple(layer.training for layer in module.modules())
        # unknown without the run's secret
        draws = random.Random(f"mfopt probe {self.sampler.state_dict()['seed']} {self.step}")
        drawn = draws.random() * probe.RATE < 1
        drawn |= modes != self._modes or self._probes < 2
        self._modes, self._probes = modes, self._probes + (drawn and not self.units)
        return units, drawn

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make ``optimizer.step()`` use the noised and normalized sum of this step.

        It stays the same object: schedulers and trainers see an optimizer as before. It can no
        longer be copied or pickled: PyTorch leaves out of a copy what adds the noise. After a step
        ``grad`` is None.

        Raises:
          UsageError: for what is no optimizer, has worked or adds noise already, has parameters
            narrower than float32, or of another run; for a second optimizer of this run, unless it
            has the parameters of the first one, which may not step from then on; on a step, if it
            would release something without this run's noise, or leave out gradients in ``grad``.
        """
        # what accelerate and Lightning wrap one in steps it in their ways
        optimizer = getattr(optimizer, "optimizer", optimizer)
        way_out = "Give a new optimizer of PyTorch."
        _check.kind("optimizer", optimizer, torch.optim.Optimizer, way_out)
        # Opacus's are known by what they wrap, ours by how they refuse copies
        if {"original_optimizer", "__reduce_ex__"} & vars(optimizer).keys():
            rule = "was made private already: its noise would not be this factorization's"
            raise _check.reject("optimizer", optimizer, rule, way_out)
        if optimizer.state:
            rule = "has a state from steps that were not this run's"
            way_out = "Attach a new optimizer before the first backward pass."
            raise _check.reject("optimizer", optimizer, rule, way_out)
        parameters = trained(optimizer)
        refuse_narrow("optimizer", parameters)  # sums have the type of their parameter
        sizes = {p.device_mesh.size() for p in parameters if checks.is_shard(p)}
        if sizes - {self.ranks}:
            spread = f"of parameters on {sorted(sizes)} processes"
            rule = f"each of {self.ranks} takes its part of every batch: no model parallelism"
            way_out = "Use fully_shard with a mesh of all processes."
            raise _check.reject("optimizer", spread, rule, way_out)
        is_same = [id(p) for p in parameters] == [id(p) for p in self.parameters]
        if self.noise is not None and (self.ranks > 1 or not is_same):
            rule = "has an optimizer already: other sums would be released with its noise"
            way_out = "Attach one of the same parameters, in this order; or a new run: both count."
            raise _check.reject("run", self, rule, way_out)
        if self.noise is None:
            checks.take(parameters, self)
            for p in parameters:
                if self.ranks > 1 and not checks.is_shard(p):
                    torch.distributed.broadcast(p.data, src=0)
            # of shards each process makes the noise of its own
            part = (self.rank, self.ranks) if sizes else None
            self.noise = (
                TorchNoise(self.stream, parameters, seed=self._seed, part=part)
                if sizes or self.rank == 0
                else SilentNoise(self.stream)
            )
        self._drop()
        self.parameters, self._optimizer = parameters, optimizer

        def before_step(optimizer: Any, arguments: Any, named: Any) -> None:
            checks.refuse_scaler(optimizer)
            if optimizer is not self._optimizer:
                rule = "was replaced: the run has another optimizer for its parameters"
                raise _check.reject("optimizer", optimizer, rule, "Step the one attached last.")
            if any(x is not None for x in (*arguments[1:], *named.values())):
                rule = "would compute gradients again, after the noise"
                way_out = "Call step() without arguments."
                raise _check.reject("closure", "given", rule, way_out)
            if [id(p) for p in trained(optimizer)] != [id(p) for p in parameters]:
                rule = "has other parameters than when it was attached"
                way_out = "Freeze and add parameters before."
                raise _check.reject("optimizer", optimizer, rule, way_out)
            self.collect()
            if any(p.grad is not None and bool(checks.local(p.grad).any()) for p in parameters):
                rule = "holds gradients that run.backward did not make, neither clipped nor noised"
                way_out = "Call run.backward(module, loss, batch) in place of loss.backward()."
                raise _check.reject("grad", "not empty", rule, way_out)
            sums = self.sums
            is_first = self._probes == 1 and len(self.units) > 1
            if is_first and not any(map(torch.any, sums.values())):
                rule = "has gradient 0 for every example of the run's first batch"
                way_out = "Use a loss that is a mean over examples, not one that compares them."
                raise _check.reject("loss", "constant", rule, way_out)
            self.add_to([*sums.values()])
            self._drop()
            for p, total in sums.items():
                if self.ranks > 1:
                    torch.distributed.all_reduce(total)
                p.grad = checks.like(p, total.div_(self.normalizer))

        def after_step(*_: object) -> None:
            # only a step fills ``grad``, and what follows from weights follows it
            checks.follow_weights(self._module)
            for p in parameters:
                p.grad = None

        def after_state(_: object, state: JsonObject) -> JsonObject:
            header, arrays = self.started().contents(self.keys.folder)
            contents = {**header, "sampler": self.sampler.state_dict()}, arrays
            return {**state, STATE: self.keys.seal(contents)}

        def refuse_copy(_: object) -> object:
            raise no_copy(optimizer)

        plain_zero_grad = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            plain_zero_grad(set_to_none)
            self._drop()

        vars(optimizer).update(
            __reduce_ex__=refuse_copy,  # copy and pickle ask the object before its class
            zero_grad=zero_grad,
            # GradScaler.step shows itself to `refuse_scaler` in place of unscaling
            _step_supports_amp_scaling=True,
        )
        optimizer.register_step_pre_hook(before_step)
        optimizer.register_step_post_hook(after_step)
        optimizer.register_state_dict_post_hook(after_state)
        loaded: list[Any] = []

        def before_load(_: object, state: JsonObject) -> JsonObject:
            rest, noise_state = split_state(state)
            contents = self.keys.open(noise_state)
            self.started().check(contents)
            part = {"rank": self.rank, "ranks": self.ranks}
            saved = UnitSampler.from_state({**contents[0].get("sampler", {}), **part})
            if (saved.scheme, saved.population) != (self.sampler.scheme, self.sampler.population):
                rule = f"belongs to other batches than {self.sampler!r}"
                raise _check.reject("state: sampler", saved, rule)
            loaded[:] = contents, saved
            return rest

        optimizer.register_load_state_dict_pre_hook(before_load)
        optimizer.register_load_state_dict_post_hook(lambda _: self._restore(*loaded))
        # drops what was summed of a step that was not released
        self.forget: Callable[[], None] = zero_grad

    def collect(self) -> None:
        """Add the gradients of the pass over a batch whose outputs have some by now."""
        passes = [add for outputs, add in self.passes if any(y.grad is not None for y in outputs)]
        self.passes.clear()
        # a loss of two passes could let the one decide what counts of the other
        if len(passes) > 1:
            rule = "an example would be in the sum once for each of them"
            way_out = "Call module and backward() once for each batch, then step()."
            raise _check.reject("backward", f"of {len(passes)} passes", rule, way_out)
        for add in passes:
            add()

    def take(self, units: tuple[int, ...]) -> None:
        """Note that rows of these units are in the sum, also if adding them is broken off.

        Raises:
          UsageError: rows of other units than the step's, of one that is in the sum already, or
            past the last step.
        """
        self.units += units
        drawn = self.sampler[self.step].tolist()
        if len(set(self.units)) < len(self.units) or not set(units) <= set(drawn):
            rule = f"has rows that are not of step {self.step}, or are in its sum already"
            way_out = "Add up each batch once and step before the next one, for an empty one too; "
            way_out += "after a pass that failed, call zero_grad() first."
            raise _check.reject("batch", f"{len(units)} rows", rule, way_out)

    def add_to(self, sums: list[torch.Tensor]) -> None:
        """Add the noise of the step in place, in the process that adds it; one step more.

        Raises:
          NoiseExhaustedError: past the last step.
          UsageError: the sum does not have a row of each unit of its step.
        """
        noise = self.started()
        if (current := checks.place()) != (self.rank, self.ranks):
            rule = f"(rank, ranks) were {(self.rank, self.ranks)} when the run was made"
            way_out = "Call init_process_group before."
            raise _check.reject("torch.distributed", current, rule, way_out)
        self.stream.refuse_past_end(self.step)
        if len(self.units) != (drawn := len(self.sampler[self.step])):
            rule = f"are in the sum, and {drawn} were drawn for the step"
            way_out = "Call run.backward, or loss.backward(), for all; no zero_grad() between."
            raise _check.reject("units", len(self.units), rule, way_out)
        content = release_content(self.norms, sums, noise.step)
        noise.add_to(sums, b"".join(checks.gathered(content)))  # the ledger is the first one's

    def _restore(self, contents: Contents, saved: UnitSampler) -> None:
        """Resume a run: its batches, its noise, its step.

        Raises:
          UsageError: a state of a run that is alive, in this process or another; other steps or
            batches in other processes.
        """
        noise = self.started()
        state = contents[0]["step"], {**saved.state_dict(), "rank": 0}
        states = checks.gathered(state)
        if any(other != state for other in states):
            rule = f"must be one in all processes, which have steps {[step for step, _ in states]}"
            way_out = "Load in each what all saved at the same step of one run."
            raise _check.reject("state", f"of step {state[0]}", rule, way_out)
        noise.restore(contents, self.keys.folder)
        noise.skip(checks.gathered(noise.step)[0])  # what was lost in a power cut
        vars(self).update(sampler=saved)
        self._drop()

    def __reduce_ex__(self, protocol: object) -> Any:
        raise no_copy(self)

    def started(self) -> TorchNoise | SilentNoise:
        """The noise; raises :class:`UsageError` where no optimizer is attached yet."""
        if self.noise is None:
            rule = "has no optimizer yet"
            raise _check.reject("run", self, rule, "Call attach(optimizer) first.")
        if os.getpid() != self._process:
            rule = "belongs to the process that made it: a fork would release the same noise"
            raise _check.reject("run", self, rule, "Make a run in the process that trains.")
        return self.noise


def trained(optimizer: Any) -> list[Any]:
    """The parameters of an optimizer that require gradients, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
