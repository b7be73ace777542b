"""The ``Trainer`` of transformers with a factorization's batches, clipping and noise."""

from __future__ import annotations

import os
from typing import Any

import torch

from mfopt._runtime import _check, _extras
from mfopt.factorization import Factorization
from mfopt.noise.ledger import KEY_FOLDER
from mfopt.torch.loader import population_of
from mfopt.torch.run import PrivateRun

with _extras.required():
    from transformers import Trainer

# arguments of training that would change what a step is, and their value that does not
_REFUSED = {
    "gradient_accumulation_steps": (1, "one batch of the run is one step", "Use `microbatch`."),
    "fp16": (False, "its GradScaler would leave out steps", "Use bf16."),
    "auto_find_batch_size": (False, "batches are the factorization's", "Use `microbatch`."),
    "label_smoothing_factor": (0, "asks for the class of the model", "Override compute_loss."),
    "deepspeed": (None, "keeps gradients in ways of its own", "Leave it out."),
}


class PrivateTrainer(Trainer):
    """``Trainer`` whose training steps are those of a private run.

    ::

        trainer = PrivateTrainer(model, args, train_dataset=data, factorization=factorization)
        trainer.train()  # or trainer.train(resume_from_checkpoint=True)

    ``args.max_grad_norm`` bounds each example's gradient: ``compute_loss`` is called for one
    example at a time. Batches are drawn by the factorization's scheme, so that
    ``per_device_train_batch_size`` has no effect. Checkpoints hold the run, sealed, and training
    resumes at its own step; the key lies in ``key_folder``, not in ``output_dir``, which may be
    uploaded. The loss that is logged is computed from the data without noise: **not private**, as
    is ``trainer_state.json``.

    Args:
      arguments, named: as for ``Trainer``; a train_dataset with numbered records is needed.
      microbatch: examples whose gradients are held at once; all of a batch if left out.
      factorization, normalizer, seed, allow_uncertified, key_folder: as for
        :class:`~mfopt.torch.PrivateRun`, which is the attribute ``run``.

    Raises:
      UsageError: arguments that would change a step, more epochs or steps than the factorization
        covers; in training, as :class:`~mfopt.torch.PrivateRun`.
    """

    def __init__(
        self,
        *arguments: Any,
        factorization: Factorization,
        microbatch: int | None = None,
        normalizer: float | None = None,
        seed: int | None = None,
        allow_uncertified: bool = False,
        key_folder: str | os.PathLike[str] = KEY_FOLDER,
        **named: Any,
    ) -> None:
        settings = [*arguments[1:], named.get("args")][0]
        for name, (usual, rule, way_out) in _REFUSED.items():
            if (value := getattr(settings, name, usual)) != usual:
                raise _check.reject(f"args.{name}", value, rule, way_out)
        super().__init__(*arguments, **named)
        args = self.args
        self.run = PrivateRun(
            factorization,
            population_of(self.train_dataset),
            args.max_grad_norm,
            normalizer=normalizer,
            seed=seed,
            allow_uncertified=allow_uncertified,
            key_folder=key_folder,
        )
        self.microbatch = microbatch
        last, epoch = len(self.run.sampler), self.run.sampler.steps_per_epoch
        name, each = ("max_steps", 1) if args.max_steps > 0 else ("num_train_epochs", epoch)
        if (wanted := getattr(args, name)) * each > last:
            rule = f"the guarantee covers {last} steps, {epoch} an epoch"
            raise _check.reject(f"args.{name}", wanted, rule, "Optimize a factorization for more.")
        # the run's loader resumes at its step by itself: a Trainer that skips would skip twice
        args.ignore_data_skip = True

    def get_train_dataloader(self) -> Any:
        """The run's loader, with the collator of this trainer."""
        collate = self.data_collator
        if hasattr(self.train_dataset, "column_names"):  # a data set of `datasets`
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return self.run.loader(
            self.train_dataset,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and torch.cuda.is_available(),
        )

    def create_optimizer(self, model: object = None) -> torch.optim.Optimizer:
        """The optimizer of ``Trainer``, with the run attached to it."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if self.run.noise is None:
            self.run.attach(optimizer)
        return optimizer

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: object = None
    ) -> torch.Tensor:
        """Add the batch's clipped gradients to the run's sum; returns its mean loss."""
        model.train()
        with self.compute_loss_context_manager():
            return self.run.backward(
                self.accelerator.unwrap_model(model),
                self.compute_loss,  # type: ignore[arg-type]
                self._prepare_inputs(inputs),
                microbatch=self.microbatch,
            )
