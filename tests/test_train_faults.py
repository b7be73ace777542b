"""Whole runs that are misled, disturbed or hopeless: refused, ended cleanly, or warned about."""

import json
import os
import signal

import numpy as np
import pytest
from processes import start
from safetensors.numpy import load_file
from selection import before_release
from test_train_run import data, settings_for  # noqa: F401 (fixtures)
from train_fixtures import synthetic_store
from train_oracles import write_store

from mfopt.errors import FailureError, UsageError
from mfopt.training import privacy, verification
from mfopt.training.data import TokenStore
from mfopt.training.data.overlap import copies, refuse_copies
from mfopt.training.execute import execute
from mfopt.training.folder import hold
from mfopt.training.prepare import prepare
from mfopt.training.tokenizers import Tokenizer


@pytest.mark.release
def test_a_run_goes_on_with_no_other_data_than_it_began_with(tmp_path):
    mine = tmp_path / "data"
    write_store(synthetic_store(num_users=20), mine / "train")
    settings = settings_for(mine, tmp_path / "run", steps=2)
    execute(prepare(settings))
    tokens = np.load(mine / "train" / "tokens.npy")
    np.save(mine / "train" / "tokens.npy", tokens[::-1])
    # the metadata still says what it said
    with pytest.raises(UsageError, match="changed or damaged"):
        prepare(settings, resume=True)
    # and a store that is whole, but another one
    facts = json.loads((mine / "train" / "metadata.json").read_text())
    facts["content_digest"] = TokenStore.open(mine / "train").digest
    (mine / "train" / "metadata.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match="resume = 'data ="):
        execute(prepare(settings, resume=True))
    np.save(mine / "train" / "tokens.npy", tokens)
    facts["content_digest"] = TokenStore.open(mine / "train").digest
    (mine / "train" / "metadata.json").write_text(json.dumps(facts))
    assert execute(prepare(settings, resume=True))["steps"] == 2


@pytest.mark.release
def test_frozen_weights_are_part_of_what_a_run_began_with(data, tmp_path):  # noqa: F811
    first = settings_for(data, tmp_path / "first", steps=1)
    execute(prepare(first))
    model = tmp_path / "first" / "model"
    changes = {"model": str(model), "lora_rank": 2, "steps": 1}
    settings = settings_for(data, tmp_path / "run", **changes)
    execute(prepare(settings))
    second = settings_for(data, tmp_path / "second", heads=1, steps=1)
    execute(prepare(second))
    other = settings_for(
        data, tmp_path / "run", model=str(tmp_path / "second" / "model"), lora_rank=2, steps=1
    )
    with pytest.raises(UsageError, match="resume = 'model ="):
        execute(prepare(other, resume=True))


@pytest.mark.release
def test_another_tokenizer_of_the_same_size_is_refused(tmp_path):
    mine, other = (Tokenizer.train([text], 300) for text in ("ab ab abc " * 9, "xy xy xyz " * 9))
    digest = mine.digest
    store = synthetic_store(num_users=20, tokenizer_digest=digest)
    write_store(store, tmp_path / "data" / "train")
    mine.save(tmp_path / "data" / "tokenizer.json")
    settings = settings_for(tmp_path / "data", tmp_path / "run", steps=1)
    execute(prepare(settings))
    model = tmp_path / "run" / "model"
    assert Tokenizer.load(model).digest == digest  # exported with its tokenizer
    repeated = settings_for(tmp_path / "data", tmp_path / "again", model=str(model), steps=1)
    prepare(repeated).close()
    other.save(model / "tokenizer.json")
    with pytest.raises(UsageError, match="another tokenizer"):
        prepare(repeated)
    (model / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="tokenizer"):
        prepare(repeated)
    mine.save(model / "tokenizer.json")
    other.save(tmp_path / "data" / "tokenizer.json")
    prepare(repeated).close()  # which is that of the model
    with pytest.raises(UsageError, match="another tokenizer"):
        prepare(settings_for(tmp_path / "data", tmp_path / "new", steps=1))


def test_private_records_are_found_in_a_public_part():
    rng = np.random.default_rng(0)

    def texts(count, length=40):
        return [rng.integers(0, 500, length).tolist() for _ in range(count)]

    private, public = texts(60), texts(40)
    nearby = [private[0][:30] + [1] * 10, [2] * 6 + private[1][5:38]]
    stores = [TokenStore.from_records([[text] for text in private])]
    alike = TokenStore.from_records([public + private[5:8] + nearby])
    examined, copied = map(np.flatnonzero, copies(alike, stores))
    assert examined.tolist() == [*range(45)] and copied.tolist() == [40, 41, 42, 43, 44]
    actual = refuse_copies(alike, stores, 1.0)
    assert (actual["records"], actual["copies"]) == (45, 5)
    assert actual["share"] == pytest.approx((3 * 40 + 40 + 39) / (43 * 40 + 40 + 39))
    clean = refuse_copies(TokenStore.from_records([public]), stores)
    assert (clean["copies"], clean["share"]) == (0, 0.0)
    # short ones and halves of a text are no copies
    alike = TokenStore.from_records([[private[0][:15], private[1][:17] + texts(1)[0][:23]]])
    actual = refuse_copies(alike, stores, 1.0)
    assert actual["copies"] == 0
    with pytest.raises(UsageError, match=r"60 copies"):
        refuse_copies(stores[0], stores)


def test_a_part_that_is_not_marked_as_public_is_not_pretrained_on(tmp_path):
    unmarked = synthetic_store(num_users=30, seed=5)
    write_store(synthetic_store(num_users=30), tmp_path / "unmarked" / "train")
    write_store(unmarked, tmp_path / "unmarked" / "public")
    with pytest.raises(UsageError, match="not marked as public"):
        prepare(settings_for(tmp_path / "unmarked", tmp_path / "other", pretrain_steps=1))


@pytest.mark.ci
def test_a_folder_is_held_by_one_run(data, tmp_path):  # noqa: F811
    settings = settings_for(data, tmp_path / "run", steps=1)
    prepared = prepare(settings)
    with pytest.raises(UsageError, match=rf"another run is at work in it .process {os.getpid()} "):
        prepare(settings)
    execute(prepared)  # lets go at its end
    prepare(settings, resume=True).close()
    # a process that was killed holds nothing
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom mfopt.training.folder import hold\n"
        "lock = hold(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)"
    )
    child = start("-c", program, tmp_path / "run")
    assert child.stdout.readline() == "held\n"
    with pytest.raises(UsageError, match=rf"process {child.pid} "):
        hold(tmp_path / "run")
    child.kill()
    child.communicate()
    hold(tmp_path / "run").release()


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):  # noqa: F811
    """The folder of a run that nothing ends."""
    folder = tmp_path_factory.mktemp("faults") / "whole"
    execute(prepare(settings_for(data, folder, seed=3)))
    return folder


