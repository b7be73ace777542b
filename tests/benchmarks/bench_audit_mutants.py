"""Random faults in trainer, sampler and noise, each held against ``mfopt audit``.

    python tests/benchmarks/bench_audit_mutants.py --count 20 --seed 0

A seeded mutator changes one statement of the files below in one place: an operator, a comparison, a
number, a truth value or a call. Each change is written into a copy of the package, and the audits
of a correct trainer are run there: the fault is caught if one of them finds anything or fails.
One that survives may be harmless; that is for a reader to judge.
"""

from __future__ import annotations

import ast
import copy
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_mutants import ROOT, Mutant, survives
from harness import Bench, Options

FILES = (
    *(f"mfopt/training/{name}.py" for name in ("batching", "clipping", "ghost", "gradients")),
    *(f"mfopt/training/{name}.py" for name in ("loop", "secrets", "units")),
    *(f"mfopt/sampling/{name}.py" for name in ("_bins", "_generator", "poisson", "sampler")),
    *(f"mfopt/noise/{name}.py" for name in ("_draws", "recursions", "stream")),
)
AUDITS = "tests/test_train_planted.py -k a_correct_trainer_has_none"
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def changes(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Copies of a statement with one change each."""
    for number, node in enumerate(ast.walk(statement)):
        changed = copy.deepcopy(statement)
        twin: Any = list(ast.walk(changed))[number]
        if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPS:
            twin.op = _SWAPS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
            twin.ops[0] = _SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            twin.value = not node.value
        elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            twin.value = node.value + 1
        elif isinstance(node, ast.IfExp):
            twin.body, twin.orelse = twin.orelse, twin.body
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            twin.func, twin.args, twin.keywords = ast.Name("_first", ast.Load()), twin.args, []
        else:
            continue
        yield changed


def mutants(path: str) -> Iterator[tuple[str, Mutant]]:
    """(place and change, mutant) of every change of one file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    simple = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in ast.walk(function):
            before = ast.get_source_segment(text, statement) if statement is not function else None
            if not isinstance(statement, simple) or before is None or text.count(before) != 1:
                continue
            for changed in changes(statement):
                after = ast.unparse(changed).replace("_first(", "(lambda x, *_: x)(")
                name = f"{path}:{statement.lineno} {' '.join(after.split())[:100]}"
                yield name, Mutant(path, before, after, AUDITS)


bench = Bench(
    __file__, __doc__, count=(20, "Faults to plant."), seed=(0, "Of the choice of the faults.")
)
parser, main = bench.parser, bench.main


@bench.work
def caught(options: Options) -> dict[str, Any]:
    """Plant the chosen faults; those that no audit finds are listed."""
    rng = random.Random(options.seed)
    by_file = {path: list(mutants(path)) for path in FILES}
    chosen = [rng.choice(by_file[rng.choice(FILES)]) for _ in range(options.count)]
    alive: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        for part in ("mfopt", "tests", "cli"):
            skipped = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, project / part, ignore=skipped)
        shutil.copy(ROOT / "pyproject.toml", project)
        (project / "docs").mkdir()
        shutil.copy(ROOT / "docs" / "schema.json", project / "docs")  # read by the tests' set-up
        if not survives(Mutant(FILES[0], "", "", AUDITS), project):
            raise SystemExit("the audits find a fault where none is planted")
        for name, mutant in chosen:
            if survives(mutant, project):
                alive.append(name)
            print(f"{'SURVIVES' if name in alive[-1:] else 'caught':9} {name}", flush=True)
    return {"faults": options.count, "caught": options.count - len(alive), "survivors": alive}


if __name__ == "__main__":
    raise SystemExit(main())
