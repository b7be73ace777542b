"""Checkpoints, metrics, export: complete or absent, secret where they must be."""

import contextlib
import gc
import shutil
import stat

import jax
import numpy as np
import optax
import pytest
import test_train_loop as loop_tests
from safetensors.numpy import load_file
from selection import before_release
from train_fixtures import bigram_model, synthetic_store

from mfopt.errors import FailureError, UsageError
from mfopt.training import metrics
from mfopt.training.checkpoint import Checkpoints
from mfopt.training.loop import Trainer
from mfopt.training.metrics import Evaluator
from mfopt.training.models.huggingface import export_model
from mfopt.training.secrets import RunSecret
from mfopt.training.units import UserUnits


def trainer_for(**options):
    store, model = loop_tests.store_and_model()
    units = UserUnits(store, records=2, length=loop_tests.LENGTH, seed=5)
    execution = loop_tests.execution_for(units, **options)
    return Trainer(model, execution, optax.adam(0.1))


@pytest.fixture
def trainer():
    return trainer_for()


@pytest.fixture
def secret():
    return RunSecret.fresh()


def equal(a, b):
    return all(
        np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.ci
def test_checkpoints_hold_the_whole_state_keep_the_last_and_are_secret(
    tmp_path, trainer, secret, monkeypatch, caplog
):
    threshold = "orbax.checkpoint.checkpoint_manager._WAIT_FOR_PREV_SAVE_WARNING_THRESHOLD_SECS"
    monkeypatch.setattr(threshold, -1)  # saves that wait are no news
    kept = {}
    with Checkpoints(tmp_path / "c") as checkpoints:
        # saved while the loop goes on and reuses the buffers
        for result in trainer.run(trainer.init(loop_tests.KEY)):
            kept[result.step + 1] = jax.tree.map(np.array, result.state)
            checkpoints.save(result.state, secret, {"steps": result.step + 1})
    assert "previous save" not in caplog.text
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.steps == [5, 6]
        newest, facts, _ = checkpoints.restore(trainer.init(), secret)
        assert equal(newest, kept[6]) and facts["steps"] == 6
        assert int(newest.step) == 6 and checkpoints.steps == [5, 6]
        with pytest.raises(UsageError, match="not found"):
            checkpoints.restore(trainer.init(), secret, 3)
        with pytest.raises(FailureError, match=r"step 6: .* not under this run's secret"):
            checkpoints.restore(trainer.init(), RunSecret.fresh())
        # the run goes on from step 5 to the same end; what came later will be written again
        state, facts, _ = checkpoints.restore(trainer.init(), secret, 5)
        assert equal(state, kept[5]) and facts["steps"] == 5
        assert equal(list(trainer.run(state))[-1].state, kept[6])
        assert checkpoints.steps == [5]
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o700


def test_a_checkpoint_of_another_run_is_refused(tmp_path, trainer, secret):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(trainer.init(), secret, {"run": {"data": "a", "settings": "b"}})
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.restore(trainer.init(), secret, run={"data": "a", "settings": "b"})
        changed = {"data": "a", "settings": "c", "model": "d"}
        with pytest.raises(UsageError, match=r"settings = c \(was b\), model = d \(was None\)"):
            checkpoints.restore(trainer.init(), secret, run=changed)


def test_a_half_written_checkpoint_is_not_found(tmp_path, trainer, secret):
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(trainer.init(), secret, {})
    # what a kill leaves behind: a folder under its temporary name
    (tmp_path / "c" / "3.orbax-checkpoint-tmp-1").mkdir()
    with Checkpoints(tmp_path / "c") as checkpoints:
        assert checkpoints.steps == [0]
        checkpoints.restore(trainer.init(), secret)


def test_tables_are_taken_up_again_without_double_rows(tmp_path):
    path = tmp_path / "m.csv"
    with contextlib.ExitStack() as stack:
        table = metrics._open_table(stack, path, ("step", "loss"), start=0)
        for step in range(5):
            table.writerow({"step": step, "loss": 1.5})
            assert len(path.read_text().splitlines()) == step + 2  # on disk
    path.write_text(path.read_text() + "5,")  # killed in the middle of a row
    with contextlib.ExitStack() as stack:
        repeated = metrics._open_table(stack, path, ("step", "loss"), start=3)
        repeated.writerow({"step": 3, "loss": 2.5})
    rows = metrics.read_table(path)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3"] and rows[3]["loss"] == "2.5"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert metrics.read_table(tmp_path / "none.csv") == []


@pytest.mark.release
def test_step_rows_are_means_over_what_took_part():
    trainer = trainer_for(microbatch=8)
    result = next(trainer.run(trainer.init(loop_tests.KEY)))
    row = metrics.step_row(result, 2.0)
    store, model = loop_tests.store_and_model()
    tokens, mask = trainer.execution.units.fetch(result.batch.ravel(), 0)
    rows, targets = tokens.reshape(-1, loop_tests.LENGTH), mask.reshape(-1, loop_tests.LENGTH)
    losses = [float(model.loss(model.params, (), t, m)) for t, m in zip(rows, targets, strict=True)]
    weights = np.maximum(targets.sum(axis=1) - 1, 0)
    assert row["loss"] == pytest.approx(np.sum(losses * weights) / weights.sum(), rel=1e-5)
    assert row["tokens"] == mask.sum() == 2 * row["tokens_per_second"]
    present = [unit for unit in result.batch.ravel() if unit >= 0 and store.records_of(unit)]
    assert row["units"] == len(present)


def test_evaluation_is_the_mean_over_predicted_tokens():
    store, model = synthetic_store(), bigram_model()
    evaluation = Evaluator(model, 12)(model.params, store)
    total = count = 0.0
    for record in range(store.num_records):
        tokens, mask = store.batch([record], 12)
        targets = max(int(mask.sum()) - 1, 0)
        total += float(model.loss(model.params, (), tokens[0], mask[0])) * targets
        count += targets
    assert evaluation.loss == pytest.approx(total / count, rel=1e-5)
    assert evaluation.tokens == count
    assert evaluation.perplexity == pytest.approx(np.exp(total / count), rel=1e-5)
    small = Evaluator(model, 12)(model.params, store, max_records=7)
    assert 0 < small.tokens < count


def test_export_is_the_model_alone(tmp_path):
    model = bigram_model()
    export_model(model, model.params, tmp_path / "out")
    files = [path.name for path in (tmp_path / "out").iterdir()]
    assert files == ["model.safetensors"]
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert set(arrays) == {"embed", "decode"}
    np.testing.assert_array_equal(arrays["embed"], model.params["embed"])
    export_model(model, model.params, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_told_in_one_line_and_the_last_whole_checkpoint_stays(
    tmp_path, trainer, secret, monkeypatch
):
    state = trainer.init(loop_tests.KEY)
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state, secret, {})

    def full(*_, **__):
        raise ValueError("OUT_OF_RANGE: Error writing local file:\nFile too large")

    with Checkpoints(tmp_path / "c") as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._manager, "save", full)
            with pytest.raises(
                FailureError, match=r"could not be written.*`resume=True`"
            ) as caught:
                checkpoints.save(state, secret, {})
        assert "\n" not in str(caught.value) and checkpoints.steps == [0]


