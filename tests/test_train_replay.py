"""A run that happened is executed again: the same bit for bit, unless it was another program's."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_train_run import data, settings_for  # noqa: F401 (fixtures)

from mfopt.errors import UsageError
from mfopt.sampling.sampler import pad
from mfopt.training import loop
from mfopt.training.execute import execute
from mfopt.training.prepare import prepare
from mfopt.training.replay import replay


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
    replayed = replay(folder)
    assert (replayed.begin, replayed.end, replayed.differences) == (4, 6, ())
    assert "the same, bit for bit" in str(replayed)
    # nothing of the run is changed
    assert {item: item.read_bytes() for item in folder.rglob("*") if item.is_file()} == original
    # an export or a report that is not the run's
    model = folder / "model" / "model.safetensors"
    arrays = load_file(model)
    name = next(iter(arrays))
    arrays[name] = np.nextafter(arrays[name], np.float32(1))
    save_file(arrays, model)
    path.write_text(json.dumps(report | {"normalizer": 99.0}))
    assert replay(folder).differences == ("exported model", "privacy report")


def test_a_run_of_another_program_ends_elsewhere(data, tmp_path, monkeypatch):  # noqa: F811
    def every_other(drawn, microbatch, fill):  # half of the units that were drawn
        return pad(drawn[::2], microbatch, fill=fill)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "pad", every_other)
        folder = ran(data, tmp_path / "run")
    replayed = replay(folder)
    assert "parameters" in replayed.differences and "noise" not in replayed.differences
    assert "DIFFERENT: parameters" in str(replayed)


def test_what_cannot_be_executed_again_is_refused(data, tmp_path):  # noqa: F811
    folder = ran(data, tmp_path / "run", steps=1, checkpoint_every=50)
    assert replay(folder).begin == 0  # the state before the first step is a checkpoint
    for path in (folder / "checkpoints").glob("0"):
        path.rename(tmp_path / "first")
    with pytest.raises(UsageError, match="fewer than two checkpoints"):
        replay(folder)
