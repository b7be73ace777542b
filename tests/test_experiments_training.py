"""The comparison of noises in training: fair by construction, summed up as it says."""

import csv

import pytest
from study_oracles import write_parts

from mfopt.experiments import training
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.studies.noise_in_training import NoiseInTraining
from mfopt.experiments.studies.sampling_in_training import SamplingInTraining
from mfopt.experiments.training import CHOSEN_ON, REPORTED, Run, TrainingComparison


def made_up(strategy, rate, seed, records, users):
    losses = {CHOSEN_ON: [(0, 5.0), (4, records)], REPORTED: [(0, 6.0), (4, users)]}
    return Run(strategy, rate, seed, 1.0, losses)


def test_learning_rates_are_chosen_on_records_and_losses_reported_on_users():
    setting = TrainingComparison(learning_rates=(0.1, 0.2), seeds=(0, 1))
    runs = [
        made_up("identity", 0.1, 0, records=4.0, users=5.9),
        made_up("identity", 0.1, 1, records=4.4, users=5.8),
        made_up("identity", 0.2, 0, records=4.1, users=5.0),  # better on users, and not chosen
        made_up("identity", 0.2, 1, records=4.5, users=5.0),
        made_up("blt", 0.1, 0, records=4.9, users=5.0),
        made_up("blt", 0.1, 1, records=4.0, users=5.0),
        made_up("blt", 0.2, 0, records=4.0, users=5.6),
        made_up("blt", 0.2, 1, records=4.0, users=5.9),
    ]
    found = training.summary(setting, runs)
    assert found["pretrained"] == 6.0
    plain, blt = found["mechanisms"]["identity"], found["mechanisms"]["blt"]
    assert plain["learning_rate"] == 0.1 and blt["learning_rate"] == 0.2
    assert plain["loss"] == [5.9, 5.8] and plain["gain"] == [0, 0]
    assert blt["gain"] == pytest.approx([0.3, -0.1])  # seed by seed, with its sign
    assert blt["mean_loss"] == pytest.approx(5.75)
    rows = list(csv.DictReader(training.csv_text(runs).splitlines()))
    assert len(rows) == 8 * 2 * 2
    last = training.panels(setting, runs)[0].curves[0]
    assert (last.y[0], last.low[0], last.high[0]) == pytest.approx((5.85, 5.8, 5.9))


def test_a_study_says_who_wins_on_users_and_on_records(data):
    study = NoiseInTraining(data=("stdlib", str(data)), rates=(0.1, 0.2, 0.4), seeds=(1, 0)).check()
    found = {}
    for name in study.data:
        for (strategy, rate, seed), task in training.run_tasks(study.setting(name)).items():
            best = 0.2 if strategy == "identity" else 0.4
            records = 4.0 + abs(rate - best) + 0.01 * seed - (0.1 if strategy == "blt" else 0.0)
            users = 5.0 - (0.5 * seed - 0.2 if strategy == "blt" else 0.0)
            losses = made_up(strategy, rate, seed, records, users).losses
            found[task] = Result({"losses": losses, "noise_multiplier": 2.0}, {})
    outcome = study.outcome(found)
    assert {row["data"] for row in outcome.rows} == {"stdlib", data.name}
    blt = [row for row in outcome.rows if row["noise"] == "blt" and row["data"] == "stdlib"]
    assert [row["seed"] for row in blt] == [0, 1]  # seed against seed
    assert [row["users_gain"] for row in blt] == pytest.approx([-0.2, 0.3])
    assert [row["records_gain"] for row in blt] == pytest.approx([0.1, 0.1])
    assert all(row["learning_rate"] == 0.4 and not row["rate_bracketed"] for row in blt)
    assert len(outcome.panels) == 2
    said = "\n".join(outcome.findings)
    assert "stdlib, held-out-users: blt below identity in 1 of 2 seeds, by 0.0500 ± 3.1766" in said
    assert "the best rate of blt, 0.4, is the last one tried" in said
    assert "the best rate of identity" not in said
    bases = {task.needs[0] for task in study.cells()}
    assert sorted("digest" in base.arguments for base in bases) == [False, True]


def test_a_mechanism_may_name_its_sampling():
    study = SamplingInTraining().check()
    setting = study.setting("stdlib-code")
    kept, fresh = (training.mechanism_task(setting, name) for name in study.strategies)
    assert "sampling" not in kept.arguments  # of balls-in-bins, as of noise-in-training
    assert (fresh.arguments["strategy"], fresh.arguments["sampling"]) == (
        "banded-toeplitz",
        "fresh-bins",
    )
    made = training.run_mechanism(
        strategy="identity", bins=2, epochs=2, epsilon=8.0, delta=1e-5, sampling="fresh-bins"
    )
    thrown_once = training.run_mechanism(
        strategy="identity", bins=2, epochs=2, epsilon=8.0, delta=1e-5
    )
    assert made.record["noise_multiplier"] < thrown_once.record["noise_multiplier"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("data"), held_out_users=5)


@pytest.mark.release
def test_mechanisms_run_the_same_batches_from_the_same_model(data, tmp_path):
    setting = TrainingComparison(
        data=str(data),
        bins=2,
        epochs=2,
        strategies=("identity", "sqrt"),
        learning_rates=(0.01,),
        seeds=(0, 1),
        records_per_user=2,
        length=8,
        width=8,
        layers=1,
        pretrain_steps=3,
        evaluations=2,
    )
    cache = Cache(tmp_path / "cells")
    runs = training.compare(setting, cache, jobs=1)
    assert [(run.strategy, run.seed) for run in runs] == [
        ("identity", 0),
        ("sqrt", 0),
        ("identity", 1),
        ("sqrt", 1),
    ]
    assert len({run.losses[CHOSEN_ON][0][1] for run in runs}) == 1
    assert [step for step, _ in runs[0].losses[REPORTED]] == [0, 2, 4]
    ends = [run.last(REPORTED) for run in runs]
    assert len(set(ends)) == 4
    records = {
        (run.strategy, run.seed): cache.load(
            training.run_task(setting, run.strategy, 0.01, run.seed)
        ).record
        for run in runs
    }
    assert all(record["steps"] == 4 for record in records.values())
    # every unit takes part in each epoch, and random records are drawn by (step, user)
    for seed in (0, 1):
        assert records["identity", seed]["tokens"] == records["sqrt", seed]["tokens"]
    assert records["identity", 0]["tokens"] != records["identity", 1]["tokens"]
    sigmas = {s: records[s, 0]["noise_multiplier"] for s in ("identity", "sqrt")}
    assert sigmas["sqrt"] > sigmas["identity"] > 0
    written = training.write(tmp_path / "comparison", setting, runs)
    assert [path.suffix for path in written] == [".json", ".csv", ".png", ".svg"]
    assert all(path.stat().st_size > 200 for path in written)
