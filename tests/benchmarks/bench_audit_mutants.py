"""Random faults in trainer, sampler and noise, each held against ``mfopt audit``.

    python tests/benchmarks/bench_audit_mutants.py --count 20 --seed 0 --out FILE

It stops after ``--minutes``. Run again, it keeps the results in FILE whose change can still be
made, on whatever line, and continues.

A seeded mutator changes one statement of the files below in one place: an operator, a comparison, a
number, a truth value or a call. Each change is written into a copy of the package, and two runs are
audited there: user-level sampling in bins with correlated noise, and record-level Poisson sampling.

Only faults count. A statement is changed if those audits execute it (its line is seen by
``sys.monitoring``). It is caught if an audit finds anything, and survives if none does although the
runs, under the same secrets, draw other batches or release other numbers. What raises an error,
what changes nothing, what changes releases by no more than rounding (``ROUNDING`` of the largest
number of a release), and what ``HARMLESS`` argues to keep the distribution of all that is drawn is
listed apart, and another change is drawn.
"""

import ast
import copy
import json
import pickle
import random
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import bench_mutants
import jax
import numpy as np
from bench_mutants import ROOT, copied, forked
from harness import Bench

FILES = (
    *(f"mfopt/training/{name}.py" for name in ("clipping", "gradients", "loop")),
    *(f"mfopt/training/{name}.py" for name in ("secrets", "units")),
    *(f"mfopt/sampling/{name}.py" for name in ("_generator", "base", "poisson", "sampler")),
    *(f"mfopt/noise/{name}.py" for name in ("_draws", "recursions", "stream")),
)
CANARIES, SEED = 200, 1
bench_mutants.LONGEST = 150  # CPU seconds: of a change that ends later an error is told
ROUNDING = 1e-5
# changes that keep every distribution, and why: (file, changed statement) without its line
HARMLESS = {
    (
        "mfopt/sampling/_generator.py",
        "purpose = _STEP if step is None else _ASSIGNMENT",
    ): "assignment and steps exchange their words of the counter; the streams stay disjoint",
    (
        "mfopt/sampling/_generator.py",
        "counter = np.array([1, 0, purpose, step or 0], dtype=np.uint64)",
    ): "each stream begins one block later; it is 2^128 blocks long",
    (
        "mfopt/sampling/_generator.py",
        "counter = np.array([0, 1, purpose, step or 0], dtype=np.uint64)",
    ): "each stream begins 2^64 blocks later; it is 2^128 blocks long",
    (
        "mfopt/sampling/base.py",
        "bins = self.assign(population, generator(seed, (lambda x, *_: x)(throw)))",
    ): "balls-in-bins assigns by the stream of step 0, from which nothing else is drawn",
    (
        "mfopt/training/secrets.py",
        "x = x - GOLDEN",
    ): "SplitMix64 counts by another odd number; what follows mixes either alike",
}
# settings of the audited runs, by the name of their factorization file
RUNS = {
    "user": {"algorithm": "uls"},
    "record": {"algorithm": "els", "privacy_unit": "record"},
}
_SWAPS = {
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


def changes(statement):
    """Copies of a statement with one change each."""
    for number, node in enumerate(ast.walk(statement)):
        changed = copy.deepcopy(statement)
        twin = list(ast.walk(changed))[number]
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


def mutants(path, executed=None):
    """(place and change, statement, changed statement) of one file.

    Args:
      path, executed: the file, and lines on which statements begin that are changed; None: on all.
    """
    text = (ROOT / path).read_text(encoding="utf-8")
    simple = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Return
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for statement in ast.walk(function):
            if not isinstance(statement, simple):
                continue
            if executed is not None and statement.lineno not in executed:
                continue
            original = ast.get_source_segment(text, statement)
            if original is None or text.count(original) != 1:
                continue
            for changed in changes(statement):
                variant = ast.unparse(changed).replace("_first(", "(lambda x, *_: x)(")
                yield (
                    f"{path}:{statement.lineno} {' '.join(variant.split())[:100]}",
                    original,
                    variant,
                )


def audited(folder):
    """Audit the runs with the package that is imported, until anything is found; 1 if it is.

    Writes all batches and releases, and the names of the findings, to ``folder``.
    """
    from train_fixtures import layered_model

    import mfopt
    from mfopt.training.audit import audit
    from mfopt.training.config import TrainConfig
    from mfopt.training.loop import Trainer

    steps, collected = [], []
    run = Trainer.run

    def watched(trainer, *arguments):
        for result in run(trainer, *arguments):
            leaves = jax.tree.leaves(jax.device_get(result.release))
            units = result.batch
            steps.extend([units[units >= 0], *leaves])
            yield result

    Trainer.run = watched
    sizes = {"records_per_user": 3, "length": 8, "microbatch": 2}
    options = {"canaries": CANARIES, "seed": SEED, "model": layered_model()}
    for name, changed in RUNS.items():
        settings = TrainConfig(factorization="(an account)", **sizes, **changed)
        result = audit(mfopt.load(folder / f"{name}.npz"), settings, **options)
        collected += [finding.name for finding in result.sampling if finding.fault]
        if collected:
            break
    with (folder / "steps.pickle").open("wb") as stream:
        pickle.dump(steps, stream)
    (folder / "found.json").write_text(json.dumps(collected))
    return 1 if collected else 0


def change(original, updated):
    """What happened to batches and releases: "same", "rounding" or "survived"."""
    if [x.shape for x in original] != [x.shape for x in updated]:
        return "survived"
    pairs = list(zip(original, updated, strict=True))
    if all(np.array_equal(a, b) for a, b in pairs):
        return "same"
    alike = (
        np.allclose(a, b, rtol=0, atol=0 if a.dtype.kind == "i" else ROUNDING * np.abs(a).max())
        for a, b in pairs
    )
    return "rounding" if all(alike) else "survived"


def executed_lines(project, folder):
    """Lines of ``FILES`` that the audits of the unchanged copy execute."""

    def watched():
        lines = defaultdict(set)
        tool = sys.monitoring.COVERAGE_ID
        sys.monitoring.use_tool_id(tool, "executed lines")

        def line(code, number):
            lines[code.co_filename].add(number)
            return sys.monitoring.DISABLE

        sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, line)
        sys.monitoring.set_events(tool, sys.monitoring.events.LINE)
        code = audited(folder)
        sys.monitoring.set_events(tool, 0)
        recorded = {path: sorted(lines[str(project / path)]) for path in FILES}
        (folder / "lines.json").write_text(json.dumps(recorded))
        return code

    code, said = forked(watched, project)
    if code:
        raise SystemExit(f"the audits find a fault where none is planted\n{said[-3000:]}")
    parsed = json.loads((folder / "lines.json").read_text())
    return {path: set(numbers) for path, numbers in parsed.items()}


