"""The artifact of correlated against independent noise in training, with every evaluation."""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from mfopt.experiments import plots
from mfopt.experiments.runs.training import REPORTED, CorpusCell, TrainRunCell
from mfopt.experiments.studies.engine import Found, Row
from mfopt.experiments.studies.in_training import EVALUATIONS, LABELS, LOSS
from mfopt.experiments.studies.noise_in_training import NoiseInTraining
from mfopt.experiments.studies.rows import level, pick, spread
from mfopt.experiments.tables import csv_text

HEADER = ("strategy", "learning_rate", "seed", "noise_multiplier", "part", "step", "loss")
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


def evaluations(study: NoiseInTraining, found: Found) -> list[tuple[Any, ...]]:
    """One tuple for each evaluation of each run, in the order of :data:`HEADER`."""
    rows: list[tuple[Any, ...]] = []
    for arm in study.arms():
        by_rates = {rate: study.runs(arm, rate) for rate in study.rates}
        for k, seed in enumerate(sorted(study.seeds)):
            for rate, cells in by_rates.items():
                record = found[cells[k]].record
                head = (arm.strategy, f"{rate:g}", seed, repr(record["noise_multiplier"]))
                for part, losses in record["losses"].items():
                    rows += [(*head, part, step, repr(loss)) for step, loss in losses]
    return rows


def panels(said: dict[str, Any], rows: Sequence[Sequence[Any]]) -> list[plots.Panel]:
    """Loss against learning rate, and against steps at the best learning rate.

    Args:
      said: as :func:`summary` gives it.
      rows: as :func:`evaluations` gives them.
    """
    setting, before = said["setting"], said["pretrained"]
    rated, by_step = [], []
    for strategy, best in said["mechanisms"].items():
        losses: dict[float, dict[int, list[float]]] = {}  # of each seed, by rate and step
        for kind, rate, _, _, part, step, loss in rows:
            if (kind, part) == (strategy, REPORTED):
                steps = losses.setdefault(float(rate), {})
                steps.setdefault(int(step), []).append(float(loss))
        label, rates = LABELS[strategy], list(losses)
        rated.append(spread(label, rates, [losses[r][max(losses[r])] for r in rates]))
        chosen = losses[best["learning_rate"]]
        by_step.append(spread(label, list(chosen), list(chosen.values())))
    label, steps = "pretrained model, before private training", setting["bins"] * setting["epochs"]
    rated.append(level(label, setting["learning_rates"], before))
    by_step.append(level(label, (0, steps), before))
    return [
        plots.Panel(rated, "after the last step", "learning rate (log scale)", LOSS),
        plots.Panel(by_step, "at the learning rate best for each", "steps", LOSS, log_x=False),
    ]


def figure(said: dict[str, Any], rows: Sequence[Sequence[Any]]) -> Figure:
    """The plot; arguments as of :func:`panels`."""
    setting = said["setting"]
    title = (
        f"User-level DP fine-tuning, ε = {setting['epsilon']:g}, {setting['epochs']} epochs × "
        f"{setting['bins']} bins; bands: least to largest of {len(setting['seeds'])} seeds\n"
        f"in small: {setting['layers']} layers of width {setting['width']}, "
        f"{setting['bins'] * setting['epochs']} steps"
    )
    return plots.draw(panels(said, rows), title=title)


def write(
    stem: Path, study: NoiseInTraining, found: Found, kinds: Collection[str] = plots.EVERY
) -> list[Path]:
    """Write STEM.json, .csv, .png and .svg.

    Args:
      stem: path without suffix of the files.
      study: what was run.
      found: results of its cells.
      kinds: suffixes of the files that are wanted.
    """
    said, rows = summary(study, study.rows(found)), evaluations(study, found)
    texts = {".json": json.dumps(said, indent=2) + "\n", ".csv": csv_text(HEADER, rows)}
    drawn = {"": figure(said, rows)}
    return plots.write_files(stem, texts, drawn, kinds)


def redraw(path: Path, kinds: Collection[str]) -> list[Path]:
    """The plot drawn again from the JSON file that :func:`write` wrote and the CSV beside it."""
    said = json.loads(path.read_text("utf-8"))
    _, *rows = csv.reader(path.with_suffix(".csv").read_text("utf-8").splitlines())
    return plots.save(figure(said, rows), path.with_suffix(""), kinds)
