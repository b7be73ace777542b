"""A prepared training run: train, evaluate, export. Reads top to bottom."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from mfopt import _check, _files
from mfopt.progress import Progress, Report, silent
from mfopt.training import mesh as meshes
from mfopt.training import metrics, privacy
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.evaluation import HeldOutLoss
from mfopt.training.export import export_model
from mfopt.training.loop import TrainState
from mfopt.training.prepare import Prepared, placed

HELD_OUT = ("held-out-users", "held-out-records")


def execute(prepared: Prepared, *, progress: Report = silent) -> dict[str, Any]:
    """Train, or go on training, and write everything into the run's folder.

    Returns:
        A summary: steps done, slots padded and units truncated (since the start or resumption; as
        private as the metrics), evaluations before and after, the privacy report.
    """
    config, folder, trainer = prepared.config, prepared.folder, prepared.trainer
    lead = jax.process_index() == 0
    with Checkpoints(folder / "checkpoints", config.keep) as checkpoints:
        state = trainer.init(prepared.secret.key("noise"))
        if checkpoints.steps:
            state, secret, facts = checkpoints.restore(state)
            _check_same_run(
                facts["run"] | {"secret": secret}, prepared.facts | {"secret": prepared.secret}
            )
            if facts["privacy"] is not None:
                privacy.check_signature(facts["privacy"], secret)
            note = f"going on after step {int(state.step)}"
            progress(Progress("training", note=note, lasting=True))
        else:
            # before the first draw is used: a killed run goes on with its own draws
            checkpoints.save(state, prepared.secret, _facts(prepared, 0))
        start = int(state.step)
        if lead:
            _write_report(prepared, start)
        evaluate = _evaluator(prepared)
        with metrics.Recorder(
            folder,
            start=start,
            total=prepared.steps,
            private_metrics=config.private_metrics,
            tensorboard=config.tensorboard and lead,
            write=lead,
            progress=progress if lead else silent,
        ) as recorder:
            first = evaluate(state) if start == 0 else {}
            recorder.evaluations(start, first)
            last, evaluated, padded, truncated = first, start, 0, 0
            for result in trainer.run(state, prepared.steps):
                recorder.step(result)
                padded += result.batch.padded
                truncated += result.batch.truncated
                state, done = result.state, result.step + 1
                ends = done == prepared.steps
                if ends or done % config.checkpoint_every == 0:
                    checkpoints.save(state, prepared.secret, _facts(prepared, done))
                if ends or (config.evaluate_every and done % config.evaluate_every == 0):
                    last, evaluated = evaluate(state), done
                    recorder.evaluations(done, last)
        done = int(state.step)
    params = meshes.gather(prepared.mesh, state.params)
    if lead:
        _write_report(prepared, done)
        export_model(prepared.model, params, folder / "model", force=True)
        metrics.plot(folder, folder / "loss.png")
    return {
        "steps": done,
        "padded": padded,
        "truncated": truncated,
        "evaluated_after": evaluated,
        "before": {part: result._asdict() for part, result in first.items()},
        "after": {part: result._asdict() for part, result in last.items()},
        "privacy": prepared.report(done),
        "output": str(folder),
    }


def _evaluator(prepared: Prepared) -> Callable[[TrainState], dict[str, HeldOutLoss]]:
    config = prepared.config
    evaluator, _, frozen = placed(config, prepared.model, prepared.mesh)

    def evaluate(state: TrainState) -> dict[str, HeldOutLoss]:
        return {
            part: evaluator(state.params, frozen, prepared.parts[part], config.evaluate_records)
            for part in HELD_OUT
            if part in prepared.parts
        }

    return evaluate


def _facts(prepared: Prepared, done: int) -> dict[str, Any]:
    return {
        "run": prepared.facts,
        "privacy": prepared.report(done),
        "settings": dataclasses.asdict(prepared.config),
    }


def _check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    other = [name for name in now if saved.get(name) != now[name]]
    if other:
        raise _check.reject(
            "resume",
            ", ".join(other),
            "differs from the run that wrote the checkpoint",
            "The same noise would meet other data: resume with what the run was started with "
            "(its config.toml), or start a new run.",
        )


def _write_report(prepared: Prepared, done: int) -> None:
    _files.write(prepared.folder / "config.toml", prepared.config.to_toml())
    report = prepared.report(done)
    if report is not None:
        text = json.dumps(report, indent=2, sort_keys=True) + "\n"
        _files.write(prepared.folder / "privacy-report.json", text)
