"""State files (owner-only, bound to a factorization) and the optax transformation."""

import dataclasses
import errno
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.noise import NoiseExhaustedError, NoiseStream, load_state, owner_only, save_state
from mfopt.noise.files import read_secret, write_secret
from mfopt.noise.for_optax import add_noise
from mfopt.noise.ledger import Ledger

PARAMS = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def make(strategy=None, n=6, **options):
    strategy = strategy or S.BandedToeplitz([1.0, 0.5, 0.25])
    settings = {"noise_multiplier": 1.5, "clip_norm": 1.0, **options}
    return NoiseStream(strategy, iterations=n, **settings)


def advanced(stream):
    state = stream.init(PARAMS)
    for _ in range(2):
        _, state = stream.release(PARAMS, state)
    return state


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where ledgers are stored."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("buffer_dtype", [None, jnp.bfloat16])
def test_a_run_goes_on_from_a_file_with_the_same_noise(tmp_path, buffer_dtype):
    stream = make(buffer_dtype=buffer_dtype)
    state = advanced(stream)
    path = tmp_path / "state.npz"
    save_state(path, stream, state)
    expected, _ = stream.release(PARAMS, state)
    restored = load_state(path, make(buffer_dtype=buffer_dtype), PARAMS)
    assert int(restored.step) == 2 and not restored.pinned
    noise, _ = stream.release(PARAMS, restored)
    jax.tree.map(np.testing.assert_array_equal, noise, expected)


def test_only_the_owner_can_read_a_state_file(tmp_path):
    stream = make()
    path = tmp_path / "state.npz"
    old = os.umask(0)
    try:
        save_state(path, stream, advanced(stream))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert {p.name for p in tmp_path.iterdir()} == {"state.npz", "here"}
    with np.load(path, allow_pickle=False) as file:
        assert json.loads(str(file["header"]))["notice"].startswith("SECRET")
    path.chmod(0o640)
    with pytest.raises(UsageError, match="others than its owner"):
        load_state(path, stream, PARAMS)


def test_a_file_is_not_replaced_without_force(tmp_path):
    stream = make()
    path = tmp_path / "state.npz"
    state = advanced(stream)
    save_state(path, stream, state)
    with pytest.raises(UsageError, match="exists"):
        save_state(path, stream, state)
    save_state(path, stream, state, force=True)
    with pytest.raises(UsageError, match="folder"):
        save_state(tmp_path / "none" / "state.npz", stream, state)


def test_a_file_of_something_else_is_refused(tmp_path):
    stream = make()
    path = tmp_path / "state.npz"
    save_state(path, stream, advanced(stream))
    with pytest.raises(UsageError, match="another factorization"):
        load_state(path, make(noise_multiplier=1.6), PARAMS)
    with pytest.raises(UsageError, match="other settings"):
        load_state(path, make(clip_norm=2.0), PARAMS)
    with pytest.raises(UsageError, match="parameters"):
        load_state(path, stream, {**PARAMS, "b": np.zeros(5, np.float32)})
    with pytest.raises(UsageError, match="parameters"):
        load_state(path, stream, {"a": PARAMS["a"], "c": PARAMS["b"]})
    with pytest.raises(UsageError, match="another factorization"):
        save_state(tmp_path / "other.npz", make(noise_multiplier=1.6), advanced(stream))


@pytest.mark.parametrize("damage", ["cut", "text", "npz", "none"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    stream = make()
    path = tmp_path / "state.npz"
    save_state(path, stream, advanced(stream))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:500])
    elif damage == "text":
        path.write_text("not a state")
    elif damage == "npz":
        with path.open("wb") as file:
            np.savez(file, key=np.zeros(2, np.uint32))
    else:
        path.unlink()
    with pytest.raises(UsageError, match="path"):
        load_state(path, stream, PARAMS)


def test_sums_in_16_bits_are_refused_and_narrow_parameters_are_not():
    stream = make()
    params = jnp.zeros(1000, jnp.bfloat16)
    transformation = add_noise(stream, seed=4)
    state = transformation.init(params)
    for narrow in (jnp.bfloat16, jnp.float16):
        for update in (transformation.update, jax.jit(transformation.update)):
            with pytest.raises(UsageError, match="narrower than float32"):
                update(params.astype(narrow), state)
    output, _ = transformation.update(params.astype(jnp.float32) + 1, state)
    noise, _ = stream.next(stream.init(params, seed=4))
    assert output.dtype == noise.dtype == jnp.float32
    np.testing.assert_array_equal(output, 1 + noise)


def test_one_key_makes_the_noise_of_one_group_of_parameters():
    stream, key = make(), np.arange(8, dtype=np.uint32)
    groups = {"w": "one", "v": "two"}
    params = {name: jnp.zeros(3) for name in groups}
    shared = add_noise(stream, key=key)
    with pytest.raises(UsageError, match="was used by an init"):
        optax.multi_transform({"one": shared, "two": shared}, groups).init(params)
    # shapes alone take no noise
    transformation = add_noise(stream, key=key)
    jax.eval_shape(transformation.init, params)
    transformation.init(params)


def test_optax_raises_past_the_last_step_and_gives_nan_inside_jit():
    transformation = add_noise(make(n=1), seed=4)
    for update in (transformation.update, jax.jit(transformation.update)):
        output, state = update(PARAMS, transformation.init(PARAMS))
        assert not np.any(np.isnan(output["a"]))
        if update is transformation.update:
            with pytest.raises(NoiseExhaustedError):
                update(PARAMS, state)
        else:
            output, _ = update(PARAMS, state)
            assert np.all(np.isnan(output["a"])) and np.all(np.isnan(output["b"]))


