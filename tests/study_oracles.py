"""What a finished training run of a study looks like, and data for whole ones."""

import itertools

import numpy as np
from train_fixtures import synthetic_store
from train_oracles import write_store

from mfopt.experiments.cache import Result
from mfopt.training.data.store import TokenStore


def finished(study, losses):
    """Results of the cells of a study; a run ends with ``losses(arm, rate, seed)`` by part."""
    guarantee = {"privacy_unit": "user", "adjacency": "add-remove"}
    found = {}
    for arm, rate in itertools.product(study.arms(), study.rates):
        cell, private = study.cell_at(arm, rate), arm.epsilon is not None
        ends = [losses(arm, rate, seed) for seed in cell.seeds]
        record = {
            "runs": [{p: [(0, 6.0), (9, x[p])] for p in x} for x in ends],
            "noise_multiplier": 1.5 if private else None,
            "guarantee": guarantee if private else None,
            "parameters": 1000 if arm.rank == 0 else 10 * arm.rank,
            "probability": 0.25,
        }
        found[cell] = Result(record)
    return found


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
