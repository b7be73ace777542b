"""The mutants are changes of the code as it is: one that no longer applies tests nothing."""

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
