"""A prepared training run: train, evaluate, export. Reads top to bottom."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _files, _signals
from mfopt._runtime._float64 import pinned
from mfopt._runtime._types import JsonObject, PyTree
from mfopt.errors import FailureError
from mfopt.progress import Progress, Report, silent
from mfopt.training import mesh as meshes
from mfopt.training import metrics
from mfopt.training import validation as validated
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.continued import path_of
from mfopt.training.folder import CHECKPOINTS, MODEL, REPORT, mark_used
from mfopt.training.loop import TrainState
from mfopt.training.metrics import Evaluator, HeldOutLoss
from mfopt.training.models.huggingface import export_model
from mfopt.training.prepare import Prepared

HELD_OUT = ("held-out-users", "held-out-records")
PUBLIC = "public"
VALIDATION = "validation"  # losses of held-out users with noise
_CHECKPOINT_SECONDS = 600


@pinned
def execute(
    prepared: Prepared, *, resume_from: int | None = None, progress: Report = silent
) -> JsonObject:
    """Train, or resume training, and write all results into the run's folder.

    A signal that asks for an end (Ctrl-C, SIGTERM, SIGHUP) is answered after the step or evaluation
    that is under way: by a checkpoint, and KeyboardInterrupt with a note on how to resume.

    ``prepared`` is closed when this ends. ``resume_from``: a step; None: that of the newest
    checkpoint that is whole.

    Returns:
        A summary: steps done, evaluations before and after, the privacy report.
    """
    with (
        contextlib.closing(prepared),
        Checkpoints(prepared.folder / CHECKPOINTS) as checkpoints,
    ):
        return _execute(prepared, checkpoints, resume_from, progress)


def _execute(
    prepared: Prepared, checkpoints: Checkpoints, resume_from: int | None, progress: Report
) -> JsonObject:
    config = prepared.config
    folder = prepared.folder
    trainer = prepared.trainer
    lead = meshes.is_lead()
    state = trainer.init(prepared.secret.key("noise"))
    history: list[float] = []  # of losses on the public part

    def save() -> None:
        checkpoints.save(state, prepared.secret, {"public_losses": history, "run": prepared.facts})

    if checkpoints.steps or resume_from is not None:
        restored = checkpoints.restore(state, prepared.secret, resume_from, prepared.facts)
        for number, reason in restored.damaged.items():
            note = f"the checkpoint of step {number} is damaged ({reason}) and was removed"
            progress(Progress("training", note=note, lasting=True))
        state = restored.state
        history = restored.facts["public_losses"]
        note = f"resuming after step {int(state.step)}"
        progress(Progress("training", note=note, lasting=True))
    else:
        # before the first draw is used: a killed run goes on with its own draws, on its own data
        save()
        checkpoints.wait()
    start = saved = int(state.step)
    if lead:
        mark_used(folder)  # before the first draw
    _write_report(prepared, start)
    evaluate, healthy = _evaluators(prepared)
    report = progress if lead else silent
    with metrics.Recorder(
        config, start=start, total=prepared.steps, progress=report, write=lead
    ) as recorder:
        initial = evaluate(state) if start == 0 else {}
        recorder.evaluations(start, initial)
        latest = initial
        evaluated = start
        # by the clock of one process, so for one process only; and several cannot stop at the same
        # step without asking each other at every one
        alone = jax.process_count() == 1
        clock = time.monotonic()
        signals = recorder.enter_context(_signals.noted()) if alone else []
        stop = start if _settled(history, config.patience) else prepared.steps
        for result in trainer.run(state, max(start, stop)):
            recorder.step(result)
            state = result.state
            done = result.step + 1
            if not healthy(state):
                checkpoints.wait()
                good = checkpoints.restore(trainer.init(), prepared.secret).state
                _finish(prepared, good)
                raise FailureError(
                    f"after step {done} the parameters, or the loss of a public row with them, "
                    f"are not finite: training has diverged. {folder / MODEL} is that of "
                    f"step {int(good.step)}. Start a new run in another folder with a lower "
                    f"learning rate (now {prepared.facts['learning_rate']:g}), or with a "
                    "larger epsilon."
                )
            ends = done == prepared.steps
            if ends:  # beyond what the pace of the steps tells
                report(Progress("evaluating"))
            if ends or (config.evaluate_every and done % config.evaluate_every == 0):
                latest = evaluate(state)
                evaluated = done
                recorder.evaluations(done, latest)
                if (watched := latest.get(VALIDATION, latest.get(PUBLIC))) is not None:
                    history.append(watched.loss)
                ends |= _settled(history, config.patience)
            unsaved = time.monotonic() - clock
            late = alone and unsaved > _CHECKPOINT_SECONDS
            if ends or late or done % config.checkpoint_every == 0:
                save()
                saved = done
                clock = time.monotonic()
            if ends:
                break
            if signals:
                if saved != done:
                    save()
                checkpoints.wait()
                way_on = f"after step {done} of {prepared.steps}, which is saved; `mfopt train "
                way_on += f"--config {prepared.folder / 'config.toml'} --resume` resumes"
                raise _signals.interrupted(signals[0], way_on)
    checkpoints.wait()
    stated = _finish(prepared, state)
    done = int(state.step)
    return {
        "steps": done,
        "evaluated_after": evaluated,
        "before": {part: result._asdict() for part, result in initial.items()},
        "after": {part: result._asdict() for part, result in latest.items()},
        "privacy": stated,
        "output": str(folder),
    }


def _settled(history: list[float], patience: int) -> bool:
    """Return True if the last ``patience`` losses are no lower than an earlier one."""
    earlier = history[:-patience]
    return bool(patience and earlier) and min(earlier) <= min(history[-patience:])


def _finish(prepared: Prepared, state: TrainState) -> JsonObject | None:
    """Write the report and the model of a run at ``state``; return the report."""
    params = meshes.gather(state.params)  # by all processes
    folder = prepared.folder
    report = _write_report(prepared, int(state.step))
    if not meshes.is_lead():
        return report
    export_model(
        prepared.model,
        params,
        folder / MODEL,
        tokenizer=prepared.tokenizer,
        end_id=prepared.parts["train"].metadata.get("end_id"),
        base=Path(prepared.config.model) if prepared.config.model else None,
    )
    # whoever trains this model further, or a copy of it, finds what it has cost
    path = path_of(prepared.config) if report is None else folder / REPORT
    if path is not None:
        shutil.copyfile(path, folder / MODEL / REPORT)
    return report


def _evaluators(prepared: Prepared) -> tuple[Callable[[TrainState], Any], ...]:
    """(losses on the held-out parts and the public one, whether a run can still learn).

    The public one is computed where it decides when to stop. A run can learn where parameters, and
    the loss of a public row, are finite. Both are post-processing of what was released, so that a
    run which stops for them tells nothing more about the data. (The loss of a private batch would.)
    """
    config = prepared.config
    model = prepared.model
    evaluator = Evaluator(prepared.model, config.length, mesh=prepared.mesh)
    # the row counts through the vocabulary
    tokens = np.arange(config.length, dtype=np.int32) % (model.vocab_size or 2)

    @jax.jit
    def sound(params: PyTree, frozen: PyTree) -> jax.Array:
        params, frozen = meshes.gathered(prepared.mesh, (params, frozen))
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]
        loss = model.loss(params, frozen, jnp.asarray(tokens), jnp.ones(config.length, bool))
        return jnp.all(jnp.stack([*finite, jnp.isfinite(loss)]))

    validation = prepared.validation

    def evaluate(state: TrainState) -> dict[str, HeldOutLoss]:
        # without noise held-out users and records are private, and users may be paid for instead
        shown = [
            part
            for part in HELD_OUT
            if config.private_metrics and part in prepared.parts
            if part != (validation and validated.PART)
        ]
        if config.patience and validation is None:
            shown.append(PUBLIC)
        losses = {
            part: evaluator(state.params, prepared.parts[part], config.evaluate_records)
            for part in shown
        }
        step = int(state.step)
        if validation is not None and step in validation.steps:
            losses[VALIDATION] = HeldOutLoss(validation.loss(evaluator, state.params, step), 0)
        return losses

    return evaluate, lambda state: bool(sound(state.params, evaluator.frozen))


def _write_report(prepared: Prepared, done: int) -> JsonObject | None:
    """The report; the first process writes it, and the settings."""
    report = prepared.report(done)
    if meshes.is_lead():
        _files.write(prepared.folder / "config.toml", prepared.config.to_toml())
        if report is not None:
            _files.write(prepared.folder / REPORT, report)
    return report
