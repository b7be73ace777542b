"""A sample of the benchmark that damages files; the hours are in tests/benchmarks/bench_fuzz.py."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "benchmarks" / "bench_fuzz.py"


@pytest.fixture(scope="module")
def fuzz():
    spec = importlib.util.spec_from_file_location("bench_fuzz", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known(fuzz, tmp_path_factory):
    return fuzz.targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.release
def test_damaged_files_are_refused_or_load_as_they_were(fuzz, known):
    counts = Counter()
    for number, target in enumerate(known):
        for way in fuzz.WAYS:
            fuzz.attack(target, way, counts, examples=25, number=number)
    assert sum(counts.values()) >= 300
    for way in fuzz.WAYS:  # every way leaves some files that are refused
        assert any(way.__name__ in key and "refused" in key for key in counts)


def test_the_attack_can_see_a_change(fuzz, known):
    # control: another good file in the place of the first
    with pytest.raises(fuzz.Broken, match="other contents"):
        known[0].check(known[1].data)
