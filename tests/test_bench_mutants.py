"""The mutants are changes of the code as it is: one that no longer applies tests nothing."""

import ast
from pathlib import Path

import bench_mutants as bench

ROOT = Path(__file__).parent.parent


def test_what_a_mutant_changes_stands_once():
    every = bench.listed_mutants()
    assert len(every) > 100
    for name, mutant in every.items():
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, name
        assert mutant.after != mutant.before, name


def test_random_mutants_are_pinned_by_their_seed_and_change_one_place():
    places = ["mfopt/sampling", "mfopt/training/batching.py"]
    every = bench.random_mutants(10**6, 0, places)
    assert len(every) > 200
    chosen = bench.random_mutants(20, 1, places)
    assert chosen == bench.random_mutants(20, 1, places) != bench.random_mutants(20, 2, places)
    assert chosen.items() <= every.items()
    for name, mutant in every.items():
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        changed = mutant.applied(text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), name
        assert all(path.startswith("tests/test_") for path in mutant.tests.split())
    of_batching = [mutant for mutant in every.values() if mutant.path.endswith("batching.py")]
    assert of_batching
    assert all("tests/test_train_batching.py" in mutant.tests for mutant in of_batching)


def test_every_operator_constant_and_call_can_be_changed():
    source = "def f(é, b):\n    if not é < b and 2 * b == 0.5:\n        return -max(b, 1)\n"
    found = {(before, after) for _, before, after in bench.changes(source)}
    assert found == {
        ("not ", ""), ("<", "<="), ("and", "or"), ("*", "/"), ("==", "!="), ("-", ""),
        ("max", "min"), ("2", "(2 + 1)"), ("1", "(1 + 1)"), ("0.5", "(2 * 0.5)"),
        ("not é < b and 2 * b == 0.5", "not (not é < b and 2 * b == 0.5)"),
    }  # fmt: skip
