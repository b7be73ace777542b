"""Shared test settings."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))

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

# The collector looks at all that was imported, and at what JAX traces, far more often than it pays:
# with these numbers tests that find their programs compiled take a tenth less.
gc.set_threshold(50_000, 20, 20)

# A worker of several stays on one core: threads of each on all of them would wait for one another.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
if _WORKER and hasattr(os, "sched_setaffinity"):
    _CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CORES[int(_WORKER) % len(_CORES)]})

# Most of the suite's time is compilation, much of it the same from test to test, from worker to
# worker and from run to run. Entries are keyed by the program and the compiler's version.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"mfopt-tests-{os.getuid()}")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

# Files whose programs run for less time than it takes to compile them: without optimization they
# take a fifth to two fifths less. Where many samples are drawn it costs as much.
COMPILED_MORE_THAN_RUN = (
    "test_train_",
    "test_noise_",
    "test_check_",
    "test_jax_loops",
    "test_factorization",
)
BUT_NOT = ("test_noise_draws", "test_factorization_proofs")


@pytest.fixture(autouse=True, scope="module")
def _without_optimization(request: pytest.FixtureRequest):
    """For these files, and the processes that they start: numbers are compared between the two."""
    name = request.path.name
    if not name.startswith(COMPILED_MORE_THAN_RUN) or name.startswith(BUT_NOT):
        yield
        return
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


class _OnlyWithExamples:
    """Modules without an example are not imported to look for one, which takes each worker long.

    A plugin of its own: a conftest's hooks are not asked about files beside its folder.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_collect_file(self, file_path: Path):
        found = yield
        if file_path.suffix == ".py" and ">>> " not in file_path.read_text("utf-8"):
            return [one for one in found if not isinstance(one, DoctestModule)]
        return found


def pytest_collection_finish() -> None:
    """What is there before the first test stays: nobody need look at it again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_OnlyWithExamples())
    os.environ.setdefault("XLA_FLAGS", " ".join(_flags()))


def _flags() -> list[str]:
    """The quick options for all programs, those of the processes that tests start too.

    XLA ends a process that sets a flag which it does not know, and reads them once: a version
    that was not tried gets none.
    """
    from mfopt import _quick

    jaxlib = tuple(map(int, version("jaxlib").split(".")[:2]))
    if not (0, 8) <= jaxlib < (0, 13):
        return []
    return [
        f"--{name}={str(value).lower()}"
        for name, value in _quick.OPTIONS.items()
        if name != "xla_cpu_use_fusion_emitters" or jaxlib < (0, 11)
    ]


@pytest.hookimpl(optionalhook=True)  # without xdist nobody asks
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a test waits for processes, files and the compiler too."""
    return (os.cpu_count() or 1) + 1