def anywhere(name):
    """The name of a change without the number of its line."""
    return re.sub(r":\d+ ", " ", name, count=1)


def is_of(entry, name):
    """True for an entry, which may end with a reason, about the change ``name``, on any line."""
    return f"{anywhere(entry)}: ".startswith(f"{name}: ")


def save_accounts(folder):
    """The factorization files of the audited runs."""
    from mfopt import sampling, strategies
    from mfopt.mechanism import Mechanism
    from mfopt.training.privacy import solved

    blt = strategies.BLT([0.3], [0.7])
    user = Mechanism(sampling.BallsInBins(4, 3), blt, privacy_unit="user")
    record = Mechanism(sampling.Poisson(0.2, 12), privacy_unit="record")
    for name, mechanism in (("user", user), ("record", record)):
        solved(mechanism, 3.0, 1e-5).save(folder / f"{name}.npz")


bench = Bench(
    __file__,
    __doc__,
    count=(20, "Faults to plant."),
    seed=(0, "Of the choice of the faults."),
    minutes=(10, "No fault is planted after so many."),
)


@bench.work
def caught(options):
    """Plant faults until there are as many as asked for; those that no audit finds are listed."""
    rng = random.Random(options.seed)
    kinds = ("caught", "survived", "harmless", "rounding", "same", "error")
    nothing = {"seed": options.seed, **{name: [] for name in kinds}}
    report = bench.earlier(nothing, "seed") | {"faults": options.count}
    outcomes = {name: report[name] for name in kinds}
    with tempfile.TemporaryDirectory() as index:
        project = copied(Path(index).resolve())
        folder = project / "audits"
        folder.mkdir()
        code, said = forked(lambda: save_accounts(folder), project)
        if code:
            raise SystemExit(said[-3000:])
        lines = executed_lines(project, folder)
        steps = pickle.loads((folder / "steps.pickle").read_bytes())
        by_file = {path: list(mutants(path, lines[path])) for path in FILES}
        possible = {anywhere(name) for planted in by_file.values() for name, *_ in planted}
        drawn = set()
        for entries in outcomes.values():
            changed = [(x, y) for x in entries for y in possible if is_of(x, y)]
            entries[:] = [entry for entry, _ in changed]
            drawn |= {name for _, name in changed}
        while len(outcomes["caught"]) + len(outcomes["survived"]) < options.count:
            if time.perf_counter() > bench.begun + 60 * options.minutes:
                break
            path = rng.choice([path for path in FILES if by_file[path]])
            name, original, updated = rng.choice(by_file[path])
            if anywhere(name) in drawn:
                continue
            drawn.add(anywhere(name))
            source = project / path
            text = source.read_text(encoding="utf-8")
            source.write_text(text.replace(original, updated), encoding="utf-8")
            (folder / "found.json").unlink(missing_ok=True)
            try:
                code, said = forked(lambda: audited(folder), project)
            finally:
                source.write_text(text, encoding="utf-8")
            outcome, why = "error", said.strip().rpartition("\n")[2][:100]
            if (folder / "found.json").is_file():
                parsed = json.loads((folder / "found.json").read_text())
                outcome, why = "caught", ", ".join(parsed[:3])
                if not parsed:
                    outcome = change(steps, pickle.loads((folder / "steps.pickle").read_bytes()))
            place, _, variant = name.partition(" ")
            if outcome == "survived" and (place.partition(":")[0], variant) in HARMLESS:
                outcome, why = "harmless", HARMLESS[place.partition(":")[0], variant]
            outcomes[outcome].append(f"{name}: {why}" if why else name)
            print(f"{outcome:9} {outcomes[outcome][-1]}", flush=True)
            # not bench.keep: it asks JAX for the device, whose threads would hold locks at a fork
            if options.out is not None:
                options.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    return report


if __name__ == "__main__":
    bench.main()
