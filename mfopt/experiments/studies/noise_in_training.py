"""Studies of noise, sampling, optimizers and algorithms in whole training runs.

All ways to train of a study run at the same (ε, δ), from the same pretrained model, for as many
steps of as many records, over one grid of learning rates; under one sampling scheme a seed assigns
the users to the same bins for all. Each arm then stands with the rate that is best for *it* on
held-out records of training users, and is reported on those and on users that took no part.
Choosing learning rates in this way is not covered by the guarantee of a run.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from mfopt.experiments.options import option
from mfopt.experiments.studies.in_training import ALGORITHMS, LABELS, TrainingStudy, Way
from mfopt.training.config import OPTIMIZERS

FORMS = "Forms of C, +fresh-bins for that sampling; the first is what others are measured against."


@dataclasses.dataclass(frozen=True)
class NoiseInTraining(TrainingStudy):
    """Correlated against independent noise, in fine-tuning."""

    name = "noise-in-training"
    source = "McMahan et al. 2024, section 5 (the comparison; on other data)"
    default_size = "embedded corpus, 2 mechanisms, 3 learning rates, 3 seeds, 32 steps each"
    time = "about 3 CPU-minutes"
    columns = (
        "noise; learning_rate=rate; users_before=users: before; users=after; users_gain=gain; "
        "records; records_gain=gain; privacy_unit=unit; sampling; noise_multiplier=σ; epsilon=ε"
    )

    strategies: tuple[str, ...] = option(("identity", "blt"), FORMS, choices=tuple(LABELS))

    def arms(self) -> Iterator[Way]:
        yield from map(Way, self.strategies)


@dataclasses.dataclass(frozen=True)
class SamplingInTraining(NoiseInTraining):
    """Fresh bins against balls-in-bins, in fine-tuning."""

    name = "sampling-in-training"
    source = "this library, fresh bins"

    strategies: tuple[str, ...] = option(
        ("blt", "banded-toeplitz+fresh-bins"), FORMS, choices=tuple(LABELS)
    )
    epsilon: float = option(2.0, "ε of every statement.", name="--eps")


@dataclasses.dataclass(frozen=True)
class FedAvgInTraining(NoiseInTraining):
    """DP-FedAvg against user-level sampling: local steps of a user, or one gradient."""

    name = "fedavg-in-training"
    source = "McMahan, Ramage, Talwar and Zhang 2018, Algorithm 1 (in small, on other data)"
    default_size = "embedded corpus, 2 algorithms, 2 mechanisms, 3 learning rates, 3 seeds"
    time = "about 4 CPU-minutes"
    columns = f"algorithm; {NoiseInTraining.columns}"
    compared = ("algorithm", "noise")

    extend: int = option(1, "Most rates to add beyond an end that is best.", least=0)
    local_epochs: int = option(2, "DP-FedAvg: passes over a user's records.")
    local_rate: float = option(0.2, "DP-FedAvg: learning rate of a step of one record.")

    def arms(self) -> Iterator[Way]:
        for algorithm, noise in itertools.product(ALGORITHMS, self.strategies):
            yield Way(noise, algorithm=algorithm)

    def settings(self, arm: Way) -> dict[str, Any]:
        own = {"local_epochs": self.local_epochs, "local_rate": self.local_rate}
        return super().settings(arm) | (own if arm.algorithm == "fedavg" else {})


@dataclasses.dataclass(frozen=True)
class OptimizersInTraining(TrainingStudy):
    """Adam, Adam without the noise's share of its second moment, and momentum.

    Rates are given by how far the noise alone moves a parameter, so that one grid serves every
    optimizer.
    """

    name = "optimizers-in-training"
    source = "Tang, Shpilevskiy and Lécuyer 2024 (DP-AdamBC); Denisov et al. 2022 (momentum)"
    default_size = "embedded corpus, BLT noise, 3 optimizers, 3 moves, 3 seeds, 32 steps each"
    time = "about 4 CPU-minutes"
    columns = (
        "optimizer; learning_rate=move; users_before=users: before; users=after; "
        "users_gain=gain; records; records_gain=gain; epsilon=ε"
    )
    compared = ("optimizer",)
    axis = "move of a parameter by the noise"
    chosen_is = "move"
    by_move = True

    strategy: str = option("blt", "Form of C.", choices=tuple(LABELS))
    optimizers: tuple[str, ...] = option(
        ("adam", "adam-bc", "momentum"),
        "The first is what the others are measured against.",
        choices=OPTIMIZERS,
    )
    rates: tuple[float, ...] = option(
        (0.012, 0.024, 0.048),
        "Moves to choose from: how far the noise alone moves a parameter.",
        name="--moves",
    )

    def arms(self) -> Iterator[Way]:
        for optimizer in self.optimizers:
            yield Way(self.strategy, optimizer)
