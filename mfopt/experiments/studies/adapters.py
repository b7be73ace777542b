"""Adapters of low rank against all parameters: Table 8 of Chua et al. 2024 in small.

Adapters train fewer numbers, so the noise on them is shorter as a whole. Each rank stands at its
own best learning rate, with and without privacy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mfopt import _check
from mfopt.experiments.cache import Result, Task
from mfopt.experiments.studies.base import Outcome, check_several, flag
from mfopt.experiments.studies.fine_tuning import (
    LOSS_LABEL,
    PLAIN,
    Arm,
    FineTuning,
    apart,
    curve,
)
from mfopt.experiments.studies.user_means import ULS

if TYPE_CHECKING:
    from mfopt.experiments.plots import Panel


@dataclasses.dataclass(frozen=True)
class Adapters(FineTuning):
    """Loss on held-out users of full fine-tuning and of adapters of several ranks."""

    name = "lora"
    summary = "Adapters of low rank against all parameters, with and without privacy."
    source = "Chua et al. 2024, appendix C.1, Table 8"
    default_size = "embedded corpus, 2 ranks and all, ULS and not private, 3 rates × 3 seeds"
    time = "about 7 CPU-minutes"
    full: ClassVar[Mapping[str, Any]] = {
        **FineTuning.PAPER,
        "ranks": (16, 32, 64),
        "epsilons": (1.0, 3.0, 8.0),
        "cohort": 1024,
        "group": 10,
    }
    full_size = "2,000 steps of GPT-2 small's shape, ranks 16 to 64, 3 ε, 3 seeds, 4 rates"

    epsilons: tuple[float, ...] = flag((8.0,), "ε of the private runs.", option="--eps")
    ranks: tuple[int, ...] = flag((4, 16), "Ranks of the adapters.")
    cohort: int = flag(16, "Users a step to expect.")
    group: int = flag(4, "Records of a user in a step.", option="--k")
    rates: tuple[float, ...] = flag((0.003, 0.01, 0.03), "Learning rates to choose from (adam).")

    def check(self) -> Self:
        super().check()
        check_several("ranks", self.ranks)
        for rank in self.ranks:
            _check.integer("ranks", rank)
        self._check_numbers("epsilons")
        for name in ("cohort", "group"):
            _check.integer(name, getattr(self, name))
        return self

    def arms(self) -> Iterator[Arm]:
        """All of them: no privacy first, all parameters first."""
        for epsilon in (None, *map(float, self.epsilons)):
            for rank in (0, *self.ranks):
                algorithm = PLAIN if epsilon is None else ULS
                yield Arm(algorithm, self.group, float(self.cohort), epsilon, rank=rank)

    def outcome(self, found: Mapping[Task, Result]) -> Outcome:
        rows = [
            self.row(found, arm) | {"trained": f"rank {arm.rank}" if arm.rank else "all"}
            for arm in self.arms()
        ]
        return Outcome(
            rows,
            {
                "algorithm": "algorithm",
                "epsilon": "ε",
                "trained": "trained",
                "parameters": "parameters",
                "loss": "nats/token",
                "perplexity": "perplexity",
                "pretrained": "pretrained",
                "learning_rate": "rate",
                "privacy_unit": "unit",
                "sampling": "sampling",
                "noise_multiplier": "σ",
            },
            self._panels(rows),
            f"Adapters against all parameters: {self.steps} steps, δ = {self.delta:g} per user",
            self._findings(found, rows),
        )

    def _panels(self, rows: list[dict[str, Any]]) -> list[Panel]:
        from mfopt.experiments.plots import Panel

        curves = []
        for epsilon in (None, *self.epsilons):
            label = PLAIN if epsilon is None else f"ULS, ε = {epsilon:g}"
            mine = [row for row in rows if row["epsilon"] == epsilon]
            curves.append(curve(label, "parameters", mine))
        axis = "trained parameters (log scale)\nrightmost: all; the others: adapters"
        return [Panel(curves, "each at its best learning rate", axis, LOSS_LABEL)]

    def _findings(self, found: Mapping[Task, Result], rows: Sequence[dict[str, Any]]) -> list[str]:
        said = []
        for epsilon in (None, *self.epsilons):
            whole, *adapters = (arm for arm in self.arms() if arm.epsilon == epsilon)
            words = ", ".join(
                f"rank {arm.rank} ends {apart(self.losses(found, arm), self.losses(found, whole))}"
                for arm in adapters
            )
            name = PLAIN if epsilon is None else f"ε = {epsilon:g}"
            said.append(f"{name}: against all parameters {words} ({self._runs_said()})")
        return [*said, *self._ends(rows)]