@pytest.mark.ci
@pytest.mark.parametrize("number", before_release([signal.SIGINT, signal.SIGTERM], 0))
def test_a_signal_ends_a_run_with_a_checkpoint(data, whole, tmp_path, number):  # noqa: F811
    settings = settings_for(data, tmp_path / "run", seed=3, checkpoint_every=100)

    def send(progress):
        if progress.stage == "training" and progress.done == 3 and not progress.lasting:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt) as stop:
        execute(prepare(settings), progress=send)
    assert "after step 3 of 6, which is saved" in stop.value.__notes__[0]
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    lines = []
    assert execute(prepare(settings, resume=True), progress=lines.append)["steps"] == 6
    assert "resuming after step 3" in lines[0].note
    mine, theirs = (
        load_file(folder / "model" / "model.safetensors") for folder in (tmp_path / "run", whole)
    )
    assert all(np.array_equal(mine[name], theirs[name]) for name in theirs)
    # and from an earlier step, if asked for
    summary = execute(prepare(settings, resume=True), resume_from=3)
    assert summary["steps"] == 6
    with pytest.raises(UsageError, match="not found"):
        execute(prepare(settings, resume=True), resume_from=1)


def test_a_run_that_diverges_ends_at_its_last_good_checkpoint(data, tmp_path):  # noqa: F811
    settings = settings_for(
        data, tmp_path / "run", learning_rate=1e38, optimizer="sgd", checkpoint_every=1
    )
    with pytest.raises(FailureError, match=r"diverged.*model is that of step 0.*learning rate"):
        execute(prepare(settings))
    arrays = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(np.isfinite(array).all() for array in arrays.values())
    report = json.loads((tmp_path / "run" / "privacy-report.json").read_text())
    assert report["steps_done"] == 0


def test_what_cannot_work_is_said_before_anything_starts(data, tmp_path, monkeypatch):  # noqa: F811
    def pretrain(*_, **__):
        raise AssertionError("the work has begun")

    monkeypatch.setattr("mfopt.training.initial_model._pretrain", pretrain)
    (tmp_path / "0").mkdir()
    for number, (changes, match) in enumerate(
        [
            ({"steps": 7}, "covers 6 steps"),
            ({"steps": 7}, "covers 6 steps"),
            ({"privacy_unit": "record"}, "clips users"),
            ({"sampling": "fixed-batch:batch_size=5,population=21,iterations=4"}, "population"),
        ]
    ):
        with pytest.raises(UsageError, match=match):
            prepare(settings_for(data, tmp_path / str(number), pretrain_steps=5, **changes))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]  # which was there
    for changes, match in (
        ({"length": 1}, "length"),
        (
            {"sampling": "min-separation:separation=4,max_participations=2,iterations=8"},
            "sampling = .*no batch is drawn",
        ),
        (
            {
                "sampling": "fixed-batch:batch_size=5,population=20,iterations=4",
                "strategy": "banded-sqrt",
            },
            "strategy = 'banded-sqrt': must be.*'identity': under fixed-batch.*zero-out.*account",
        ),
    ):
        with pytest.raises(UsageError, match=match):
            settings_for(data, tmp_path / "never", **changes)
    with pytest.raises(AssertionError, match="has begun"):  # the control
        prepare(settings_for(data, tmp_path / "whole", pretrain_steps=5))


def test_a_run_that_cannot_learn_is_warned_about(data, tmp_path):  # noqa: F811
    def report(**changes):
        prepared = prepare(
            settings_for(data, tmp_path / f"run{len(list(tmp_path.iterdir()))}", **changes)
        )
        prepared.close()
        return prepared.report(0)

    hopeless = report(epsilon=0.001, normalizer=5.0)
    [warning] = hopeless["warnings"]
    sizes = hopeless["noise_against_signal"]
    ratio = sizes["noise_of_all_steps"] / sizes["largest_signal_of_all_steps"]
    assert ratio > privacy.HOPELESS and f"{ratio:.3g} times less" in warning
    assert "WARNING" in privacy.report_text(hopeless)
    checks = verification.verify(hopeless | {"warnings": []}).checks
    assert "warnings" in [check.name for check in checks if not check.holds]
    assert report(epsilon=50.0, normalizer=5.0)["warnings"] == []
    usual = report(epsilon=50.0)  # a default is no reason to warn, and what it tells is stated
    assert usual["warnings"] == [] and "divided by tells it" in privacy.report_text(usual)
    assert "divided by" in report(epsilon=50.0, normalizer=1000.0)["warnings"][0]
