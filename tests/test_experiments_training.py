"""The comparison of noises in training: fair by construction, summed up as it says."""

import csv

import numpy as np
import pytest
from study_oracles import write_parts

from mfopt.errors import UsageError
from mfopt.experiments import repeated, training
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.studies.noise_in_training import NoiseInTraining
from mfopt.experiments.studies.optimizers_in_training import OptimizersInTraining
from mfopt.experiments.studies.sampling_in_training import SamplingInTraining
from mfopt.experiments.training import CHOSEN_ON, REPORTED, Run, TrainingComparison
from mfopt.sampling import Poisson
from mfopt.training import metrics
from mfopt.training.batching import Sampler
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare


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


@pytest.mark.release
def test_the_sampling_that_is_named_is_accounted_for():
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


@pytest.mark.release
def test_repeated_runs_are_those_of_the_trainer(data, tmp_path):
    """Rates, seeds and rules share one program, and train as whole runs of their own do."""
    setting = {
        "sampling": "poisson:probability=0.3,iterations=3",
        "algorithm": "uls",
        "epsilon": 8.0,
        "delta": 1e-4,
        "records_per_user": 2,
        "data": str(data),
        "length": 8,
        "width": 8,
        "layers": 1,
        "tensorboard": False,
    }
    runs = repeated.Runs(TrainConfig(**setting, seed=0, output=str(tmp_path / "shared")))
    seen = set()
    for number, (rate, seed, rule) in enumerate(
        [(0.01, 0, "random"), (0.3, 0, "random"), (0.3, 1, "random"), (0.3, 1, "longest")]
    ):
        config = TrainConfig(
            **setting,
            learning_rate=rate,
            seed=seed,
            selection=rule,
            schedule="constant",
            output=str(tmp_path / str(number)),
        )
        execute(prepare(config))
        rows = metrics.read_table(tmp_path / str(number) / "evaluation.csv")
        whole = {part: [] for part in (CHOSEN_ON, REPORTED)}
        for row in rows:
            whole[row["part"]].append(float(row["loss"]))
        trained = runs.run(rate=rate, seed=seed, selection=rule)
        for part, losses in whole.items():
            assert trained.first()[part] == pytest.approx(losses[0], rel=1e-6)
            assert trained.last()[part] == pytest.approx(losses[-1], rel=1e-5)
        seen.add(round(trained.last()[REPORTED], 5))
    assert len(seen) == 4
    other = Sampler(Poisson(0.2, 3), runs.prepared.execution.units.population, 0, microbatch=1)
    with pytest.raises(UsageError, match="scheme"):
        runs.prepared.trainer.over(runs.prepared.execution.units, other)


def test_runs_of_one_setting_are_kept_until_another_is_asked_for(monkeypatch):
    made = []
    monkeypatch.setattr(repeated, "Runs", lambda config: made.append(config) or len(made))
    base = Result({}, {"file/corpus/a": np.zeros(3, np.uint8)})
    other = Result({}, {"file/corpus/a": np.ones(3, np.uint8)})

    def ask(source, length):
        return repeated.runs_of(
            {"data": source},
            sampling="poisson:probability=0.3,iterations=3",
            algorithm="none",
            length=length,
        )

    assert ask(base, 8) == ask(Result({}, base.arrays), 8) == 1
    assert ask(other, 8) == 2 and ask(other, 16) == 3 and ask(other, 16) == 3
    assert len(repeated._KEPT) == 1
    repeated._KEPT.clear()


def test_an_optimizer_stands_with_the_move_that_is_best_for_it():
    study = OptimizersInTraining(
        optimizers=("adam", "momentum"), rates=(0.01, 0.02, 0.04), seeds=(0, 1)
    ).check()
    best = {"adam": (0.02, 4.0), "momentum": (0.04, 3.9)}
    found = {}
    for task in study.cells():
        assert "learning_rate" not in task.arguments  # moves, fitted to each
        move, loss = best[task.arguments["optimizer"]]
        records = loss + abs(task.arguments["noise_move"] - move)
        losses = made_up("blt", 0, 0, records, records + 1).losses
        found[task] = Result({"losses": losses, "noise_multiplier": 2.0}, {})
    outcome = study.outcome(found)
    chosen = {(row["optimizer"], row["learning_rate"]) for row in outcome.rows}
    assert chosen == {("adam", 0.02), ("momentum", 0.04)}
    gains = [row["users_gain"] for row in outcome.rows if row["optimizer"] == "momentum"]
    assert gains == pytest.approx([0.1, 0.1])
    assert [text for text in outcome.findings if "-0.1000" in text and "momentum" in text]
    assert outcome.findings[-1].endswith("the best move of momentum, 0.04, is the last tried")
