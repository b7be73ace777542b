"""The artifact of correlated against independent noise in training, with every evaluation."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from statistics import mean
from typing import Any

from mfopt import _files
from mfopt.experiments import plots
from mfopt.experiments.runs.training import CorpusCell, TrainRunCell
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.noise_in_training import (
    EVALUATIONS,
    LABELS,
    LOSS,
    NoiseInTraining,
    by_rate,
    spread,
)
from mfopt.experiments.studies.rows import level, pick

STUDY = NoiseInTraining(
    data=("stdlib",),
    rates=(5e-4, 1e-3, 2e-3, 4e-3),
    epochs=8,
    records=4,
    length=64,
    pretrain_steps=300,
)


def setting(study: NoiseInTraining) -> dict[str, Any]:
    """What was compared, in the words of `mfopt train`."""
    (data,), (optimizer,) = study.data, study.by_name()
    return {
        "data": data,
        "bins": study.bins,
        "epochs": study.epochs,
        "epsilon": study.epsilon,
        "delta": study.delta,
        "strategies": study.strategies,
        "learning_rates": study.rates,
        "seeds": study.seeds,
        "fitted": False,
        "optimizer": optimizer,
        "schedule": study.schedule,
        "records_per_user": study.records,
        "length": study.length,
        "width": CorpusCell.width,
        "layers": CorpusCell.layers,
        "pretrain_steps": study.pretrain_steps,
        "pretrain_rate": CorpusCell.pretrain_rate,
        "evaluations": EVALUATIONS,
        "evaluate_records": TrainRunCell.evaluate_records,
    }


def summary(study: NoiseInTraining, rows: list[Row]) -> dict[str, Any]:
    """The outcome, JSON-able: each mechanism at its best learning rate.

    ``gain`` is, for each seed, the loss of the first mechanism less that of this one.
    """
    best = {strategy: pick(rows, noise=strategy) for strategy in study.strategies}
    return {
        "setting": setting(study),
        "unit": "nats per token on held-out users; learning rates chosen on held-out records",
        "pretrained": rows[0]["users_before"],
        "mechanisms": {
            strategy: {
                "learning_rate": mine[0]["learning_rate"],
                "noise_multiplier": mine[0]["noise_multiplier"],
                "loss": [row["users"] for row in mine],
                "mean_loss": mean(row["users"] for row in mine),
                "gain": [row["users_gain"] for row in mine],
            }
            for strategy, mine in best.items()
        },
    }


def csv_text(study: NoiseInTraining, found: Found) -> str:
    """One row for each evaluation of each run."""
    rows: list[tuple[Any, ...]] = []
    for arm in study.arms():
        by_rates = {rate: study.runs(arm, rate) for rate in study.rates}
        for k, seed in enumerate(sorted(study.seeds)):
            for rate, cells in by_rates.items():
                record = found[cells[k]].record
                head = (arm.strategy, f"{rate:g}", seed, repr(record["noise_multiplier"]))
                for part, losses in record["losses"].items():
                    rows += [(*head, part, step, repr(loss)) for step, loss in losses]
    buffer = io.StringIO()
    header = ("strategy", "learning_rate", "seed", "noise_multiplier", "part", "step", "loss")
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


def panels(study: NoiseInTraining, rows: list[Row]) -> list[plots.Panel]:
    """Loss against learning rate, and against steps at the best learning rate."""
    rated, by_step = [], []
    for strategy in study.strategies:
        row = pick(rows, noise=strategy)[0]
        label = LABELS[strategy]
        rated.append(by_rate(label, row))
        chosen = row["_tried"][row["learning_rate"]]
        steps = [step for step, _ in chosen[0]]
        by_step.append(
            spread(label, steps, [[loss for _, loss in at] for at in zip(*chosen, strict=True)])
        )
    label, before = "pretrained model, before private training", rows[0]["users_before"]
    rated.append(level(label, study.rates, before))
    by_step.append(level(label, (0, study.bins * study.epochs), before))
    return [
        plots.Panel(rated, "after the last step", "learning rate", LOSS),
        plots.Panel(by_step, "at the learning rate best for each", "steps", LOSS, log_x=False),
    ]


def write(stem: Path, study: NoiseInTraining, found: Found) -> list[Path]:
    """STEM.json, .csv, .png and .svg."""
    rows = study.rows(found)
    title = (
        f"User-level DP fine-tuning, ε = {study.epsilon:g}, {study.epochs} epochs × "
        f"{study.bins} bins; bands: least to largest of {len(study.seeds)} seeds"
    )
    text = json.dumps(summary(study, rows), indent=2) + "\n"
    return [
        _files.write(stem.with_name(f"{stem.name}.json"), text),
        _files.write(stem.with_name(f"{stem.name}.csv"), csv_text(study, found)),
        *plots.save(plots.draw(panels(study, rows), title=title), stem),
    ]
