"""Studies of fine-tuning runs: what they run, choose and say, and the cells of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from study_oracles import finished, write_parts
from train_fixtures import bigram_model, synthetic_store

from mfopt.errors import UsageError
from mfopt.experiments.cache import Cache, Result
from mfopt.experiments.runs import training
from mfopt.experiments.runs.fine_tuning import PLAIN
from mfopt.experiments.runs.means import ELS, ULS
from mfopt.experiments.runs.personalization import chosen, personalized, split
from mfopt.experiments.runs.public_copies import copied
from mfopt.experiments.runs.step_time import ORDER
from mfopt.experiments.studies import engine, output
from mfopt.experiments.studies.adapters import Adapters
from mfopt.experiments.studies.clip_norms import ClipNorms
from mfopt.experiments.studies.personalization import Personalization
from mfopt.experiments.studies.public_copies import COPIED, PublicCopies
from mfopt.experiments.studies.selection import CHUNK, RecordSelection
from mfopt.experiments.studies.step_time import StepTime
from mfopt.training.data import TokenStore
from mfopt.training.data.overlap import copies, overlap
from mfopt.training.models import num_targets
from mfopt.training.selection import RULES


def results(study, loss):
    """Every run of a study; ``loss`` of (arm, rate) is that on users, and on records."""
    return {
        cell: finished(
            cell.arm,
            dict.fromkeys((training.CHOSEN_ON, training.REPORTED), loss(cell.arm, cell.rate)),
        )
        for cell in study.cells()
        if cell.name == "study-fine-tuning"
    }


def test_selection_runs_every_rule_and_every_k_once():
    study = RecordSelection(epsilons=(2.0,), seeds=(0,)).check()
    arms = list(study.arms())
    assert len(arms) == len(set(arms)) == len(list(study.cells()))
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
    assert (
        "ELS is best at 0.5 (4.5000) and worst at 2, 1.5000 ± 0.0000 above it"
        in outcome.findings[0]
    )
    assert "ULS is best at 0.5 (4.0000) and worst at 2" in outcome.findings[0]


def test_rates_are_added_until_the_best_is_bracketed():
    study = Adapters(ranks=(8,), rates=(0.1, 0.2), seeds=(0, 1), extend=3).check()

    def loss(arm, rate):
        return abs(np.log2(rate / (0.8 if arm.rank else 0.1)))

    found = results(study, loss)
    asked = []
    while more := list(study.more(found)):
        asked.append({cell.rate for cell in more})
        wider = dataclasses.replace(study, rates=tuple(asked[-1]))
        every = results(wider, loss)
        found |= {cell: every[cell] for cell in more}
    assert asked == [{0.05, 0.4}, {0.8}, {1.6}]
    rows = study.outcome(found).rows
    assert [row["learning_rate"] for row in rows] == [0.1, 0.8] * 2
    assert all(row["rate_bracketed"] for row in rows)
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


@pytest.mark.ci
def test_a_user_personalizes_by_plain_sgd_on_the_first_half():
    model, store = bigram_model(), synthetic_store(num_users=12)
    pair = np.flatnonzero(store.records_per_user() >= 4)[:2].tolist()
    places = np.array([split(store.records_of(user), 4) for user in pair])
    tokens, mask = store.batch(places.reshape(-1), 20)
    tokens, mask = tokens.reshape(2, 2, 2, 20), mask.reshape(2, 2, 2, 20)
    before, after = personalized(model, tokens, mask, (0.5, 2.0), epochs=3, batch=1)

    @jax.jit
    def loss(params, rows, real):
        each = jax.vmap(model.loss, (None, None, 0, 0))(params, (), rows, real)
        count = num_targets(real)
        return (each * count).sum() / jnp.maximum(count.sum(), 1)

    slope = jax.jit(jax.grad(loss))

    for user in range(2):
        params = model.params
        assert before[user] == pytest.approx(float(loss(params, tokens[user, 1], mask[user, 1])))
        for _ in range(3):
            for row in range(2):
                rows = tokens[user, 0, row : row + 1], mask[user, 0, row : row + 1]
                params = jax.tree.map(lambda p, g: p - 2.0 * g, params, slope(params, *rows))
        expected = float(loss(params, tokens[user, 1], mask[user, 1]))
        assert after[1, user] == pytest.approx(expected, rel=1e-4)
    assert not np.isclose(after[0], after[1], rtol=1e-3).any()


def test_local_rates_are_chosen_by_the_other_half_of_the_users():
    after = np.array([[1.0, 5.0, 1.0, 5.0], [3.0, 2.0, 3.0, np.inf]])
    judged, rates = chosen(after, (0.1, 0.2))
    # odd users are worst at 0.2 (one diverged), so even ones take 0.1, as odd ones do by the even
    assert rates == [0.1, 0.1] and judged.tolist() == [1.0, 5.0, 1.0, 5.0]
    judged, rates = chosen(after[:, :2], (0.1, 0.2))
    assert rates == [0.2, 0.1] and judged.tolist() == [3.0, 5.0]


def test_personalizing_both_models_is_said_with_the_gap():
    study = Personalization(epsilons=(2.0,), local_rates=(0.1,), seeds=(0,)).check()
    found = results(study, lambda arm, _: 4.0)
    for run in (None, *list(found)):
        level = {None: 6.0, ELS: 4.0, ULS: 3.5}[run and run.arm.algorithm]
        fall = 0.25 if run else 1.0
        arrays = {"before": np.full(4, level), "after": np.full((1, 4), level - fall)}
        found[study.local(run)] = Result({}, arrays)
    assert set(found) == set(study.cells())
    outcome = study.outcome(found)
    assert [row["fall"] for row in outcome.rows] == pytest.approx([1.0, 0.25, 0.25])
    assert "ULS less ELS is -0.5000 before and -0.5000 after" in outcome.findings[1]


def test_copies_are_found_one_by_one():
    rng = np.random.default_rng(3)
    private = [list(rng.integers(500, size=(3, 40))) for _ in range(6)]
    train = TokenStore.from_records(private, vocab_size=500)
    exact = np.array(train.record(4))
    near, far = np.array(train.record(7)), rng.integers(500, size=40)
    near[20] = (near[20] + 1) % 500
    far[:12] = train.record(9)[:12]  # 5 of its 33 runs
    short = np.array(train.record(1))[:10]
    public = TokenStore.from_records([[far, exact], [short, near]], vocab_size=500)
    same, alike = copies(public, [train])
    assert same.tolist() == [False, True, False, False]
    assert alike.tolist() == [False, False, False, True]
    assert copies(public, [train], shortest=1)[0].tolist() == [False, True, False, False]
    whole = TokenStore.from_records([[train.record(4), short, short[:3]]], vocab_size=500)
    assert copies(whole, [whole])[0].tolist() == [True, False, False]
    assert copies(whole, [whole], shortest=1)[0].tolist() == [True, True, True]
    counted = overlap(public, [train])
    assert (counted.records, counted.exact, counted.near) == (3, 1, 1)
    assert counted.share == pytest.approx(2 / 3)


def test_rows_of_copied_public_parts_promise_nothing():
    study = PublicCopies().check()
    found = results(study, lambda arm, _: 5.0)
    for cell in study.cells():
        if cell not in found:
            counted = {"put": 9, "left": 0 if cell.settings.get("shortest") else 9}
            counted |= {"exact": 2, "near": 3}
            found[cell] = Result({} if cell == study.base else {"copies": counted})
    built, mixed, cleaned = study.outcome(found).rows
    assert built["epsilon"] == cleaned["epsilon"] == 8.0 and built["privacy_unit"] == "user"
    assert mixed["epsilon"] is mixed["delta"] is mixed["privacy_unit"] is None
    assert cleaned["privacy_unit"] == "user, given the public part"
    assert mixed["near"] == 3 and mixed["fall"] == 1.0 and built["near"] is None  # not counted
    assert mixed["public_part"] == COPIED and (mixed["left"], cleaned["left"]) == (9, 0)
    made = copied(synthetic_store(num_users=40), 0.5, 0.0)
    whole = copied(synthetic_store(num_users=40), 0.5, 1.0)
    assert len(made) == len(whole) > 30
    assert any(not np.array_equal(a, b) for a, b in zip(made, whole, strict=True))


@pytest.mark.ci
def test_steps_are_timed_of_the_same_records():
    study = StepTime(widths=(8,), batches=(4, 8), groups=(2, 8), layers=1, steps=3)
    cells = study.check().cells()
    assert [(cell.batch, cell.group) for cell in cells] == [(4, 2), (8, 2), (8, 8)]
    seconds = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 9.0], [1.0, 3.0, 3.0]])
    record = {"parameters": 7, "load": 1.0, "device": "CPU"}
    found = {cell: Result(record, {"seconds": seconds}) for cell in cells}
    outcome = study.outcome(found)
    assert [row["ratio"] for row in outcome.rows[:3]] == [1.0, 2.0, 1.0]
    assert [row["seconds"] for row in outcome.rows[:3]] == [2.0, 2.0, 3.0]
    store, cell = synthetic_store(num_users=4), dataclasses.replace(cells[0], length=20, steps=0)
    for name in ORDER:
        trainer = cell.trainer(bigram_model(), store, name)
        (_, result) = list(trainer.run(trainer.init()))
        units = result.batch.units[result.batch.units >= 0]
        # every record that there is, in every step
        assert len(units) == trainer.execution.units.population
        assert (trainer.execution.noise is None) == (name == PLAIN)


@pytest.mark.release
def test_what_rules_choose_of_a_corpus(tmp_path):
    folder = write_parts(tmp_path)
    base = training.CorpusCell.at(str(folder), 8, width=8, layers=1, pretrain_steps=2)
    said = training.CorpusSizesCell(base, 2).run(base.run()).record["rows"]
    counts = TokenStore.open(folder / "train").records_per_user()
    assert said["train"]["records"] == counts.sum() and said["train"]["largest"] == counts.max()
    for rule in training.RECORD_RULES:
        assert said[rule]["records"] == np.minimum(counts, 2).sum()
    tokens = {rule: said[rule]["mean_tokens"] for rule in training.RECORD_RULES}
    assert tokens["longest"] > tokens["random"] > tokens["shortest"]
    perplexity = {rule: said[rule]["mean_perplexity"] for rule in training.RECORD_RULES}
    assert perplexity["highest-perplexity"] > perplexity["random"] > perplexity["lowest-perplexity"]


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
        Personalization(**small, **one, budget=4, els_group=2, group=2, records=4, local_batch=2),
        PublicCopies(**small, **one, cohort=4, group=2),
        StepTime(widths=(8,), batches=(4,), groups=(2,), layers=1, length=8, steps=2),
    ]  # fmt: skip
    for study in studies:
        outcome, made = engine.run(study, cache, jobs=1)
        assert outcome.findings and len(output.write(tmp_path / "out", study, outcome, made)) == 5
        for row in outcome.rows:
            for key in {"loss", "after", "seconds"} & row.keys():
                assert np.isfinite(row[key])
    assert dataclasses.replace(studies[0], seeds=(1,)).base == studies[0].base
