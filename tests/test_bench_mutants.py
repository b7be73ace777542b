"""The mutants are changes of the code as it is: one that no longer applies tests nothing."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BENCHMARK = Path(__file__).parent / "benchmarks" / "bench_mutants.py"


def test_what_a_mutant_changes_stands_once(monkeypatch):
    spec = importlib.util.spec_from_file_location("mutants", BENCHMARK)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutants", bench)
    spec.loader.exec_module(bench)
    every = bench.MUTANTS | {name: mutant for name, (mutant, _) in bench.HARMLESS.items()}
    assert len(every) > 80
    for name, mutant in every.items():
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, name
        assert mutant.after != mutant.before, name
