"""Which optimizer makes the most of correlated noise, on several data sets.

Rates are given by how far the noise alone moves a parameter, so that one grid serves every
optimizer and mechanism. Each optimizer stands with the rate that is best for it on held-out
records, and is reported on held-out records and users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, Self

from mfopt import _check
from mfopt.experiments import plots, training
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, check_several, flag
from mfopt.experiments.studies.image_cells import interval
from mfopt.experiments.studies.noise_in_training import NoiseInTraining, at_best, gains_of
from mfopt.experiments.training import CHOSEN_ON, REPORTED, Run, TrainingComparison
from mfopt.training.data.embedded import EMBEDDED
from mfopt.training.optimizers import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class OptimizersInTraining(NoiseInTraining):
    """Loss on held-out users and records, each optimizer at its own best rate."""

    name = "optimizers-in-training"
    summary = "Adam, Adam without the noise's share of its second moment, and momentum."
    source = "Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC); Denisov et al. 2022 (momentum)"
    default_size = "embedded corpus, BLT noise, 3 optimizers, 4 rates, 3 seeds, 32 steps each"
    time = "about 9 CPU-minutes"

    strategies: tuple[str, ...] = flag(("blt",), "Forms of C.", choices=tuple(training.LABELS))
    optimizers: tuple[str, ...] = flag(
        ("adam", "adam-bc", "momentum"),
        "The first is what the others are measured against.",
        choices=OPTIMIZERS,
    )
    rates: tuple[float, ...] = flag(
        (0.006, 0.012, 0.024, 0.048),
        "Moves to choose from: how far the noise alone moves a parameter.",
        option="--moves",
    )

    def check(self) -> Self:
        check_several("optimizers", self.optimizers)
        for optimizer in self.optimizers:
            if optimizer not in OPTIMIZERS:
                raise _check.reject(
                    "optimizers", optimizer, f"must be one of {', '.join(OPTIMIZERS)}"
                )
        return super().check()

    def _settings(self, data: str) -> dict[str, TrainingComparison]:
        """The comparison on one data set, by optimizer."""
        setting = dataclasses.replace(self.setting(data), fitted=True)
        return {
            optimizer: dataclasses.replace(setting, optimizer=optimizer)
            for optimizer in self.optimizers
        }

    def cells(self) -> Iterable[Task]:
        return [
            task
            for data in self.data
            for setting in self._settings(data).values()
            for task in training.run_tasks(setting).values()
        ]

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows: list[dict[str, Any]] = []
        panels: list[plots.Panel] = []
        said: list[str] = []
        for data in self.data:
            name = data if data in EMBEDDED else Path(data).name
            curves = []
            runs = {
                optimizer: training.runs_of(setting, found)
                for optimizer, setting in self._settings(data).items()
            }
            for strategy in self.strategies:
                best = {optimizer: at_best(runs[optimizer], strategy) for optimizer in runs}
                first = best[self.optimizers[0]]
                for optimizer, chosen in best.items():
                    label = f"{optimizer}, {training.LABELS[strategy]}"
                    curves.append(training.by_rate(label, runs[optimizer], strategy, self.rates))
                    for run, other in zip(chosen, first, strict=True):
                        rows.append({"optimizer": optimizer} | self.row(name, run, other))
                said += self._said(name, strategy, best)
            panels.append(
                plots.Panel(curves, name, "move of a parameter by the noise", training.LOSS)
            )
        columns = {
            "data": "data",
            "noise": "noise",
            "optimizer": "optimizer",
            "learning_rate": "move",
            "users_before": "users: before",
            "users": "after",
            "users_gain": "gain",
            "records": "records",
            "records_gain": "gain",
            "epsilon": "ε",
        }
        title = f"User-level DP, ε = {self.epsilon:g}; bands: {len(self.seeds)} seeds"
        return Outcome(rows, columns, panels, title, said)

    def _said(self, name: str, strategy: str, best: Mapping[str, list[Run]]) -> list[str]:
        """How each optimizer does against the first, and which rates are no optimum."""
        first, *others = best
        said = []
        for optimizer in others:
            words = []
            for part in (REPORTED, CHOSEN_ON):
                gains = gains_of(best[optimizer], best[first], part)
                about = f"{-mean(gains):+.4f}"
                if len(gains) > 1:
                    about += f" ± {interval(gains)[1]:.4f}"
                words.append(f"{about} on {part}")
            said.append(
                f"{name}, {strategy}: {optimizer} against {first}, nats (95%, paired by seed): "
                + ", ".join(words)
            )
        if others:
            least = min(best, key=lambda optimizer: mean(r.last(REPORTED) for r in best[optimizer]))
            said.append(f"{name}, {strategy}: least loss on held-out users with {least}")
        for optimizer, chosen in best.items():
            move = chosen[0].learning_rate
            if not self.bracketed(move):
                said.append(
                    f"{name}, {strategy}: the best move of {optimizer}, {move:g}, is the last tried"
                )
        return said
