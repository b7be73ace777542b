"""Programs kept on disk whole: found by all that they follow from, and by nothing less."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mfopt import _identity, _kept, _plugins, _quick
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.optimize import objective, parameterization
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT
from mfopt.workloads import Momentum, PrefixSums

_MATRIX = np.array([[4.0, 1.0], [1.0, 3.0]])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept while the test lasts."""
    _identity._surroundings.cache_clear()
    monkeypatch.setattr(_kept, "_folder", None)
    _kept.use(tmp_path)
    yield tmp_path
    _identity._surroundings.cache_clear()


@float64
def _factor(expected_to_compile):
    """A factor by a new ``jit``, as a new process would make it."""
    made, lowered = _quick.jit(jnp.linalg.cholesky), []
    lower = made.lower_for
    made.lower_for = lambda *args: (lowered.append(args), lower(*args))[1]
    found = made(_MATRIX)
    assert expected_to_compile is None or bool(lowered) == expected_to_compile
    return np.asarray(found)


def _files(folder):
    return sorted(folder.glob(f"*{_kept.SUFFIX}"))


def test_a_kept_program_is_not_compiled_again_and_gives_the_same_bits(folder):
    plain = float64(jax.jit(jnp.linalg.cholesky, compiler_options=_quick.options()))(_MATRIX)
    first = _factor(expected_to_compile=True)
    (path,) = _files(folder)
    assert path.stat().st_mode & 0o777 == 0o600
    again = _factor(expected_to_compile=False)  # LAPACK included
    assert plain.tobytes() == first.tobytes() == again.tobytes()
    assert [*folder.iterdir()] == [path]


