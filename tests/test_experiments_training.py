"""The comparison of noises in training: fair by construction, summed up as it says."""

import itertools
import re

import numpy as np
import pytest
from study_oracles import write_parts

from mfopt.errors import UsageError
from mfopt.experiments import runner
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.runner import run_all
from mfopt.experiments.runs import repeated
from mfopt.experiments.runs.training import CHOSEN_ON, REPORTED, TrainMechanismCell, TrainRunCell
from mfopt.experiments.studies import engine, output
from mfopt.experiments.studies.noise_in_training import (
    FedAvgInTraining,
    NoiseInTraining,
    OptimizersInTraining,
    SamplingInTraining,
)
from mfopt.sampling import Poisson
from mfopt.training import metrics
from mfopt.training.batching import Sampler
from mfopt.training.config import TrainConfig
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare


def made_up(cell, losses):
    """The result of a cell whose runs end with ``losses(rate, seed)``, on records and on users."""

    def run(records, users):
        return {CHOSEN_ON: [(0, 5.0), (4, records)], REPORTED: [(0, 6.0), (4, users)]}

    runs = [run(*losses(cell.rate, seed)) for seed in cell.seeds]
    return Result({"runs": runs, "parameters": 9, "noise_multiplier": 1.0})


def test_a_study_says_who_wins_on_users_and_on_records(data):
    study = NoiseInTraining(data=str(data), rates=(0.1, 0.2, 0.4), seeds=(1, 0)).check()
    found = {}
    for cell in study.cells():

        def losses(rate, seed, blt=cell.mechanism.strategy == "blt"):
            records = 4.0 + abs(rate - (0.4 if blt else 0.2)) + 0.01 * seed - (0.1 if blt else 0.0)
            return records, 5.0 - (0.5 * seed - 0.2 if blt else 0.0)

        found[cell] = made_up(cell, losses)
    outcome = study.outcome(found)
    assert {row["data"] for row in outcome.rows} == {data.name}
    blt = [row for row in outcome.rows if row["noise"] == "blt"]
    assert [row["seed"] for row in blt] == [0, 1]  # seed against seed
    assert [row["users_gain"] for row in blt] == pytest.approx([-0.2, 0.3])
    assert [row["records_gain"] for row in blt] == pytest.approx([0.1, 0.1])
    assert all(row["learning_rate"] == 0.4 and not row["rate_bracketed"] for row in blt)
    rated, by_step = (panel.curves[1] for panel in outcome.panels)  # of blt
    assert (rated.y[0], rated.low[0], rated.high[0]) == pytest.approx((4.95, 4.7, 5.2))
    assert list(by_step.y) == pytest.approx([6.0, 4.95])
    said = "\n".join(outcome.findings)
    assert (
        f"{data.name}, held-out-users: blt below identity in 1 of 2 seeds, by 0.0500 ± 3.1766"
        in said
    )
    assert "the best rate of blt, 0.4, is the last tried" in said
    assert "the best rate of identity" not in said
    assert all(cell.base.digest for cell in study.cells())


def test_a_mechanism_may_name_its_sampling():
    kept, fresh = dict.fromkeys(cell.mechanism for cell in SamplingInTraining().check().cells())
    assert "sampling" not in kept.settings  # of balls-in-bins, as of noise-in-training
    assert (fresh.strategy, fresh.sampling) == ("banded-toeplitz", "fresh-bins")


@pytest.mark.release
def test_the_sampling_that_is_named_is_accounted_for():
    at = "identity", 2, 2, 8.0, 1e-5
    fresh, kept = (TrainMechanismCell(*at, *more).run().record for more in (("fresh-bins",), ()))
    assert fresh["noise_multiplier"] < kept["noise_multiplier"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("data"), held_out_users=5)