# --- what a state must look like, and what other libraries make of it ----------------------

BLT = S.BLT([0.3, 0.1], [0.5, 0.9])


@pytest.mark.parametrize(
    "change",
    [
        {"step": np.zeros((), np.int64)},
        {"step": np.asarray(-1, np.int32)},
        {"step": np.asarray(7, np.int32)},
        {"step": np.zeros(1, np.int32)},
        {"key": jnp.zeros(2, jnp.uint32)},
        {"buffers": (jnp.zeros((2, 2, 3)),)},
        {"buffers": (jnp.zeros((2, 2, 3)), None)},
        {"buffers": (jnp.zeros((2, 2, 3)), jnp.zeros((2, 1)))},
        {"buffers": (jnp.zeros((2, 2, 3)), jnp.zeros((2, 4), jnp.bfloat16))},
        {"mark": np.zeros(8, np.uint32)},
    ],
    ids=str,
)
def test_a_state_that_no_stream_makes_is_refused(change):
    stream = make(BLT)
    state = advanced(stream)
    with pytest.raises(UsageError, match="state"):
        stream.next(dataclasses.replace(state, **change))
    stream.next(state)  # control


@pytest.mark.parametrize(
    "change",
    ["step", "late", "float", "shape", "missing", "extra", "nan", "pinned", "key", "type"],
)
def test_a_file_with_other_contents_is_refused(tmp_path, change):
    stream = make(BLT)
    path = tmp_path / "state.npz"
    save_state(path, stream, advanced(stream))
    header, arrays = read_secret(path)
    if change in ("step", "late", "float"):
        header["step"] = {"step": -1, "late": 7, "float": 1.0}[change]
    elif change == "key":
        arrays["key"] = arrays["key"][:2]
    elif change == "type":
        arrays["buffer/1"] = arrays["buffer/1"].astype(np.float64)
    elif change == "pinned":
        header["pinned"] = "no"
    elif change == "shape":
        arrays["buffer/1"] = arrays["buffer/1"][:1]  # would be broadcast
    elif change == "missing":
        del arrays["buffer/0"]
    elif change == "extra":
        arrays["buffer/2"] = arrays["buffer/0"]
    else:
        arrays["buffer/0"][0, 0, 0] = np.nan
    write_secret(path, (header, arrays), force=True)
    with pytest.raises(UsageError, match="state"):
        load_state(path, stream, PARAMS)


def test_a_state_of_another_stream_gives_nan_inside_jit():
    # the static fields come from the program, the buffers from what was restored
    stream, other = make(BLT), make(S.BLT([0.2, 0.1], [0.5, 0.9]))
    state = advanced(stream)
    foreign = dataclasses.replace(advanced(other), digest=state.digest, settings=state.settings)
    step = jax.jit(lambda s: stream.next(s)[0])
    assert np.all(np.isfinite(step(state)["a"])) and np.all(np.isnan(step(foreign)["a"]))


def test_orbax_goes_on_with_the_same_noise_and_for_its_owner_only(tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    stream = make(BLT)
    state = advanced(stream)
    refused = pytest.raises(UsageError, match=r"umask 0022.*owner_only")
    with orbax.StandardCheckpointer() as checkpointer, refused:
        checkpointer.save(tmp_path / "open", {"run": state})
    assert not list(tmp_path.glob("open*/**/d/*"))
    with owner_only(), orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "noise", state)
        checkpointer.wait_until_finished()
    for path in (tmp_path / "noise").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    with orbax.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "noise", stream.init(PARAMS))
    expected, _ = stream.release(PARAMS, state)
    jax.tree.map(np.testing.assert_array_equal, stream.release(PARAMS, restored)[0], expected)
    other = make(S.BLT([0.2, 0.1], [0.5, 0.9]))
    with orbax.StandardCheckpointer() as checkpointer:
        foreign = checkpointer.restore(tmp_path / "noise", other.init(PARAMS))
    with pytest.raises(UsageError, match="another factorization"):
        other.next(foreign)


@pytest.mark.parametrize("limit", [0, 9])
@pytest.mark.parametrize("when", ["store", "release"])
def test_a_step_that_found_no_space_in_the_ledger_is_in_it_once_it_is_released(
    monkeypatch, tmp_path, when, limit
):
    kept, path, write = Ledger(), tmp_path / "a.ledger", os.write
    kept.release(0, b"0")
    if when == "release":
        kept.store(path)

    def step():
        if when == "release":
            kept.release(1, b"1")
        kept.store(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:limit]))
        with pytest.raises(OSError) as caught:
            step()
    assert caught.value.errno == errno.ENOSPC
    step()  # said again, with the same sum
    kept.release(2, b"2")
    lines = [line.split() for line in path.read_text().splitlines()]
    digits = "012" if when == "release" else "02"
    assert [x[0] for x in lines if len(x) == 2 and len(x[1]) == 32] == list(digits)


@pytest.mark.parametrize(("seconds", "blocks"), [(0.0, 4), (0.1, 8), (10.0, 300)])
def test_steps_of_some_seconds_are_on_the_disk_before_they_are_released(
    monkeypatch, tmp_path, seconds, blocks
):
    kept, path, synced, clock = Ledger(), tmp_path / "a.ledger", [], [1e6]
    kept.store(path)
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(path.read_text().split()[-2]))
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    for step in range(300):
        kept.release(step, b"")
        clock[0] += seconds
        hash_of_nothing = "e3b0c44298fc1c149afbf4c8996fb924"
        assert int(synced[-1]) > step and path.read_text().count(hash_of_nothing) == step + 1
    assert len(synced) == blocks
