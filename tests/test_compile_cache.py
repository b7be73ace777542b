"""JAX's compilation cache on the command line: where it is, and when there is none."""

import os
import sys
from unittest import mock

import pytest
from mfopt_cli import compile_cache
from processes import ended

_PROGRAM = """
import sys
from mfopt_cli import compile_cache, main
hits = []
small = "optimize --epochs 1 --iters 2 --eps 2 --strategy sqrt --quiet --force --out small.npz"
try:  # imports JAX
    main.main(["--no-compile-cache"] * ("not" in sys.argv) + small.split())
except SystemExit:
    pass
import jax
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name.endswith("cache_hits")))
assert float(jax.jit(lambda x: jax.numpy.sin(x) + 2.0)(0.0)) == 2.0
print(jax.config.jax_compilation_cache_dir, sum(hits))
"""


def _run(home, *arguments, **extra):
    """(folder, programs that were read) of a process that compiles one after a command."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))
    }
    environment = inherited | {compile_cache.VARIABLE: str(home), **extra}
    done = ended("-c", _PROGRAM, *arguments, env=environment, cwd=home.parent)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    folder, hits = done.stdout.split()
    return folder, int(hits)


@pytest.mark.release
def test_a_second_command_reads_what_the_first_compiled(tmp_path):
    home = tmp_path / "home"
    folder, hits = _run(home)
    assert folder.startswith(str(home / "compiled")) and hits == 0
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert _run(home) == (folder, 1)
    for entry in (home / "compiled").glob("*/*-cache"):
        entry.write_bytes(entry.read_bytes()[:100])
    assert _run(home) == (folder, 0)  # compiled again


@pytest.mark.ci
def test_nothing_is_written_where_a_command_is_told(tmp_path):
    home = tmp_path / "home"
    assert _run(home, "not") == ("None", 0)
    assert not home.exists()


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has not imported JAX, and its folder of cached programs."""
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    settings = {compile_cache.VARIABLE: str(tmp_path)}
    settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1"
    with mock.patch.dict(os.environ, settings):  # what is set meanwhile is undone
        for name in ("COMPILATION_CACHE_DIR", "COMPILATION_CACHE_MAX_SIZE"):
            os.environ.pop(f"JAX_{name}", None)
        yield tmp_path / "compiled"


def test_a_folder_that_others_may_write_to_is_narrowed_and_anothers_is_not_used(fresh, monkeypatch):
    fresh.mkdir()
    fresh.chmod(0o777)
    folder = compile_cache.switch_on()
    assert folder is not None and folder.parent == fresh
    assert fresh.stat().st_mode & 0o777 == 0o700
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert int(os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"]) == compile_cache.MOST_BYTES
    del os.environ["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setattr(os, "getuid", lambda: fresh.stat().st_uid + 1)
    assert compile_cache.switch_on() is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("reason", ["switched off", "imported", "chosen"])
def test_no_cache_is_set_where_another_choice_was_made(reason, fresh, monkeypatch):
    if reason == "imported":
        monkeypatch.setitem(sys.modules, "jax", None)
    else:
        name = compile_cache.VARIABLE if reason == "switched off" else "JAX_COMPILATION_CACHE_DIR"
        os.environ[name] = "off" if reason == "switched off" else "theirs"
    value = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    assert compile_cache.switch_on() is None
    assert os.environ.get("JAX_COMPILATION_CACHE_DIR") == value and not fresh.exists()


def test_a_folder_that_cannot_be_used_is_no_reason_to_fail(fresh, tmp_path_factory):
    fresh.symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert compile_cache.switch_on() is None
    fresh.unlink()
    fresh.write_text("")
    assert compile_cache.switch_on() is None


def test_what_a_killed_process_wrote_in_part_is_removed(fresh):
    folder = compile_cache.switch_on()
    for name in ("half-cache", "whole-cache", "whole-atime"):
        (folder / name).write_bytes(b"12345678")
    os.environ.pop("JAX_COMPILATION_CACHE_DIR")
    assert compile_cache.switch_on() == folder
    assert {path.name for path in folder.iterdir()} == {"whole-cache", "whole-atime"}


@pytest.mark.parametrize(
    ("bins", "chosen", "platforms"),
    [(128, {}, "cpu"), (129, {}, None), (4, {"JAX_PLATFORMS": "x"}, "x")],
)
def test_a_small_search_runs_on_the_cpu_unless_another_device_is_named(bins, chosen, platforms):
    program = "import os, sys; from mfopt_cli.main import cli\ntry: cli()\n"
    program += "finally: print(os.environ.get('JAX_PLATFORMS'), 'jax' in sys.modules)"
    words = f"optimize --epochs 2 --iters {bins} --eps 2 --out /nowhere/x.npz".split()
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = ended("-c", program, *words, env=inherited | chosen)
    assert done.stdout.split()[0] == str(platforms) and done.returncode == 2, done
