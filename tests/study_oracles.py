"""What a finished training run of a study looks like, and data for whole ones."""

import numpy as np
from train_fixtures import synthetic_store
from train_oracles import write_store

from mfopt.experiments.cache import Result
from mfopt.experiments.runs.training import REPORTED
from mfopt.training.data.store import TokenStore


def finished(arm, after, **more):
    """The record of one run, as the trainer's cell gives it."""
    private = arm.epsilon is not None
    guarantee = {"privacy_unit": "user", "adjacency": "add-remove"}
    return Result(
        {
            "before": {REPORTED: 6.0},
            "after": after,
            "noise_multiplier": 1.5 if private else None,
            "guarantee": guarantee if private else None,
            "parameters": 1000 if arm.rank == 0 else 10 * arm.rank,
            "probability": 0.25,
            "sampled": "records" if arm.algorithm == "ELS" else "users",
            **more,
        }
    )


def write_parts(folder, *, held_out_users=6):
    """A small data folder of all four parts."""
    sizes = {"train": 16, "held-out-users": held_out_users, "held-out-records": 6}
    for seed, (part, users) in enumerate(sizes.items()):
        write_store(synthetic_store(num_users=users, seed=seed), folder / part)
    # walks on one ring are alike, and would be taken for copies of private text
    texts = np.random.default_rng(9).integers(0, 32, (9, 4, 12))
    public = TokenStore.from_records(list(map(list, texts)), vocab_size=32, public=True)
    write_store(public, folder / "public")
    return folder