@pytest.fixture
def caching():
    """The suite's own JAX cache takes what compiles in no time as well."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)


@pytest.mark.usefixtures("caching")
def test_what_jax_read_from_its_own_cache_is_compiled_again_to_be_kept(folder, monkeypatch):
    # at the second time it is read there, and could not be written whole again
    for _ in range(2):
        with jax.enable_x64(True):
            _quick.jit(jnp.linalg.cholesky).jitted(_MATRIX)
            jax.clear_caches()
    _factor(expected_to_compile=True)
    assert _files(folder)
    again = _factor(expected_to_compile=False)
    assert np.allclose(again @ again.T, _MATRIX, rtol=1e-12)
    # and what it reads all the same is not kept
    monkeypatch.setattr(_quick.jit, "lower_for", lambda self, alone, *args: self.lower(*args))
    for path in _files(folder):
        path.unlink()
    jax.clear_caches()
    _factor(expected_to_compile=True)
    assert not _files(folder)


def _spoil(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _replace(path):
    path.write_bytes(b"no program")


def _widen(path):
    path.chmod(0o666)


def _link(path):
    other = path.with_suffix(".elsewhere")
    path.rename(other)
    path.symlink_to(other)


@pytest.mark.parametrize("damage", [_spoil, _replace, _widen, _link])
def test_a_damaged_or_foreign_file_is_a_miss_and_is_replaced(folder, damage):
    _factor(expected_to_compile=True)
    damage(*_files(folder))
    _factor(expected_to_compile=True)
    _factor(expected_to_compile=False)


def test_a_file_or_a_folder_of_another_user_is_not_used(folder, monkeypatch):
    _factor(expected_to_compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        _factor(expected_to_compile=True)
        _kept.use(folder)
        assert not _kept.on()
    _kept.use(folder)
    _factor(expected_to_compile=False)
    folder.chmod(0o777)
    _kept.use(folder)
    assert not _kept.on()


def test_other_code_another_machine_and_other_settings_are_misses(folder, monkeypatch):
    _factor(expected_to_compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(_identity, "sources", lambda folder: "changed")
        _identity._surroundings.cache_clear()
        _factor(expected_to_compile=True)
    with monkeypatch.context() as patch:
        patch.setattr(_identity, "processor", lambda: "another")
        _identity._surroundings.cache_clear()
        _factor(expected_to_compile=True)
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
        _identity._surroundings.cache_clear()
        _factor(expected_to_compile=True)
    _identity._surroundings.cache_clear()
    with jax.default_matmul_precision("highest"):
        _factor(expected_to_compile=True)
    _factor(expected_to_compile=False)
    assert len(_files(folder)) == 5


def test_nothing_is_kept_over_several_devices_or_with_a_plugin(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda: 2 * jax.local_devices())
        _identity._surroundings.cache_clear()
        _factor(expected_to_compile=True)
    _identity._surroundings.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(_plugins, "_loaded", {"lottery"})
        assert _kept.shared() is None  # nor by a process that is started now
        _factor(expected_to_compile=None)
    assert not _files(folder)


def test_what_cannot_be_named_or_calls_python_is_not_kept(folder):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    for function in (
        lambda x: x + 1,  # of a test, whose source is in no digest
        functools.partial(jax.pure_callback, float, shape),
    ):
        assert float(_quick.jit(function)(1.0)) in (1.0, 2.0)
    traced = jax.jit(lambda x: jax.pure_callback(float, shape, x)).lower(1.0)
    _kept.program(lambda alone: traced, "calls Python")
    assert not _files(folder)


def test_what_is_not_kept_has_the_name_that_jaxs_cache_knows(folder, monkeypatch):
    asked, lower = [], _quick.jit.lower_for
    monkeypatch.setattr(
        _quick.jit,
        "lower_for",
        lambda self, alone, *args: (asked.append(alone), lower(self, alone, *args))[1],
    )
    for function in (lambda x: x + 1, jnp.linalg.cholesky):
        _quick.jit(function)(np.eye(2, dtype=np.float32))
    assert asked == [False, True] and len(_files(folder)) == 1


def test_what_is_kept_is_not_written_to_jaxs_cache_too(folder, tmp_path):
    program = (
        "import sys, jax, jax.numpy as jnp, numpy as np\n"
        "from pathlib import Path; from mfopt import _kept, _quick\n"
        "if sys.argv[1] == 'kept': _kept.use(Path(sys.argv[2]))\n"
        "_quick.jit(jnp.linalg.cholesky)(np.eye(3, dtype=np.float32))\n"
    )
    for way, kept in (("kept", 1), ("not", 0)):
        cache = tmp_path / f"jax-{way}"
        place = {"JAX_COMPILATION_CACHE_DIR": str(cache)}
        always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        subprocess.run(
            [sys.executable, "-c", program, way, str(folder)],
            check=True,
            env={**os.environ, **place, **always},
        )
        written = [path.name for path in cache.glob("*-cache") if "cholesky" in path.name]
        assert len(written) == 1 - kept and len(_files(folder)) == 1


def test_sources_are_told_apart_by_name_and_content(tmp_path):
    with pytest.raises(_identity.UnknownError):
        _identity.sources(tmp_path)
    seen = set()
    for name, content in [("a.py", ""), ("a.py", "x"), ("b.py", "x"), ("c/d.py", "y")]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        seen.add(_identity.sources(tmp_path))
    assert len(seen) == 4
    (tmp_path / "notes.txt").write_text("no code")
    assert _identity.sources(tmp_path) in seen


def _parts():
    """Parts of programs, no two of which are one program; made anew by each call."""
    blt = parameterization.blt(BLT(np.array([0.1, 0.2]), np.array([0.9, 0.5])), 8).build
    yield objective.log_rmse(PrefixSums(), 8)
    yield objective.log_rmse(PrefixSums(), 9)
    yield objective.log_rmse(Momentum(0.9, [1.0]), 8)
    yield objective.log_rmse(Momentum(0.8, [1.0]), 8)
    yield objective.log_max_error(PrefixSums(), 8)
    yield blt
    yield law(BallsInBins(bins=4, epochs=2))
    yield law(BallsInBins(bins=4, epochs=3))
    yield functools.partial(jnp.sum, axis=0)
    yield functools.partial(jnp.sum, axis=1)
    yield 1, 2
    yield (1, 2), ()
    yield [1, 2]
    yield 1.0, 2
    yield True, 2
    yield "1", 2
    yield np.array([1, 2])
    yield np.array([1.0, 2.0])
    yield np.array([[1.0, 2.0]])
    yield 0.0
    yield -0.0
    yield np.float64(0.0)
    yield jax.ShapeDtypeStruct((2,), np.float32)
    yield jax.ShapeDtypeStruct((2,), np.float64)
    yield jax.ShapeDtypeStruct((2,), np.float32, weak_type=True)
    yield jax.tree.structure((1, 2))
    yield jax.tree.structure([1, None, {"a": 2}])
    yield jax.tree.structure(BLT(np.array([0.1]), np.array([0.9])))


def test_a_digest_is_that_of_its_parts_and_of_no_others():
    found = [_identity.digest(part) for part in _parts()]
    assert len(set(found)) == len(found)
    objective.log_rmse.cache_clear()
    assert found == [_identity.digest(part) for part in _parts()]
    with jax.enable_x64(not jax.config.jax_enable_x64):
        assert not set(found) & {_identity.digest(part) for part in _parts()}


@pytest.mark.parametrize(
    "part", [object(), lambda: 0, {"a": object()}, np.array([object()]), np.random.default_rng()]
)
def test_a_part_without_a_name_has_no_digest(part):
    with pytest.raises(_identity.UnknownError):
        _identity.digest(part)


def test_what_is_used_least_goes_first_and_halves_of_files_too(folder, monkeypatch):
    monkeypatch.setattr(_kept, "MOST_BYTES", 250)
    for age, name in enumerate(["new.program", "old.program", "left.part", "oldest.program"]):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (10**9 - age, 10**9 - age))
    _kept._bound(folder)
    assert {path.name for path in folder.iterdir()} == {"new.program", "old.program"}


def test_a_folder_that_cannot_be_written_is_no_error(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_kept.tempfile, "mkstemp", full)
    _factor(expected_to_compile=True)
    assert not [*folder.iterdir()]


_COMMAND = """
import sys
from mfopt_cli import compiled, main
compiled.switch_on()
import jax
lowered = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, fun_name="", **__: lowered.append(fun_name) if "mlir" in name else None
)
main.main(sys.argv[1:])
print(*lowered, file=sys.stderr)
"""


def _optimized(folder, out, **more):
    """(C, σ and all else of the file but times, names of programs that were lowered)."""
    dropped = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    command = "optimize --epochs 2 --iters 4 --eps 2 --seed 1 --steps 3 --quiet --force --out"
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *command.split(), str(out)],
        env=environment | {"MFOPT_COMPILED": str(folder), **more},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with np.load(out) as file:
        arrays = {name: file[name].tobytes() for name in file if name not in ("metadata",)}
        arrays["history"] = file["history"][:, 1:].tobytes()
    return arrays, set(done.stderr.split())


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="processors are told apart on Linux")
def test_a_second_command_lowers_none_of_its_programs_and_gives_the_same_file(tmp_path):
    cold, made = _optimized(tmp_path / "kept", tmp_path / "cold.npz")
    warm, again = _optimized(tmp_path / "kept", tmp_path / "warm.npz")
    without, _ = _optimized("off", tmp_path / "without.npz")
    assert cold == warm == without
    large = {"_slope", "_run", "_moments", "row_variances", "inverse_coefs"}
    assert {name for name in made if any(word in name for word in large)}
    assert not {name for name in again if any(word in name for word in large)}
    several = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    _, elsewhere = _optimized(tmp_path / "kept", tmp_path / "two.npz", **several)
    assert {name for name in elsewhere if any(word in name for word in large)}
