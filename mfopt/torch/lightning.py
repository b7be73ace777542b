"""A private run in a Lightning ``Trainer``, with automatic or manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mfopt._runtime import _check, _extras
from mfopt.torch.run import PrivateRun

with _extras.required():
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy


class PrivateStrategy(SingleDeviceStrategy):
    """Strategy whose steps are those of a private run, on one device.

    ::

        run = PrivateRun(factorization, len(dataset), max_grad_norm=1.0)
        trainer = Trainer(max_epochs=factorization.sampling.epochs, strategy=PrivateStrategy(run))
        trainer.fit(module, run.loader(dataset))

    ``training_step`` is called for one example at a time, and its gradient clipped before it is
    added. What it logs is left out: that is computed from the data, without noise. With manual
    optimization ``training_step`` calls ``run.backward(self, loss, batch)`` in place of
    ``self.manual_backward(loss)``. Checkpoints hold the run, sealed, and ``ckpt_path`` resumes at
    its step. ``loss`` is the mean loss of the last batch; not private.

    Args:
      run: of the data set that is trained on, without an optimizer so far.
      microbatch: examples whose gradients are held at once; all of them if left out.
      device: where to train; the first GPU, or the CPU, if left out.
    """

    def __init__(
        self, run: PrivateRun, *, microbatch: int | None = None, device: Any = None
    ) -> None:
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self.run = _check.kind("run", run, PrivateRun)
        self.microbatch, self.loss = microbatch, torch.zeros(())
        self._batch: tuple[Any, ...] = ()
        self._whole: Any = None  # the module, whose forward pass is its training step

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Attach the run to the module's optimizer; refuse what would change its steps."""
        super().setup_optimizers(trainer)
        if clip := trainer.gradient_clip_val:
            rule = "has no effect on a private step"
            raise _check.reject("gradient_clip_val", clip, rule, "Leave it out: a run clips.")
        if trainer.precision == "16-mixed":
            rule = "needs a GradScaler, which would leave out steps"
            raise _check.reject("precision", "16-mixed", rule, "Take 'bf16-mixed'.")
        self.run.attach(self.optimizers[0])
        self._whole = _OneStep(self.lightning_module)
        # what Lightning wraps them in is made anew, of attached ones
        self.optimizers = self.optimizers

    def training_step(self, batch: Any, *rest: Any) -> Any:
        """Keep the batch for :meth:`backward`, which has its gradients apart; a loss of 0."""
        if not self._whole.module.automatic_optimization:
            return super().training_step(batch, *rest)
        self._batch = (batch, *rest)
        return torch.zeros((), device=self.root_device)

    def backward(self, *_: Any, **__: Any) -> Any:
        """Add the batch's clipped gradients to the run's sum.

        Raises:
          UsageError: called by ``manual_backward``, whose gradients would not be clipped.
        """
        if not self._batch:
            raise _check.reject(
                "manual_backward",
                "called",
                "is not clipped",
                "Call run.backward(self, loss, batch) in its place.",
            )
        (batch, *rest), self._batch = self._batch, ()
        module = self._whole.module
        # left out is what it logs: one example's numbers, and batched ones inside vmap
        vars(module).update(dict.fromkeys(("log", "log_dict"), lambda *_, **__: None))
        try:
            with self.precision_plugin.train_step_context():
                self.loss = self.run.backward(
                    self._whole,
                    lambda step, one: step(one, *rest),
                    batch,
                    microbatch=self.microbatch,
                )
        finally:
            del module.log, module.log_dict
        return self.loss

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> object:
        """Step with the noised mean of what ``closure()`` adds to the run's sum, if anything."""
        loss = closure()
        # calls on_before_optimizer_step; no gradient is there yet that it could clip
        self.precision_plugin._after_closure(self._whole.module, optimizer)
        optimizer.step(**options)
        return loss


class _OneStep(torch.nn.Module):
    """The training step of a module as a forward pass, whose parameters can be put in its place."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *arguments: object) -> object:
        """The loss of ``training_step(*arguments)``."""
        outputs = self.module.training_step(*arguments)
        return outputs["loss"] if isinstance(outputs, Mapping) else outputs
