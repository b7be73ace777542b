"""Shared test settings."""

import atexit
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What is compiled is hundreds of thousands of objects that stay: garbage is looked for rarely.
gc.set_threshold(50_000, 50, 50)
_TESTS = Path(__file__).parent
sys.path[:0] = [str(_TESTS), str(_TESTS / "benchmarks")]
sys.path.insert(2, str(_TESTS.parent / "artifacts" / "papers"))

# Compiled modules are kept, also where that is turned off: each worker, and each process that a
# test starts, would compile them all again, which takes seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell starts what runs in the background with these ignored, and processes inherit that: a
# test's Ctrl-C would go unheard.
for _name, _usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if (_number := getattr(signal, _name, None)) and signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _usual)

# no test reads or writes what this user has proved
os.environ["MFOPT_DATA"] = tempfile.mkdtemp(prefix="mfopt-tests-")
atexit.register(shutil.rmtree, os.environ["MFOPT_DATA"], ignore_errors=True)

# A worker of several stays on one core: threads of each on all of them would wait for one another.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if _WORKER and hasattr(os, "sched_setaffinity"):
    _CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CORES[int(_WORKER) % len(_CORES)]})

# Most of the suite's time is compilation, much of it the same from test to test, from worker to
# worker and from run to run. Entries are keyed by the program and the compiler's version; also what
# compiles in milliseconds is kept, as there are thousands of such programs.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"mfopt-tests-{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# Programs of tests run for milliseconds and gain nothing from what the compiler takes a third of
# its time for (``mfopt._runtime._quick`` gives searches the same options). Only where the flags are
# known to exist: a process ends at one that it does not know.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )


class _OnlyWithExamples:
    """Modules without an example are not imported to look for one, which takes each worker long.

    A plugin of its own: a conftest's hooks are not asked about files beside its folder.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path):
        collectors = yield
        if file_path.suffix == ".py" and ">>> " not in file_path.read_text("utf-8"):
            return [
                collector for collector in collectors if not isinstance(collector, DoctestModule)
            ]
        return collectors


@pytest.fixture
def work_folder(tmp_path, monkeypatch):
    """The test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _json_meets_the_schema(monkeypatch):
    """Hold what any test's command prints as JSON against docs/schema.json."""
    if importlib.util.find_spec("jsonschema") is None:  # with the lowest declared versions
        return
    from json_schema import validate
    from mfopt_cli import display

    printed = display.print_json

    def print_json(found):
        if found["command"]:
            validate(found)
        printed(found)

    monkeypatch.setattr(display, "print_json", print_json)


def pytest_configure(config):
    config.pluginmanager.register(_OnlyWithExamples())
