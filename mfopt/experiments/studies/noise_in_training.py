"""Correlated against independent noise in whole training runs, on several data sets.

Every mechanism runs, under one sampling scheme, the same batches at the same (ε, δ) from the same
pretrained model, over one grid of learning rates; it stands with the rate that is best for it on
held-out records, and is reported on held-out records and held-out users.
(:mod:`mfopt.experiments.training` has the runs.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar, Self

import numpy as np

from mfopt import _check
from mfopt.experiments import training
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.plots import Panel
from mfopt.experiments.studies.base import Outcome, Study, check_number, check_several, flag
from mfopt.experiments.studies.image_cells import interval
from mfopt.experiments.training import CHOSEN_ON, REPORTED, Run, TrainingComparison
from mfopt.training.data.embedded import EMBEDDED
from mfopt.training.optimizers import SCHEDULES


@dataclasses.dataclass(frozen=True)
class NoiseInTraining(Study):
    """Loss on held-out users and records, each mechanism at its own best learning rate."""

    name = "noise-in-training"
    summary = "Correlated against independent noise: fine-tuning on several data sets."
    source = "McMahan et al. 2024, section 5 (the comparison; on other data)"
    default_size = "embedded corpus, 2 mechanisms, 3 learning rates, 3 seeds, 32 steps each"
    time = "about 5 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        "data": ("stdlib", "stdlib-code"),
        "seeds": (0, 1, 2),
        "epochs": 8,
        "rates": (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064),
        "pretrain_steps": 300,
    }
    full_size = "2 corpora, 64 steps each, 8 learning rates, 3 seeds, a model pretrained for longer"
    needs = "data of one's own, by `mfopt data build`, with a public and both held-out parts"

    data: tuple[str, ...] = flag(
        ("stdlib-code",), "Embedded corpora, or folders of `mfopt data build`."
    )
    strategies: tuple[str, ...] = flag(
        ("identity", "blt"),
        "Forms of C; the first is what the others are measured against.",
        choices=tuple(training.LABELS),
    )
    rates: tuple[float, ...] = flag((0.004, 0.012, 0.036), "Learning rates to choose from.")
    schedule: str = flag(
        "constant", "Of the learning rate, for all mechanisms alike.", choices=SCHEDULES
    )
    seeds: tuple[int, ...] = flag((0, 1, 2), "Of batches and noise; each is a run.")
    epsilon: float = flag(8.0, "ε of every statement.", option="--eps")
    delta: float = flag(1e-5, "δ of every statement.")
    bins: int = flag(8, "Iterations of an epoch.", option="--iters")
    epochs: int = flag(4, "Epochs.")
    records: int = flag(2, "Records of a user in one participation.", option="--records-per-user")
    length: int = flag(48, "Tokens of a record.")
    pretrain_steps: int = flag(120, "Steps on the public part first.")

    def check(self) -> Self:
        for name in ("data", "strategies", "rates", "seeds"):
            values = getattr(self, name)
            check_several(name, values)
        for rate in self.rates:
            check_number("rates", rate)
        for seed in self.seeds:
            _check.pinned("seeds", seed)
        _check.epsilon("epsilon", self.epsilon)
        _check.probability("delta", self.delta)
        for name in ("bins", "epochs", "records", "length"):
            _check.integer(name, getattr(self, name))
        _check.integer("pretrain_steps", self.pretrain_steps, at_least=0)
        for folder in self.data:
            training.check_parts(folder)
        return self

    def setting(self, data: str) -> TrainingComparison:
        """The comparison on one data set."""
        return TrainingComparison(
            data=data,
            bins=self.bins,
            epochs=self.epochs,
            epsilon=self.epsilon,
            delta=self.delta,
            strategies=self.strategies,
            learning_rates=self.rates,
            schedule=self.schedule,
            seeds=self.seeds,
            records_per_user=self.records,
            length=self.length,
            pretrain_steps=self.pretrain_steps,
        )

    def cells(self) -> Iterable[Task]:
        return [
            task for data in self.data for task in training.run_tasks(self.setting(data)).values()
        ]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows: list[dict[str, Any]] = []
        panels: list[Panel] = []
        said: list[str] = []
        for data in self.data:
            setting = self.setting(data)
            runs = training.runs_of(setting, found)
            name = data if data in EMBEDDED else Path(data).name
            rows += self._rows(name, runs)
            first = training.panels(setting, runs)[0]
            panels.append(first._replace(title=name))
            said += self._findings(name, runs)
        columns = {
            "data": "data",
            "noise": "noise",
            "learning_rate": "rate",
            "users_before": "users: before",
            "users": "after",
            "users_gain": "gain",
            "records": "records",
            "records_gain": "gain",
            "privacy_unit": "unit",
            "sampling": "sampling",
            "noise_multiplier": "σ",
            "epsilon": "ε",
        }
        title = f"User-level DP, ε = {self.epsilon:g}; bands: {len(self.seeds)} seeds"
        return Outcome(rows, columns, panels, title, said)

    def _rows(self, name: str, runs: list[Run]) -> Iterable[dict[str, Any]]:
        """A row for each mechanism and seed, at the mechanism's best rate; losses in nats."""
        first = at_best(runs, self.strategies[0])
        for strategy in self.strategies:
            for run, other in zip(at_best(runs, strategy), first, strict=True):
                yield self.row(name, run, other)

    def row(self, name: str, run: Run, other: Run) -> dict[str, Any]:
        """What a run reached, and how much less its loss is than that of ``other``."""
        return {
            "data": name,
            "noise": run.strategy,
            "seed": run.seed,
            "learning_rate": run.learning_rate,
            "schedule": self.schedule,
            "rate_bracketed": self.bracketed(run.learning_rate),
            "users_before": run.losses[REPORTED][0][1],
            "users": run.last(REPORTED),
            "users_gain": other.last(REPORTED) - run.last(REPORTED),
            "records": run.last(CHOSEN_ON),
            "records_gain": other.last(CHOSEN_ON) - run.last(CHOSEN_ON),
            "privacy_unit": "user",
            "adjacency": "add-remove",
            "sampling": f"{training.sampling_of(run.strategy)}, {self.bins} bins, "
            f"{self.epochs} epochs",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise_multiplier": run.noise_multiplier,
        }

    def bracketed(self, rate: float) -> bool:
        """Whether rates on both sides of it were tried."""
        return min(self.rates) < rate < max(self.rates)

    def _findings(self, name: str, runs: list[Run]) -> list[str]:
        first, *others = self.strategies
        before = runs[0].losses[REPORTED][0][1]
        yardstick, said = at_best(runs, first), []
        for strategy in others:
            chosen = at_best(runs, strategy)
            for part in (REPORTED, CHOSEN_ON):
                gains = gains_of(chosen, yardstick, part)
                wins = sum(gain > 0 for gain in gains)
                about = f"{mean(gains):.4f}"
                if len(gains) > 1:
                    about += f" ± {interval(gains)[1]:.4f} (95%, paired by seed)"
                said.append(
                    f"{name}, {part}: {strategy} below {first} in {wins} of {len(gains)} seeds, by "
                    f"{about} nats"
                )
            fall = before - mean(run.last(REPORTED) for run in chosen)
            said.append(f"{name}: {strategy} lowers the loss on held-out users by {fall:.3f} nats")
        for strategy in self.strategies:
            rate = training.best_rate(runs, strategy)
            if not self.bracketed(rate):
                said.append(f"{name}: the best rate of {strategy}, {rate:g}, is the last one tried")
        return said


def gains_of(runs: list[Run], others: list[Run], part: str) -> np.ndarray:
    """How much less the loss of each run is than that of another of the same seed.

    Args:
      runs: of one mechanism, by seed.
      others: of another.
      part: of the data, by name.
    """
    return np.array([b.last(part) - a.last(part) for a, b in zip(runs, others, strict=True)])


def at_best(runs: list[Run], strategy: str) -> list[Run]:
    """The runs of a mechanism at its best rate, by seed."""
    rate = training.best_rate(runs, strategy)
    mine = [run for run in runs if run.strategy == strategy and run.learning_rate == rate]
    return sorted(mine, key=lambda run: run.seed)
