"""Random one-line changes of guarantee code, each held against the tests of its file.

    python tests/benchmarks/bench_random_mutants.py --count 200 --seed 0

The files are those of ``mutants.txt``, each with the tests that stand beside it there, without
what waits for a release; what these do not kill is held against the tests of all files of the list.
A seeded draw takes a file, a statement of one of its functions and a change of it
(:func:`bench_audit_mutants.mutants`). Survivors are listed: equivalent changes and those of
estimates and plans are among them, which is for a reader to judge, so the target is a share, 80%.
"""

import random
import tempfile
from pathlib import Path

from bench_audit_mutants import mutants
from bench_mutants import LIST, Mutant, copied, survives
from harness import Bench


def tests_of_files():
    """Words for pytest that name the tests of each file of ``mutants.txt``."""
    tests = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            path, words = line[1:].split("] ")
            tests[path] = f"{words} {tests.get(path, '')}".strip()
    return tests


bench = Bench(
    __file__, __doc__, count=(200, "Changes to draw."), seed=(0, "Of the choice of the changes.")
)


@bench.work
def killed(options):
    """Run the tests with each drawn change; those that pass them all are listed."""
    rng, tests = random.Random(options.seed), tests_of_files()
    by_file = {path: list(mutants(path)) for path in tests}
    every_test = " ".join(dict.fromkeys(" ".join(tests.values()).split()))
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        project = copied(Path(folder))
        unchanged = Mutant("mfopt/__init__.py", "", "", f"{every_test} -m 'not release'")
        if not survives(unchanged, project):
            raise SystemExit("the tests fail where nothing is changed")
        for _ in range(options.count):
            path = rng.choice(list(by_file))
            name, *change = rng.choice(by_file[path])
            words = (f"{names} -m 'not release'" for names in (tests[path], every_test))
            if all(survives(Mutant(path, *change, one_round), project) for one_round in words):
                alive.append(name)
            print(f"{'SURVIVES' if name in alive[-1:] else 'killed':9} {name}", flush=True)
    share = 1 - len(alive) / options.count
    return {"mutants": options.count, "killed share": share, "survivors": alive}


if __name__ == "__main__":
    bench.main()