@pytest.mark.release
def test_mechanisms_run_the_same_batches_from_the_same_model(data, tmp_path):
    study = NoiseInTraining(
        data=str(data), bins=2, epochs=2, strategies=("identity", "blt"), rates=(0.01,),
        seeds=(0, 1), records=2, length=8, pretrain_steps=3,
    ).check()  # fmt: skip
    cache = Cache(tmp_path / "cells")
    found = run_all(study.cells(), cache, jobs=1)
    by_kind = {c.mechanism.strategy: found[c].record for c in study.cells()}
    records = {(kind, seed): by_kind[kind]["runs"][seed] for kind in by_kind for seed in (0, 1)}
    assert list(records) == [("identity", 0), ("identity", 1), ("blt", 0), ("blt", 1)]
    losses = list(records.values())
    assert len({each[CHOSEN_ON][0][1] for each in losses}) == 1
    assert [[step for step, _ in x] for x in losses[0].values()] == [[0, 4], [0, 1, 2, 3, 4]]
    assert len({each[REPORTED][-1][1] for each in losses}) == 4
    # every unit takes part in each epoch, and random records are drawn by (step, user)
    for seed in (0, 1):
        assert by_kind["identity"]["tokens"][seed] == by_kind["blt"]["tokens"][seed]
    assert len(set(by_kind["identity"]["tokens"])) == 2
    sigmas = {s: by_kind[s]["noise_multiplier"] for s in ("identity", "blt")}
    assert min(sigmas.values()) > 0 and sigmas["blt"] != sigmas["identity"]
    # σ is relative to a C of any norm: what compares is the error that it makes
    errors = {c.mechanism.strategy: cache.load(c.mechanism).record["rmse"] for c in study.cells()}
    assert 0 < errors["blt"] < errors["identity"]
    kinds = ("json", "csv", "png", "svg")
    outcome, made = engine.run(study, cache, jobs=1)
    written = output.write(tmp_path, study, outcome, made, kinds)
    assert {path.name for path in written} == {f"{study.name}.{kind}" for kind in kinds}
    assert all(path.stat().st_size > 200 for path in written)


@pytest.mark.ci
def test_a_fedavg_arm_trains_as_fedavg_does(data, tmp_path):
    study = FedAvgInTraining(
        data=str(data), bins=2, epochs=1, strategies=("identity",), rates=(0.1,), seeds=(0,),
        length=8, pretrain_steps=0, local_epochs=3,
    ).check()  # fmt: skip
    cache = Cache(tmp_path / "cells")
    found = run_all(study.cells(), cache, jobs=1)
    _, cell = (study.cell_at(arm, 0.1) for arm in study.arms())
    for need in cell.needs:
        cache.load(need).unpack(tmp_path)
    own = {"algorithm": "fedavg", "local_epochs": 3, "local_rate": 0.2, "records_per_user": 2}
    places = {"model": "pretrained", "factorization": "mechanism/mechanism.npz", "output": "run"}
    config = TrainConfig(
        **own, **{name: str(tmp_path / place) for name, place in places.items()}, seed=0,
        data=str(data), length=8, optimizer="adam", learning_rate=0.1, tensorboard=False,
    )  # fmt: skip
    execute(prepare(config))
    trained = metrics.read_table(tmp_path / "run" / "evaluation.csv")
    (loss,) = (float(x["loss"]) for x in trained if x["part"] == REPORTED and x["step"] == "2")
    by_user, federated = (found[each].record["runs"][0][REPORTED][-1] for each in study.cells())
    assert federated == pytest.approx((2, loss), rel=1e-5) != pytest.approx(by_user, rel=1e-4)


def test_arms_that_differ_in_two_things_are_compared_in_each():
    study = FedAvgInTraining(rates=(0.1, 0.2, 0.4), seeds=(0, 1)).check()
    ends = {"uls": {"identity": 4.0, "blt": 3.8}, "fedavg": {"identity": 4.1, "blt": 3.5}}
    found = {}
    for arm, rate in itertools.product(study.arms(), study.rates):
        loss = ends[arm.algorithm][arm.noise] + abs(rate - 0.2)
        cell = study.cell_at(arm, rate)
        found[cell] = made_up(cell, lambda *_, x=loss: (x, x + 1))
    assert len(found) == 12
    outcome = study.outcome(found)
    said = "\n".join(line for line in outcome.findings if "held-out-users" in line)
    below = re.findall(r"users: (\S+, \S+) below (\S+, \S+) in . of 2 seeds, by (\S+)", said)
    assert below == [
        ("uls, blt", "uls, identity", "0.2000"),
        ("fedavg, identity", "uls, identity", "-0.1000"),
        ("fedavg, blt", "uls, blt", "0.3000"),
        ("fedavg, blt", "fedavg, identity", "0.6000"),
    ]
    assert [curve.label for curve in outcome.panels[0].curves][3] == "DP-FedAvg, BLT noise"