def saved_twice(folder, trainer, secret):
    """The states of two checkpoints; the second is the newest."""
    states = []
    with Checkpoints(folder) as checkpoints:
        for result in trainer.run(trainer.init(loop_tests.KEY), 2):
            states.append(jax.tree.map(np.array, result.state))
            checkpoints.save(result.state, secret, {"steps": result.step + 1})
    return states


def flip(path, index):
    content = bytearray(path.read_bytes())
    content[int(index * (len(content) - 1))] ^= 0x10
    path.write_bytes(content)


# the reader's own threads find its event loop closed when a read of damaged bytes has failed
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("complete", before_release([False, True], 0))
def test_a_flipped_bit_is_never_loaded(complete, tmp_path, trainer, secret):
    states = saved_twice(tmp_path / "whole", trainer, secret)
    files = [path for path in sorted((tmp_path / "whole" / "2").rglob("*")) if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    facts = next(path for path in files if path.parent.name == "facts")
    index = tmp_path / "whole" / "2" / "state" / "manifest.ocdbt"  # the one that all is read by
    flips = [(largest, 0.9), (index, 0.5)]
    if complete:
        flips += [(file, 0.5) for file in files] + [(largest, 0.3), (facts, 0.2)]
    fell_back = 0
    for number, (file, spot) in enumerate(flips):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        flip(folder / file.relative_to(tmp_path / "whole"), spot)
        with Checkpoints(folder) as checkpoints:
            restored = checkpoints.restore(trainer.init(), secret)
            step = int(restored.state.step)
            assert equal(restored.state, states[step - 1])
            # a bit that nothing reads does no harm; any other gives the checkpoint before
            assert bool(restored.damaged) == (step == 1)
            fell_back += step == 1
            assert checkpoints.steps == ([1] if restored.damaged else [1, 2])
            # and the run goes on to write the same step again
            *_, final = trainer.run(restored.state, 2) if step == 1 else [None]
            if final is not None:
                checkpoints.save(final.state, secret, {})
                checkpoints.wait()
                assert checkpoints.steps == [1, 2]
    assert fell_back >= (4 if complete else 1)
    gc.collect()  # what was left of the failed reads is told of here, not in a later test


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_where_no_checkpoint_is_whole_none_is_touched(tmp_path, trainer, secret):
    saved_twice(tmp_path / "c", trainer, secret)
    for step in ("1", "2"):
        facts = next((tmp_path / "c" / step / "facts").iterdir())
        facts.write_text(facts.read_text().replace('"steps": ', '"steps": 1'))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(FailureError, match=r"step 2: its facts.*step 1: its facts"):
            checkpoints.restore(trainer.init(), secret)
        with pytest.raises(FailureError, match="resume_from"):
            checkpoints.restore(trainer.init(), secret, 1)
        assert checkpoints.steps == [1, 2]
    gc.collect()  # as above
