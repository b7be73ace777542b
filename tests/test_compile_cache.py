"""Compiled programs on disk: where they are, what is removed, and that damage does no harm."""

import os
import subprocess
import sys
import threading

import pytest
from mfopt_cli import compiled

_PROGRAM = """
import sys
from mfopt_cli import compiled
folder = compiled.switch_on()
import jax, jax.numpy as jnp
from jax import monitoring
seen = []
monitoring.register_event_listener(lambda name, **_: seen.append(name))
assert float(jax.jit(lambda x: jnp.sin(x) + 2.0)(0.0)) == 2.0
print(folder, sum(name.endswith("compilation_cache/cache_hits") for name in seen))
"""


def _run(home, **more):
    """(folder, programs that were read) of one process that compiles a program."""
    dropped = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment |= {"XDG_CACHE_HOME": str(home), "PYTHONWARNINGS": "error", **more}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    folder, hits = done.stdout.split()
    return folder, int(hits)


@pytest.mark.release
@pytest.mark.skipif(sys.platform != "linux", reason="the cache folder is that of XDG")
def test_a_second_command_reads_what_the_first_compiled_and_damage_is_compiled_anew(tmp_path):
    folder, hits = _run(tmp_path)
    assert hits == 0 and folder.startswith(str(tmp_path / "mfopt" / "compiled"))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    again, hits = _run(tmp_path)
    assert again == folder and hits > 0
    for entry in (tmp_path / "mfopt" / "compiled").glob("*/*-cache"):
        damaged = bytearray(entry.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        entry.write_bytes(damaged)
    assert _run(tmp_path) == (folder, 0)
    assert _run(tmp_path, MFOPT_COMPILED="off") == ("None", 0)


def _entry(folder, name, content=b"program", stamp=b"12345678"):
    (folder / f"{name}-cache").write_bytes(content)
    if stamp is not None:
        (folder / f"{name}-atime").write_bytes(stamp)


def test_what_a_killed_process_left_is_removed_and_what_is_whole_is_sealed(tmp_path):
    _entry(tmp_path, "whole")
    _entry(tmp_path, "half", b"prog", stamp=None)
    _entry(tmp_path, "stamped-in-part", stamp=b"123")
    (tmp_path / "left-atime").write_bytes(b"12345678")
    compiled.tidy(tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {".lockfile"}
    assert names == {"whole-cache", "whole-atime", "whole-sha256"}
    compiled.tidy(tmp_path)
    assert (tmp_path / "whole-cache").exists()
    (tmp_path / "whole-cache").write_bytes(b"progrbm")
    compiled.tidy(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {".lockfile"}


def test_nothing_is_touched_while_another_holds_the_lock(tmp_path, monkeypatch):
    import filelock

    monkeypatch.setattr(compiled, "_PATIENCE", 0.0)
    _entry(tmp_path, "half", stamp=None)
    with filelock.FileLock(tmp_path / ".lockfile"):
        compiled.tidy(tmp_path)
        assert (tmp_path / "half-cache").exists()
    compiled.tidy(tmp_path)
    assert not (tmp_path / "half-cache").exists()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As in a process that has not imported JAX."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in list(os.environ):
        if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT")):
            monkeypatch.delenv(name)
    for name in ("DIR", "MAX_SIZE"):  # so that what is set is undone
        monkeypatch.setenv(f"JAX_COMPILATION_CACHE_{name}", "")
        monkeypatch.delenv(f"JAX_COMPILATION_CACHE_{name}")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    monkeypatch.setenv(compiled.VARIABLE, str(tmp_path))
    return tmp_path


def test_a_wide_folder_is_narrowed_and_anothers_is_not_used(fresh, monkeypatch):
    (fresh / "compiled").mkdir(mode=0o777)
    (fresh / "compiled").chmod(0o777)
    folder = compiled.switch_on()
    assert folder is not None and folder.parent == fresh / "compiled"
    assert (fresh / "compiled").stat().st_mode & 0o777 == 0o700
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert int(os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"]) == compiled.MOST_BYTES
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(os, "getuid", lambda: fresh.stat().st_uid + 1)
    assert compiled.switch_on() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ


def _looked():
    """Wait until all that was begun has ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("tidying"):
            thread.join()


def test_jax_waits_for_a_look_at_all_entries_and_the_command_does_not(fresh, monkeypatch):
    import filelock

    folder = compiled.switch_on()
    end, tidied = threading.Event(), compiled.tidy

    def slow(folder, begun):
        tidied(folder, lambda: (begun(), end.wait()))

    monkeypatch.setattr(compiled, "tidy", slow)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    _looked()
    _entry(folder, "half", stamp=None)
    assert compiled.switch_on() == folder and (folder / "half-cache").exists()
    with pytest.raises(filelock.Timeout):
        filelock.FileLock(folder / ".lockfile", timeout=0).acquire()
    end.set()
    with filelock.FileLock(folder / ".lockfile", timeout=10):
        assert not (folder / "half-cache").exists()


def test_without_a_lock_nothing_is_kept(fresh, monkeypatch):
    folder = compiled.switch_on()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    _looked()
    (folder / ".lockfile").unlink(missing_ok=True)
    (folder / ".lockfile").mkdir()
    assert compiled.switch_on() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ


def test_a_link_and_a_file_in_place_of_the_folder_are_not_used(fresh, tmp_path_factory):
    (fresh / "compiled").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert compiled.switch_on() is None
    (fresh / "compiled").unlink()
    (fresh / "compiled").write_text("")
    assert compiled.switch_on() is None


def test_the_host_programs_choice_stays(fresh, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/theirs")
    assert compiled.switch_on() is None and os.environ["JAX_COMPILATION_CACHE_DIR"] == "/theirs"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    import jax

    monkeypatch.setitem(sys.modules, "jax", jax)
    assert compiled.switch_on() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ
