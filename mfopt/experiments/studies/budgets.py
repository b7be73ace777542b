"""Loss against ε at fixed compute: ELS and ULS fine-tuning a language model by the real trainer.

Charles et al. 2024, section 6 (Figures 4 to 8 in small): B records a step in expectation, from the
same pretrained model, as many steps.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, flag
from mfopt.experiments.studies.fine_tuning import LOSS_LABEL, Arm, FineTuning, alike, apart, curve
from mfopt.experiments.studies.user_means import ELS, ULS

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class TrainingBudgets(FineTuning):
    """Loss of ELS and ULS on held-out users, by ε and records a step."""

    name = "els-uls-training"
    summary = "ELS against ULS: fine-tuning a language model at fixed compute."
    source = "Charles et al. 2024, section 6, Figures 4 to 8 in small"
    default_size = "embedded corpus, 2 layers of width 64, 32 steps, 2 ε, 3 rates, 3 seeds: 54 runs"
    time = "about 8 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "epsilons": (1.0, 4.0, 16.0, 64.0),
        "budgets": (64, 256, 1024),
        "groups": (1, 4, 16),
        "els_groups": (16,),
        "width": 1024,
        "layers": 24,
    }
    full_size = "2,000 steps of a 350M-parameter model, 4 ε, 3 budgets"

    epsilons: tuple[float, ...] = flag((2.0, 8.0), "ε of the runs.", option="--eps")
    budgets: tuple[int, ...] = flag((64,), "Records a step to expect.")
    groups: tuple[int, ...] = flag((1, 4), "G of ULS: records of a user in a step.")
    els_groups: tuple[int, ...] = flag(
        (4,), "G of ELS: records kept of each user.", option="--els-group"
    )
    times: tuple[float, ...] = flag(
        (1.0,),
        "Times the users that there are, as if for σ (their Figure 8); rows say what ε is held.",
        option="--users-times",
    )
    rates: tuple[float, ...] = flag((0.003, 0.01, 0.03), "Learning rates to choose from (adam).")
    seeds: tuple[int, ...] = flag((0, 1, 2), "One run for each, pinning its randomness.")

    def check(self) -> Self:
        super().check()
        self._check_numbers("epsilons", "budgets", "groups", "els_groups", "times")
        return self

    def arms(self) -> Iterator[Arm]:
        """All of them, in the table's order."""
        for epsilon in self.epsilons:
            for budget in self.budgets:
                for times in self.times:
                    for algorithm in (ELS, ULS):
                        yield from self._arms(algorithm, budget, epsilon, times)

    def _arms(self, algorithm: str, budget: int, epsilon: float, times: float) -> list[Arm]:
        """One algorithm at every G of its own."""
        units = {g: budget / (1 if algorithm == ELS else g) for g in self._groups(algorithm)}
        return [
            Arm(algorithm, g, float(n), float(epsilon), users=float(times))
            for g, n in units.items()
        ]

    def _groups(self, algorithm: str) -> tuple[int, ...]:
        return self.els_groups if algorithm == ELS else self.groups

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = [
            self.row(found, arm)
            | {"algorithm": arm.label, "asked_epsilon": arm.epsilon, "users_times": arm.users}
            for arm in self.arms()
        ]
        several = {"asked_epsilon": "ε asked", "users_times": "at users ×"}
        return Outcome(
            rows,
            (several if len(self.times) > 1 else {})
            | {
                "epsilon": "ε",
                "records_a_step": "B",
                "algorithm": "algorithm",
                "loss": "nats/token",
                "least": "least",
                "largest": "largest",
                "pretrained": "pretrained",
                "learning_rate": "rate",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Fine-tuning at fixed compute, {self.steps} steps, user-level DP, δ = {self.delta:g}",
            self._findings(found, rows),
        )

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Curve, Panel

        panels = []
        # one ε is no axis: then G is
        several = len(self.epsilons) > 1
        by, axis = (
            ("asked_epsilon", "user-level ε") if several else ("group", "records of a user G")
        )
        for budget, times in itertools.product(self.budgets, self.times):
            mine = [
                row
                for row in rows
                if (row["records_a_step"], row["users_times"]) == (budget, times)
            ]
            name = {row["algorithm"]: row["algorithm"] for row in mine}
            if not several:
                name = {label: label.partition(",")[0] for label in name}
            curves = [
                curve(label, by, [row for row in mine if name[row["algorithm"]] == label])
                for label in dict.fromkeys(name.values())
            ]
            ends = (min(row[by] for row in mine), max(row[by] for row in mine))
            curves.append(Curve("pretrained, no fine-tuning", ends, (mine[0]["pretrained"],) * 2))
            title = f"{budget} records a step" + ("" if several else f", ε = {self.epsilons[0]:g}")
            title += f", as if {times:g} times the users" if len(self.times) > 1 else ""
            panels.append(Panel(curves, title, f"{axis} (log scale)", LOSS_LABEL))
        return alike(panels)

    def _findings(self, found: Mapping[Task, Result], rows: Sequence[dict[str, Any]]) -> list[str]:
        said = []
        row_of = dict(zip(self.arms(), rows, strict=True))
        for epsilon, budget, times in itertools.product(self.epsilons, self.budgets, self.times):
            # as a learning rate is: on other records than those that are reported
            els, best = (
                min(
                    self._arms(algorithm, budget, epsilon, times),
                    key=lambda arm: row_of[arm]["on_records"],
                )
                for algorithm in (ELS, ULS)
            )
            losses, pretrained = self.losses(found, best), row_of[best]["pretrained"]
            as_if = f" (as if {times:g} times the users)" if len(self.times) > 1 else ""
            said.append(
                f"ε = {epsilon:g}{as_if}, {budget} records a step: {best.label} ends "
                f"{apart(losses, self.losses(found, els))} {els.label}, and "
                f"{apart(losses, pretrained)} the pretrained model ({self._runs_said()})"
            )
        return [*said, *self._ends(rows)]
