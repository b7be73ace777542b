"""Studies of fine-tuning runs: what they run, choose and say, and the cells of their own."""

import dataclasses

import numpy as np
import pytest
from study_oracles import finished, write_parts

from mfopt.errors import UsageError
from mfopt.experiments.cache import Cache
from mfopt.experiments.runs import training
from mfopt.experiments.runs.means import ELS, ULS
from mfopt.experiments.studies import engine, output
from mfopt.experiments.studies.adapters import Adapters
from mfopt.experiments.studies.budgets import TrainingBudgets
from mfopt.experiments.studies.clip_norms import ClipNorms
from mfopt.experiments.studies.fine_tuning import PLAIN
from mfopt.experiments.studies.selection import CHUNK, RecordSelection
from mfopt.training.models.gpt2 import GPT2Config
from mfopt.training.models.huggingface import export_model, gpt2_model
from mfopt.training.units import RULES

PARTS = training.CHOSEN_ON, training.REPORTED


def results(study, loss):
    """Every run of a study; ``loss`` of (arm, rate) is that on users, and on records."""
    return finished(study, lambda arm, rate, _: dict.fromkeys(PARTS, loss(arm, rate)))


def test_selection_runs_every_rule_and_every_k_once():
    study = RecordSelection(epsilons=(2.0,), seeds=(0,)).check()
    arms = list(study.arms())
    assert len(arms) == len(set(arms)) == len(list(study.cells()))
    assert len({*study.cells()} & {*TrainingBudgets(seeds=(0,)).cells()}) == 2  # run once for both
    for name in (ELS, ULS):
        mine = [arm for arm in arms if arm.algorithm == name]
        rules = {arm.selection for arm in mine if arm.group == study.group}
        assert rules == {rule for rule in RULES if name == ULS or rule != CHUNK}
        assert {arm.group for arm in mine if arm.selection == "random"} == {1, 4, 8}
        assert {arm.units for arm in mine} == {64.0 if name == ELS else 16.0}

    def loss(arm, rate):
        rank = {"longest": 0.3, CHUNK: 0.4, "random": 0.2}.get(arm.selection, 0.0)
        return 5.0 - rank - 0.01 * arm.group - 0.1 * (arm.algorithm == ULS)

    outcome = study.outcome(results(study, loss))
    assert len(outcome.panels) == 4 and len(outcome.rows) == 15
    assert "by rule at k = 4 longest 4.6600, random 4.7600" in outcome.findings[0]
    assert "by k at random 1: 4.7900, 4: 4.7600, 8: 4.7200" in outcome.findings[0]
    assert "ULS at its best (chunk, k = 4) ends 0.2000 below ELS" in outcome.findings[2]


def test_data_without_what_a_run_is_judged_by_is_refused(tmp_path):
    folder = write_parts(tmp_path)
    assert ClipNorms(data=str(folder)).check()
    (folder / "held-out-users" / "metadata.json").unlink()
    with pytest.raises(UsageError, match="has no part held-out-users"):
        ClipNorms(data=str(folder)).check()


def test_clip_norms_are_at_equal_records_and_their_spread_is_said():
    study = ClipNorms(clips=(0.5, 2.0), batches=(16,)).check()
    arms = list(study.arms())
    assert {arm.records for arm in arms} == {16.0}
    assert {arm.units for arm in arms if arm.algorithm == ULS} == {4.0}
    found = results(study, lambda arm, _: 4.0 + arm.clip_norm * (arm.algorithm == ELS))
    outcome = study.outcome(found)
    said = outcome.findings[0]
    assert "ELS is best at 0.5 (4.5000) and worst at 2, 1.5000 ± 0.0000 above it" in said
    assert "ULS is best at 0.5 (4.0000) and worst at 2" in said


def test_rates_are_added_until_the_best_is_bracketed():
    study = Adapters(ranks=(8,), rates=(0.1, 0.2), seeds=(0, 1), extend=3).check()

    def loss(arm, rate):
        return abs(np.log2(rate / (0.8 if arm.rank else 0.1)))

    found = results(study, loss)
    asked = []
    while more := list(study.more(found)):
        asked.append({cell.rate for cell in more})
        for rate in asked[-1]:
            found |= results(dataclasses.replace(study, rates=(rate,)), loss)
    assert asked == [{0.05, 0.4}, {0.8}, {1.6}]
    rows = study.outcome(found).rows
    assert [row["learning_rate"] for row in rows] == [0.1, 0.8] * 2
    assert not any(row["rate_at_end"] for row in rows)
    cut = dataclasses.replace(study, extend=1).outcome(found)
    assert cut.findings[-1] == "2 of 4 best rates are an end of those tried"


def test_adapters_are_held_against_all_parameters_each_at_its_best_rate():
    study = Adapters(ranks=(8,), rates=(0.1, 0.2), seeds=(0,), extend=0).check()
    best = {0: 0.1, 8: 0.2}
    found = results(study, lambda arm, r: 4 + arm.rank / 10 + abs(r - best[arm.rank]))
    outcome = study.outcome(found)
    assert [row["trained"] for row in outcome.rows] == ["all", "rank 8"] * 2
    assert [row["learning_rate"] for row in outcome.rows] == [0.1, 0.2] * 2
    plain, private = outcome.rows[0], outcome.rows[2]
    assert plain["epsilon"] is plain["privacy_unit"] is plain["clip_norm"] is None
    assert plain["algorithm"] == PLAIN and private["epsilon"] == 8.0
    assert "rank 8 ends 0.8000 above" in outcome.findings[1]


@pytest.mark.release
def test_whole_studies_run(tmp_path):
    small = {
        "data": str(write_parts(tmp_path / "data")), "steps": 2, "length": 8, "width": 8,
        "layers": 1, "pretrain_steps": 2, "rates": (0.01,), "seeds": (0, 1),
    }  # fmt: skip
    one = {"epsilons": (4.0,)}
    cache = Cache(tmp_path / "cells")
    studies = [
        RecordSelection(**small, **one, group=2, groups=(1,), batch=4, cohort=4),
        ClipNorms(**small, epsilon=4.0, clips=(1.0,), batches=(4,), group=2),
        Adapters(**small, **one, ranks=(2,), cohort=4, group=2),
    ]
    for study in studies:
        outcome, made = engine.run(study, cache, jobs=1)
        assert outcome.findings and len(output.write(tmp_path / "out", study, outcome, made)) == 5
        assert all(np.isfinite(row["loss"]) for row in outcome.rows)
    assert dataclasses.replace(studies[0], seeds=(1,)).base == studies[0].base
    # from a model that was made elsewhere, as it is
    model, new = tmp_path / "gpt2", gpt2_model(GPT2Config(32, 8, 8, 1, 2))
    export_model(new, new.params, model)
    begun = dataclasses.replace(studies[1], model=str(model), pretrain_steps=0, seeds=(0,)).check()
    assert begun.base.digest.startswith(studies[1].base.digest) and begun.base != studies[1].base
    row, *_ = engine.run(begun, cache, jobs=1)[0].rows
    assert row["pretrained"] == pytest.approx(np.log(32), rel=0.1)  # not trained at all
    assert "GPT-2 of gpt2" in begun.heading([row])
