"""A sample of the benchmark that damages files; the hours are in tests/benchmarks/bench_fuzz.py."""

from collections import Counter

import bench_fuzz as fuzz
import pytest


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return fuzz.targets(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.ci
def test_damaged_files_are_refused_or_load_as_they_were(reference):
    counts = Counter()
    for number, target in enumerate(reference):
        for variant in fuzz.WAYS:
            fuzz.attack(target, variant, counts, examples=10, number=number)
    assert sum(counts.values()) >= 120
    for variant in fuzz.WAYS:  # every way leaves some files that are refused
        assert any(variant.__name__ in key and "refused" in key for key in counts)


def test_the_attack_can_see_a_change(reference):
    # control: another good file in the place of the first
    with pytest.raises(fuzz.Broken, match="other contents"):
        reference[0].check(reference[1].data)
