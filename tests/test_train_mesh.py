"""The same run on one device, on eight, and in two processes."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import finish, free_port, start, with_devices
from safetensors.numpy import load_file
from train_fixtures import synthetic_store
from train_oracles import write_store

from mfopt.errors import UsageError
from mfopt.training import mesh as meshes

CHILD = Path(__file__).with_name("train_mesh_child.py")


def begun(*command, devices=1):
    return start(*command, env=with_devices(devices))


def train(folder, name, *, devices, resume="", **changes):
    settings = {"mesh": True, "microbatch": 8, "default_device": None}
    settings |= {"output": str(folder / name), **changes}
    settings["checkpoints"] = resume and str(folder / f"{resume}.checkpoints")
    return begun(CHILD, json.dumps(settings), devices=devices)


def results(*children):
    return [json.loads(output[output.index("{") :]) for output in finish(*children)]


def assert_same(arrays, other):
    a, b = np.load(arrays), np.load(other)
    assert set(a.files) == set(b.files) and len(a.files) > 10
    for name in a.files:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """One device, no mesh."""
    folder = tmp_path_factory.mktemp("mesh")
    finish(train(folder, "one.npz", devices=1, mesh=False))
    return folder


@pytest.mark.release
def test_eight_devices_share_everything_and_give_the_same_run(one_device):
    (facts,) = results(train(one_device, "eight.npz", devices=8))
    assert facts["devices"] == facts["kernel_shards"] == 8
    # beside numbers like the step, which every device has
    assert facts["total"] / 8 <= facts["held"] < facts["total"] / 8 + 200
    assert_same(one_device / "one.npz", one_device / "eight.npz")


@pytest.mark.release
def test_other_numbers_of_devices_go_on_from_a_checkpoint(one_device):
    finish(train(one_device, "more.npz", devices=8, resume="one.npz"))
    finish(train(one_device, "fewer.npz", devices=2, resume="more.npz"))
    assert_same(one_device / "one.npz", one_device / "more.npz")
    assert_same(one_device / "one.npz", one_device / "fewer.npz")


@pytest.mark.release
def test_the_default_device_is_the_only_one_where_it_is_set(one_device, monkeypatch):
    (facts,) = results(train(one_device, "chosen.npz", devices=4, default_device=2))
    assert facts["devices"] == 4 and facts["used"] == [2]
    assert_same(one_device / "one.npz", one_device / "chosen.npz")
    with jax.default_device("cpu"):
        assert meshes.devices() == jax.devices()[:1]
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(UsageError, match="jax_default_device = 'cpu': is one device, and 2"):
            meshes.make_mesh()


@pytest.mark.release
def test_two_processes_train_together_by_the_command_line(tmp_path):
    write_store(synthetic_store(num_users=16, empty_users=(3,)), tmp_path / "data" / "train")
    write_store(synthetic_store(num_users=5, seed=1), tmp_path / "data" / "held-out-users")
    settings = {
        "sampling": "poisson:probability=0.4,iterations=3",
        "epsilon": 8,
        "delta": 1e-4,
        "seed": 1,
        "length": 8,
        "width": 8,
        "layers": 1,
        "heads": 2,
        "records-per-user": 2,
        "microbatch": 4,
        "optimizer": "sgd",
        "data": tmp_path / "data",
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    flags += ["--quiet", "--json"]
    program = "from mfopt_cli.main import main; main()"

    def command(output, *extra):
        return begun("-c", program, "train", f"--output={tmp_path / output}", *flags, *extra)

    (item,) = results(command("one"))
    together = (f"--coordinator=127.0.0.1:{free_port()}", "--processes=2")
    summaries = results(*(command("two", *together, f"--process={i}") for i in range(2)))
    for summary in summaries:
        assert summary["steps"] == 3
        for part, result in item["after"].items():
            assert summary["after"][part]["loss"] == pytest.approx(result["loss"], rel=1e-5)
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-6)
    assert list((tmp_path / "two" / "checkpoints").glob("3"))


AUDITED = """
import sys
import jax, pytest
sys.path[:0] = [sys.argv[1], f"{sys.argv[1]}/../artifacts/papers"]
import test_train_planted as planted
from mfopt.noise import packing

assert len(jax.devices()) == 8
assert not planted.faults(planted.findings(microbatch=16))
for name in ("noise state not advanced", "user's records clipped one by one"):
    plant, finding, options = planted.PLANTED[name]
    with pytest.MonkeyPatch.context() as patch:
        if plant.__code__.co_varnames[0] == "patch":
            plant(patch)
            found = planted.findings(microbatch=16, **options)
        else:
            found = planted.findings(microbatch=16, alter=plant, **options)
    assert finding in planted.faults(found), name
with pytest.MonkeyPatch.context() as patch:  # every device draws the first one's noise
    patch.setattr(packing, "offsets", lambda where, block: (0,) * len(block))
    found = planted.faults(planted.findings(microbatch=16))
    assert {"noise of different coordinates", "noise of different steps"} <= found
"""


@pytest.mark.release
def test_an_audit_on_a_mesh_finds_what_is_planted_and_nothing_else():
    finish(begun("-c", AUDITED, CHILD.parent, devices=8))
