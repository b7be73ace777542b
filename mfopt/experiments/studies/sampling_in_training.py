"""Fresh bins against balls-in-bins in training, each with the C that is best under it."""

from __future__ import annotations

import dataclasses

from mfopt.experiments.studies.engine import option
from mfopt.experiments.studies.in_training import LABELS
from mfopt.experiments.studies.noise_in_training import NoiseInTraining


@dataclasses.dataclass(frozen=True)
class SamplingInTraining(NoiseInTraining):
    """Loss on held-out users and records, each sampling scheme at its own best learning rate."""

    name = "sampling-in-training"
    summary = "Fresh bins against balls-in-bins, in fine-tuning."
    source = "this library, fresh bins"
    default_size = "embedded corpus, 2 mechanisms, 3 learning rates, 3 seeds, 32 steps each"
    time = "about 5.5 CPU-minutes"

    strategies: tuple[str, ...] = option(
        ("blt", "banded-toeplitz+fresh-bins"),
        "Forms of C, +fresh-bins for that sampling; the first is what others are measured against.",
        choices=tuple(LABELS),
    )
    epsilon: float = option(2.0, "ε of every statement.", name="--eps")
