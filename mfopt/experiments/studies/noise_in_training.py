"""Correlated against independent noise in whole training runs, on several data sets.

Both mechanisms run at the same (ε, δ), from the same pretrained model, for as many steps of as many
records, over one grid of learning rates; under one sampling scheme a seed assigns the users to the
same bins for both. Each mechanism then stands with the rate that is best for *it* on held-out
records of training users, and is reported on those and on users that took no part. Choosing
learning rates in this way is not covered by the guarantee of a run.
"""

from __future__ import annotations

import dataclasses

from mfopt.experiments.studies.in_training import TrainingStudy


@dataclasses.dataclass(frozen=True)
class NoiseInTraining(TrainingStudy):
    """Loss on held-out users and records, each mechanism at its own best learning rate."""

    name = "noise-in-training"
    summary = "Correlated against independent noise: fine-tuning on several data sets."
    source = "McMahan et al. 2024, section 5 (the comparison; on other data)"
    default_size = "embedded corpus, 2 mechanisms, 3 learning rates, 3 seeds, 32 steps each"
    time = "about 5 CPU-minutes"
    columns = (
        "data; noise; learning_rate=rate; users_before=users: before; users=after; "
        "users_gain=gain; records; records_gain=gain; privacy_unit=unit; sampling; "
        "noise_multiplier=σ; epsilon=ε"
    )
