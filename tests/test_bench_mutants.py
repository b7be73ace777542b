"""The mutants are changes of the code as it is: one that no longer applies tests nothing."""

import re
import shlex
from pathlib import Path

import bench_mutants as bench
from sources import ROOT


def test_what_a_mutant_changes_stands_once_and_its_tests_exist():
    mutants = bench.listed_mutants()
    assert len(mutants) > 100
    for name, mutant in mutants.items():
        text = (ROOT / mutant.path).read_text(encoding="utf-8")
        assert text.count(mutant.before) == 1, name
        assert mutant.after != mutant.before, name
        words = shlex.split(mutant.tests)
        files = [ROOT / word for word in words if word.endswith(".py")]
        text = "".join(map(Path.read_text, files))
        tests = re.findall(r"def (test_\w+)|^class (\w+)", text, re.M)
        for selection in words[words.index("-k") + 1].split(" or ") if "-k" in words else ():
            for word in selection.split(" and not "):
                assert any(word in test_name for pair in tests for test_name in pair), (
                    f"{name}: {word}"
                )
