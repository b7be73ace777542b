"""Mutants of accept rules and bounds: each changes one line so that a reported ε or σ could fall.

    mfopt bench mutants --out artifacts/bench-mutants.json
    mfopt bench mutants --random 100 --seed 1 --modules mfopt/accounting

``mutants.txt`` beside this file lists them: ``[file] its tests``, then for each mutant its name,
the tests that should fail (a ``-k`` expression for those of the file, or words for pytest) and
``before  ⇒  after``, with ⏎ for a line break. Each is written into a copy of the package and its
tests run there, those alone: what they kill, the whole suite kills. The exit code is the number of
survivors. A line ``harmless: why`` says why no reported number falls; such a mutant must survive,
so that the reason is looked at again when it no longer does.

``--random`` changes one operator, constant or call in a line drawn from the guarantee code and runs
the tests that import its module. Many of these survivors are equivalent, or only change what a
bound costs (a proposal, a grid, the number of samples), so that they are listed and do not fail.
"""

from __future__ import annotations

import ast
import functools
import os
import random
import re
import resource
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax  # noqa: F401 (for the copies)
import pytest
import scipy.stats  # noqa: F401
from harness import Bench, Options

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.txt")
GUARANTEE = (  # where a random mutant may stand
    "mfopt/accounting",
    "mfopt/calibration",
    "mfopt/factorization",
    "mfopt/sampling",
    "mfopt/guarantee.py",
    "mfopt/mechanism.py",
    "mfopt/noise",
    "mfopt/training/batching.py",
    "mfopt/training/clipping.py",
    "mfopt/training/privacy.py",
    "mfopt/training/verification.py",
)


class Mutant(NamedTuple):
    """A change of a file, the words for pytest that name its tests, and why it may survive."""

    path: str
    before: str
    after: str
    tests: str
    harmless: str = ""
    at: int = -1  # offset in the file; -1: where ``before`` stands, which is one place

    def applied(self, text: str) -> str:
        at = text.index(self.before) if self.at < 0 else self.at
        return text[:at] + self.after + text[at + len(self.before) :]


def listed_mutants() -> dict[str, Mutant]:
    """By name, those of ``mutants.txt``."""
    found: dict[str, Mutant] = {}
    path = tests = name = asked = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            path, tests = line[1:].split("] ")
        elif line.startswith("    harmless: "):
            found[name] = found[name]._replace(harmless=line.removeprefix("    harmless: "))
        elif line.startswith("    "):
            before, after = line[4:].replace("⏎", "\n").split("  ⇒  ")
            words = f"{tests} -k '{asked}'" if asked and "tests/" not in asked else asked or tests
            found[name] = Mutant(path, before, after, words)
        elif line:
            name, _, asked = line.partition(" | ")
    return found


# --- random mutants -------------------------------------------------------------------------------

_SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-",
    ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.Pow: "*", ast.And: "or", ast.Or: "and",
    ast.FloorDiv: "/", ast.Mod: "//",
}  # fmt: skip
_CALLS = {
    "min": "max", "max": "min", "all": "any", "any": "all", "minimum": "maximum", "mean": "max",
    "maximum": "minimum", "floor": "ceil", "ceil": "floor", "sum": "max", "sorted": "list",
    "log": "log1p", "log1p": "log", "exp": "expm1", "expm1": "exp", "sqrt": "abs",
}  # fmt: skip


def _offset(node: ast.expr, starts: list[int], *, end: bool = False) -> int:
    line, column = (node.end_lineno, node.end_col_offset) if end else (node.lineno, node.col_offset)
    return starts[(line or 1) - 1] + (column or 0)


def changes(source: str) -> Iterator[tuple[int, str, str]]:
    """(offset, before, after) of every change of one operator, constant or call.

    Offsets are of UTF-8 bytes, as the parser counts them.
    """
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def operator(left: ast.expr, right: ast.expr, kind: ast.AST) -> Iterator[tuple[int, str, str]]:
        low, high = _offset(left, starts, end=True), _offset(right, starts)
        gap = data[low:high].decode()
        new = _SWAPS.get(type(kind))
        # brackets and comments of either side may stand there too
        found = re.search(r"(?:is not|not in|\b(?:is|in|and|or)\b|[-+*/%<>=!]+)", gap)
        if new and found and "#" not in gap:
            yield low + len(gap[: found.start()].encode()), found[0], new

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from operator(node.left, node.comparators[0], node.ops[0])
        elif isinstance(node, ast.BinOp):
            yield from operator(node.left, node.right, node.op)
        elif isinstance(node, ast.BoolOp):
            yield from operator(node.values[0], node.values[1], node.op)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            word = "-" if isinstance(node.op, ast.USub) else "not "
            yield _offset(node, starts), word, ""
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            at, end = _offset(node, starts), _offset(node, starts, end=True)
            before = data[at:end].decode()
            if isinstance(node.value, bool):
                yield at, before, str(not node.value)
            else:
                yield at, before, f"({before} + 1)" if before.isdigit() else f"(2 * {before})"
        elif isinstance(node, ast.If):
            at, end = _offset(node.test, starts), _offset(node.test, starts, end=True)
            before = data[at:end].decode()
            yield at, before, f"not ({before})"
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name in _CALLS:
                end = _offset(node.func, starts, end=True)
                yield end - len(name), name, _CALLS[name]


