"""A run that happened is executed again: the same bit for bit, unless it was another program's."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from selection import before_release
from test_cli import run
from test_train_planted import faults
from test_train_run import data, settings_for  # noqa: F401 (fixtures)

from mfopt.errors import UsageError
from mfopt.sampling.sampler import pad
from mfopt.training import loop
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
from mfopt.training.replay import replay
from mfopt.training.units import UserUnits


def ran(data, folder, **changes):  # noqa: F811
    execute(prepare(settings_for(data, folder, **changes)))
    return folder


@pytest.mark.ci
def test_a_run_is_executed_again_bit_for_bit(data, tmp_path):  # noqa: F811
    folder = ran(data, tmp_path / "run")
    # the account proved elsewhere, in other words
    path = folder / "privacy-report.json"
    report = json.loads(path.read_text())
    report["guarantee"] |= {"method": "another proof", "details": {"bracket": [0, 1]}}
    path.write_text(json.dumps(report))
    original = {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()}
    replayed, findings = replay(folder)
    assert (replayed.begin, replayed.end, replayed.differences) == (4, 6, ())
    assert "the same, bit for bit" in str(replayed)
    assert len(findings) == 19 and not faults(findings)
    # nothing of the run is changed
    assert {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()} == original
    # an export or a report that is not the run's, in either place
    beside = folder / "model" / path.name
    beside.write_text(json.dumps(report | {"normalizer": 99.0}))
    assert replay(folder)[0].differences == ("privacy report",)
    beside.write_text(json.dumps(report))
    model = folder / "model" / "model.safetensors"
    arrays = load_file(model)
    name = next(iter(arrays))
    arrays[name] = np.nextafter(arrays[name], np.float32(1))
    save_file(arrays, model)
    path.write_text(json.dumps(report | {"normalizer": 99.0}))
    assert replay(folder)[0].differences == ("exported model", "privacy report")


# what is changed or gone, and the exit code
ELSEWHERE = [("config.toml", 1), ("secret", 1), ("model", 1), ("data", 0)]
ALL = {
    "els": {"algorithm": "els", "optimizer": "momentum"},
    "fedavg": {"algorithm": "fedavg", "local_batch": 1, "local_epochs": 2, "weight_cap": 2},
    "group": {"algorithm": "group", "lora_rank": 2},
    "record": {"algorithm": "els", "records_per_user": 7, "privacy_unit": "record"},
    "secure": {"noise": "secure", "compute_dtype": "bfloat16"},
    "bins": {"sampling": "balls-in-bins:epochs=2,bins=3", "normalized": True, "clip_norm": 0.1},
}


@pytest.mark.release
@pytest.mark.parametrize("changes", ALL.values(), ids=ALL)
def test_a_run_of_any_kind_follows_the_definition_on_its_own_data(data, tmp_path, changes):  # noqa: F811
    replayed, findings = replay(ran(data, tmp_path / "run", **changes))
    assert replayed.differences == () and not faults(findings)


@pytest.mark.ci
def test_a_fault_that_shows_in_the_runs_own_data_alone_is_found(data, tmp_path, monkeypatch):  # noqa: F811
    right_choice, right_sum = UserUnits._chosen, loop.Trainer.sum

    def of_another_user(self, users, step):  # canaries come from no file
        return right_choice(
            self, np.where(self.store.metadata["source"] and users > 9, 9, users), step
        )

    def twice(self, params, batch, step):  # after the first steps
        totals = right_sum(self, params, batch, step)
        doubled = jax.tree.map(lambda leaf: leaf * (1 + (step >= 4)), totals.gradient)
        return totals._replace(gradient=doubled)

    patches = {
        "records of a unit, at most as accounted": (UserUnits, "_chosen", of_another_user),
        "sums of clipped gradients": (loop.Trainer, "sum", twice),
    }
    for number, (name, patch) in enumerate(patches.items()):
        with monkeypatch.context() as context:
            context.setattr(*patch)
            replayed, findings = replay(ran(data, tmp_path / f"{number}"))
        assert replayed.differences == ()  # it is the program that ran
        assert f"{name}, on the run's own data" in faults(findings)


def test_a_run_of_another_program_ends_elsewhere(data, tmp_path, monkeypatch):  # noqa: F811
    def every_other(drawn, microbatch, fill):  # half of the units that were drawn
        return pad(drawn[::2], microbatch, fill=fill)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "pad", every_other)
        folder = ran(data, tmp_path / "run")
    replayed, _ = replay(folder)
    assert "parameters" in replayed.differences and "noise" not in replayed.differences
    assert "DIFFERENT: parameters" in str(replayed)


def test_what_cannot_be_executed_again_is_refused(data, tmp_path):  # noqa: F811
    folder = ran(data, tmp_path / "run", steps=1, checkpoint_every=50)
    assert replay(folder)[0].begin == 0  # the state before the first step is a checkpoint
    for path in (folder / "checkpoints").glob("0"):
        path.rename(tmp_path / "first")
    with pytest.raises(UsageError, match="fewer than two checkpoints"):
        replay(folder)


@pytest.mark.ci
@pytest.mark.parametrize(("changed", "code"), before_release(ELSEWHERE, 0))
def test_an_audit_fails_where_a_run_is_not_what_it_was(data, tmp_path, changed, code):  # noqa: F811
    shutil.copytree(data, tmp_path / "data")
    folder = ran(tmp_path / "data", tmp_path / "run")
    for path in folder.glob(f"{changed}*"):
        if changed == "config.toml":  # settings that it never had
            path.write_text(path.read_text().replace("clip_norm = 1.0", "clip_norm = 2.0"))
        elif changed == "model":
            shutil.rmtree(path)
        else:
            path.write_bytes(path.read_bytes()[::-1])
    if changed == "data":
        shutil.rmtree(tmp_path / "data")
    actual, _, err = run("audit", folder, "--canaries", 100, "--quiet")
    assert actual == code and ("cannot be executed again" in err) == code, err
