"""How much the clip norm matters: Figure 4 of Chua et al. 2024 in small.

ELS clips each record's gradient, ULS the mean gradient of a user's records, which varies less. The
update is divided by the clip norm before the optimizer sees it, so that a larger norm means more
noise against the same gradients, and not a longer step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, Arm, FineTuning, alike, apart, curve
from mfopt.experiments.studies.user_means import ELS, ULS

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class ClipNorms(FineTuning):
    """Loss on held-out users by clip norm and records a step, for both algorithms."""

    name = "clip-norms"
    summary = "How much the clip norm matters: ELS and ULS at fixed ε."
    source = "Chua et al. 2024, section 6, Figure 4"
    default_size = "embedded corpus, 4 clip norms, 2 batches, 1 ε, 3 seeds, 48 runs"
    time = "about 7 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "epsilon": 1.0,
        "clips": (0.01, 0.1, 1.0, 10.0, 100.0),
        "batches": (256, 512, 1024),
        "group": 10,
    }
    full_size = "2,000 steps of GPT-2 small's shape, 5 clip norms, 3 batches, 3 seeds, 4 rates"

    epsilon: float = flag(8.0, "ε of every run.", option="--eps")
    clips: tuple[float, ...] = flag((0.1, 0.5, 2.0, 8.0), "Clip norms.")
    batches: tuple[int, ...] = flag((16, 64), "Records a step to expect, of both.")
    group: int = flag(4, "Records of a user.", option="--k")

    def check(self) -> Self:
        super().check()
        self._check_numbers("clips", "batches")
        _check.epsilon("epsilon", self.epsilon)
        _check.integer("group", self.group)
        return self

    def arms(self) -> Iterator[Arm]:
        """All of them, in the table's order."""
        for algorithm in (ELS, ULS):
            for batch in self.batches:
                for clip in self.clips:
                    units = batch / (1 if algorithm == ELS else self.group)
                    yield Arm(
                        algorithm, self.group, units, float(self.epsilon), clip_norm=float(clip)
                    )

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = [self.row(found, arm) for arm in self.arms()]
        return Outcome(
            rows,
            {
                "algorithm": "algorithm",
                "records_a_step": "records a step",
                "clip_norm": "clip norm",
                "loss": "nats/token",
                "perplexity": "perplexity",
                "learning_rate": "rate",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "epsilon": "ε",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Clip norms: {self.steps} steps, user-level DP, ε = {self.epsilon:g}, "
            f"δ = {self.delta:g}",
            self._findings(found, rows),
        )

    def _line(self, rows: list[dict[str, Any]], algorithm: str, batch: int) -> list[dict[str, Any]]:
        return [
            row for row in rows if row["algorithm"] == algorithm and row["records_a_step"] == batch
        ]

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Panel

        return alike(
            [
                Panel(
                    [
                        curve(f"{batch} records a step", "clip_norm", self._line(rows, name, batch))
                        for batch in self.batches
                    ],
                    f"{name}: clips {what}",
                    "clip norm (log scale)",
                    LOSS_LABEL,
                )
                for name, what in ((ELS, "each record"), (ULS, "each user's mean"))
            ]
        )

    def _findings(self, found: Mapping[Task, Result], rows: list[dict[str, Any]]) -> list[str]:
        said = []
        arm_of = {id(row): arm for arm, row in zip(self.arms(), rows, strict=True)}
        for batch in self.batches:
            words = []
            for algorithm in (ELS, ULS):
                line = sorted(self._line(rows, algorithm, batch), key=lambda row: row["loss"])
                least, most = (arm_of[id(row)] for row in (line[0], line[-1]))
                gap = apart(self.losses(found, most), self.losses(found, least))
                words.append(
                    f"{algorithm} is best at {least.clip_norm:g} ({line[0]['loss']:.4f}) and "
                    f"worst at {most.clip_norm:g}, {gap} it"
                )
            said.append(f"{batch} records a step: {'; '.join(words)} ({self._runs_said()})")
        return said
