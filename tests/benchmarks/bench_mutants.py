"""Mutants of accept rules and bounds: each changes one line so that a reported ε or σ could fall.

    python tests/benchmarks/bench_mutants.py --out artifacts/bench-mutants.json

``mutants.txt`` beside this file lists them: ``[file] its tests``, then for each mutant its name,
the tests that should fail (a ``-k`` expression for those of the file, or words for pytest) and
``before  ⇒  after``, with ⏎ for a line break. Each is written into a copy of the package and its
tests run there, those alone: what they kill, the whole suite kills. The exit code is the number of
survivors. A line ``harmless: why`` says why no reported number falls; such a mutant must survive,
so that the reason is looked at again when it no longer does.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import jax  # noqa: F401 (for the copies)
import pytest
import scipy.stats  # noqa: F401
from harness import Bench

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
LONGEST = 600  # CPU seconds after which a mutant counts as killed


class Mutant(NamedTuple):
    """A change of a file, the words for pytest that name its tests, and why it may survive."""

    path: str
    before: str
    after: str
    tests: str
    harmless: str = ""


def listed_mutants():
    """By name, those of ``mutants.txt``."""
    collected = {}
    path = tests = name = selection = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            path, tests = line[1:].split("] ")
        elif line.startswith("    harmless: "):
            collected[name] = collected[name]._replace(harmless=line.removeprefix("    harmless: "))
        elif line.startswith("    "):
            original, updated = line[4:].replace("⏎", "\n").split("  ⇒  ")
            words = (
                f"{tests} -k '{selection}'"
                if selection and "tests/" not in selection
                else selection or tests
            )
            collected[name] = Mutant(path, original, updated, words)
        elif line:
            name, _, selection = line.partition(" | ")
    return collected


# --- running --------------------------------------------------------------------------------------


def survives(mutant, copy):
    """Whether all its tests pass with this mutant, written into ``copy`` of the project."""
    source = copy / mutant.path
    text = source.read_text(encoding="utf-8")
    source.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", ""]
    try:
        words = [*options, *shlex.split(mutant.tests)]
        code, said = forked(lambda: int(pytest.main(words)), copy)
    finally:
        source.write_text(text, encoding="utf-8")
    if code in (3, 4, 5):  # no tests, a bad option: no verdict
        raise SystemExit(f"{mutant.tests}: {said[-3000:]}")
    return code == 0


def copied(folder):
    """``folder`` with a copy of what the tests need of the project."""
    for part in ("artifacts", "cli", "docs", "mfopt", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for page in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / page, folder)
    return folder


def forked(work, copy):
    """(exit code that ``work`` returns, 70 where it raises; what it said).

    It is done in a copy of this process, so that JAX and the rest are imported once for all
    mutants, with the package and the tests of ``copy``; of the project nothing is kept.
    """
    log = copy / "log"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX: no device is in use, so no thread is lost
        pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (LONGEST, LONGEST + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("mfopt", "mfopt_cli"):
                del sys.modules[name]
        os.chdir(copy)
        parts = [str(copy), str(copy / "cli")]
        os.environ["PYTHONPATH"] = os.pathsep.join(parts)
        sys.path[:0] = [*parts, str(copy / "tests")]
        code = int(work() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


bench = Bench(
    __file__, __doc__, only=("", "This mutant of the list; its name or a part of several.")
)


@bench.work
def survived(options):
    """Run the chosen mutants; the exit code is that of survivors that should have been killed."""
    chosen = {name: mutant for name, mutant in listed_mutants().items() if options.only in name}
    if not chosen:
        raise SystemExit(f"--only {options.only}: no mutant has that in its name")
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for name, mutant in chosen.items():  # before the first is run
            times = (copy / mutant.path).read_text(encoding="utf-8").count(mutant.before)
            if times != 1:
                raise SystemExit(f"{name}: {mutant.before!r} stands {times} times in {mutant.path}")
        for name, mutant in chosen.items():
            if survives(mutant, copy):
                alive.append(name)
            print(f"{'SURVIVES' if name in alive[-1:] else 'killed':9} {name}", flush=True)
    harmless = {name: mutant.harmless for name, mutant in chosen.items() if mutant.harmless}
    remainder = [name for name in chosen if (name in alive) != (name in harmless)]
    facts = {
        "mutants": len(chosen),
        "killed": len(chosen) - len(alive),
        "survivors": remainder,
        "harmless": harmless,
    }
    return facts, len(remainder)


if __name__ == "__main__":
    bench.main()
