"""Comparison of optimizers under correlated noise, on several data sets.

Rates are given by how far the noise alone moves a parameter, so that one grid serves every
optimizer and mechanism. Each optimizer stands with the rate that is best for it on held-out
records, and is reported on held-out records and users.
"""

from __future__ import annotations

import dataclasses

from mfopt.experiments.studies.engine import option
from mfopt.experiments.studies.in_training import LABELS, TrainingStudy
from mfopt.training.config import OPTIMIZERS


@dataclasses.dataclass(frozen=True)
class OptimizersInTraining(TrainingStudy):
    """Loss on held-out users and records, each optimizer at its own best rate."""

    name = "optimizers-in-training"
    summary = "Adam, Adam without the noise's share of its second moment, and momentum."
    source = "Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC); Denisov et al. 2022 (momentum)"
    default_size = "embedded corpus, BLT noise, 3 optimizers, 4 rates, 3 seeds, 32 steps each"
    time = "about 9 CPU-minutes"
    columns = (
        "data; noise; optimizer; learning_rate=move; users_before=users: before; users=after; "
        "users_gain=gain; records; records_gain=gain; epsilon=ε"
    )

    axis = "move of a parameter by the noise"
    chosen_is = "move"

    strategies: tuple[str, ...] = option(("blt",), "Forms of C.", choices=tuple(LABELS))
    optimizers: tuple[str, ...] = option(
        ("adam", "adam-bc", "momentum"),
        "The first is what the others are measured against.",
        choices=OPTIMIZERS,
    )
    rates: tuple[float, ...] = option(
        (0.006, 0.012, 0.024, 0.048),
        "Moves to choose from: how far the noise alone moves a parameter.",
        name="--moves",
    )

    def by_name(self) -> tuple[str, ...]:
        return self.optimizers

    def rate_and_move(self, rate: float) -> tuple[float, float]:
        return 0.0, rate