@functools.cache
def importers(path: str) -> str:
    """Test files that import a module, or its package where none does."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    tests = sorted((ROOT / "tests").glob("test_*.py"))
    while "." in module:
        package, _, name = module.rpartition(".")
        pattern = re.compile(
            rf"^\s*(?:from {re.escape(module)} import|import {re.escape(module)}\b"
            rf"|from {re.escape(package)} import (?:\([^)]*|[^(\n]*)\b{re.escape(name)}\b)",
            re.MULTILINE,
        )
        found = [p for p in tests if pattern.search(p.read_text(encoding="utf-8"))]
        if found:
            return " ".join(p.relative_to(ROOT).as_posix() for p in found)
        module = package
    return ""


def random_mutants(number: int, seed: int, places: list[str]) -> dict[str, Mutant]:
    """So many changes, drawn evenly from all of them in these files and folders."""
    sites = []
    for place in places:
        path = ROOT / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            source = file.read_text(encoding="utf-8")
            name = file.relative_to(ROOT).as_posix()
            sites += [(name, source, *change) for change in changes(source)]
    rng = random.Random(seed)
    found = {}
    for path, source, at, before, after in rng.sample(sites, min(number, len(sites))):
        at = len(source.encode()[:at].decode())
        line = source.count("\n", 0, at) + 1
        name = f"{path}:{line}:{at}: {' '.join(before.split())} ⇒ {' '.join(after.split())}"
        found[name] = Mutant(path, before, after, importers(path), at=at)
    return found


# --- running --------------------------------------------------------------------------------------


def survives(mutant: Mutant, copy: Path, *, marks: str = "", limit: float = 600.0) -> bool:
    """Whether all its tests pass with this mutant, written into ``copy`` of the project.

    Args:
      mutant: the change.
      copy: a copy of the project.
      marks: for pytest's ``-m``.
      limit: CPU seconds after which a mutant counts as killed.
    """
    source = copy / mutant.path
    text = source.read_text(encoding="utf-8")
    source.write_text(mutant.applied(text), encoding="utf-8")
    options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", marks]
    try:
        code, said = tried([*options, *shlex.split(mutant.tests)], copy, limit)
    finally:
        source.write_text(text, encoding="utf-8")
    if code in (3, 4, 5) and mutant.at < 0:  # no tests, a bad option: no verdict
        raise SystemExit(f"{mutant.tests}: {said[-3000:]}")
    return code in (0, 5)


def tried(words: list[str], copy: Path, limit: float) -> tuple[int, str]:
    """(exit code of pytest on the tests of ``copy``, what it said).

    In a copy of this process, so that JAX and the rest are imported once for all mutants; of the
    project nothing is kept.
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
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        with log.open("wb") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("mfopt", "mfopt_cli"):
                del sys.modules[name]
        os.chdir(copy)
        parts = [str(copy), str(copy / "cli")]
        sys.path[:0], os.environ["PYTHONPATH"] = parts, os.pathsep.join(parts)
        code = int(pytest.main(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


bench = Bench(
    __file__,
    __doc__,
    only=("", "This mutant of the list; its name or a part of several."),
    random=(0, "So many random mutants in place of the list."),
    modules=([*GUARANTEE], "Files and folders that random mutants are drawn from; a list."),
    seed=(0, "Pin the randomness."),
)
parser, main = bench.parser, bench.main


@bench.work
def survived(options: Options) -> tuple[dict[str, Any], int]:
    """Run the chosen mutants; the exit code is that of survivors that should have been killed."""
    chosen = {name: one for name, one in listed_mutants().items() if options.only in name}
    if options.random:
        chosen = random_mutants(options.random, options.seed, options.modules)
    elif not chosen:
        raise SystemExit(f"--only {options.only}: no mutant has that in its name")
    alive: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        skipped = shutil.ignore_patterns("__pycache__")
        for part in ("mfopt", "tests", "cli"):
            shutil.copytree(ROOT / part, copy / part, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", copy)
        for name, mutant in chosen.items():  # before the first is run
            times = (copy / mutant.path).read_text(encoding="utf-8").count(mutant.before)
            if mutant.at < 0 and times != 1:
                raise SystemExit(f"{name}: {mutant.before!r} stands {times} times in {mutant.path}")
        marks = "not ci and not release" if options.random else ""
        for name, mutant in chosen.items():
            if survives(mutant, copy, marks=marks, limit=120 if options.random else 600):
                alive.append(name)
            print(f"{'SURVIVES' if name in alive[-1:] else 'killed':9} {name}", flush=True)
    harmless = {name: mutant.harmless for name, mutant in chosen.items() if mutant.harmless}
    left = [name for name in chosen if (name in alive) != (name in harmless)]
    facts = {
        "mutants": len(chosen),
        "killed": len(chosen) - len(alive),
        "survivors": left,
        "harmless": harmless,
    }
    if options.random:
        facts["by module"] = {
            path: [sum(name.startswith(path + ":") for name in names) for names in (chosen, alive)]
            for path in sorted({mutant.path for mutant in chosen.values()})
        }
    return facts, 0 if options.random else len(left)