@pytest.mark.release
def test_repeated_runs_are_those_of_the_trainer(data, tmp_path):
    """Rates, seeds and rules share one program, and train as whole runs of their own do."""
    setting = {
        "sampling": "poisson:probability=0.3,iterations=3", "algorithm": "uls", "epsilon": 8.0,
        "delta": 1e-4, "records_per_user": 2, "data": str(data), "length": 8, "width": 8,
        "layers": 1, "tensorboard": False,
    }  # fmt: skip
    runs = repeated.Runs(TrainConfig(**setting, seed=0, output=str(tmp_path / "shared")))
    seen = set()
    for number, (rate, seed, rule) in enumerate(
        [(0.01, 0, "random"), (0.3, 0, "random"), (0.3, 1, "random"), (0.3, 1, "longest")]
    ):
        own = {"learning_rate": rate, "seed": seed, "selection": rule, "schedule": "constant"}
        config = TrainConfig(**setting, **own, output=str(tmp_path / str(number)))
        execute(prepare(config))
        rows = metrics.read_table(tmp_path / str(number) / "evaluation.csv")
        found, _ = runs.run(rate=rate, seed=seed, selection=rule)
        for part in (CHOSEN_ON, REPORTED):
            losses = [float(row["loss"]) for row in rows if row["part"] == part]
            assert found[part][0][1] == pytest.approx(losses[0], rel=1e-6)
            assert found[part][-1][1] == pytest.approx(losses[-1], rel=1e-5)
        seen.add(round(found[REPORTED][-1][1], 5))
    assert len(seen) == 4 and runs._trainer._update._cache_size() == 1
    assert runs._trainer._block == 2**14 // (2 * 8)  # whatever the batch, as it is small
    assert runs._losses_for("highest-perplexity") is runs._losses_for("lowest-perplexity")
    other = Sampler(Poisson(0.2, 3), runs.prepared.execution.units.population, 0, microbatch=1)
    with pytest.raises(UsageError, match="scheme"):
        runs.prepared.trainer.over(runs.prepared.execution.units, other)


def test_runs_of_one_setting_are_kept_until_another_is_asked_for(monkeypatch):
    made = []
    monkeypatch.setattr(repeated, "Runs", lambda config: made.append(config) or len(made))
    base = Result({}, {"file/corpus/a": np.zeros(3, np.uint8)})
    other = Result({}, {"file/corpus/a": np.ones(3, np.uint8)})

    how = {"sampling": "poisson:probability=0.3,iterations=3", "algorithm": "none"}

    def ask(source, length):
        return repeated.runs_of({"data": source}, length=length, **how)

    assert ask(base, 8) == ask(Result({}, base.arrays), 8) == 1
    assert ask(other, 8) == 2 and ask(other, 16) == 3 and ask(other, 16) == 3
    assert len(repeated._KEPT) == made[0].microbatch == 1
    repeated._KEPT.clear()


def test_cells_of_one_program_stay_with_the_process_that_compiled_it():
    base = TrainMechanismCell("identity", 2, 1, 1.0, 1e-5)
    of = ((0.1, False), (0.2, False), (0.1, True))
    one, again, other = (TrainRunCell(base, None, (), rate, (0,), move) for rate, move in of)
    assert runner._next([other, again], one, []) == again
    assert runner._next([again, other], None, [one]) == other
    assert runner._next([again], other, [one]) == again


def test_an_optimizer_stands_with_the_move_that_is_best_for_it():
    study = OptimizersInTraining(
        optimizers=("adam", "momentum"), rates=(0.01, 0.02, 0.04), seeds=(0, 1)
    ).check()
    best = {"adam": (0.02, 4.0), "momentum": (0.04, 3.9)}
    found = {}
    for cell in study.cells():
        assert cell.by_move  # rates are fitted to each

        def losses(rate, seed, best=best[dict(cell.given)["optimizer"]]):
            records = best[1] + abs(rate - best[0])
            return records, records + 1

        found[cell] = made_up(cell, losses)
    outcome = study.outcome(found)
    chosen = {(row["optimizer"], row["learning_rate"]) for row in outcome.rows}
    assert chosen == {("adam", 0.02), ("momentum", 0.04)}
    gains = [row["users_gain"] for row in outcome.rows if row["optimizer"] == "momentum"]
    assert gains == pytest.approx([0.1, 0.1])
    said = "stdlib-code, held-out-users: momentum below adam in 2 of 2 seeds, by 0.1000 "
    assert outcome.findings[0].startswith(said)
    assert outcome.findings[-1].endswith("the best move of momentum, 0.04, is the last tried")
