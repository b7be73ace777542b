"""Nobody asks a strategy, scheme or workload for its class, but tables that give it functions."""

import re

import pytest
from sources import FILES, ROOT

from mfopt import sampling, strategies, workloads

# what finds something by the class of a strategy; kinds and schemes may ask about themselves
TABLES = {
    "mfopt/noise/choice.py",
    "mfopt/query_error.py",
    "mfopt/optimize/kinds.py",
    "mfopt/optimize/starts.py",
    "mfopt/training/attack.py",  # what tells two data sets apart, by scheme
    # the same for accounts: what two data sets attain
    "mfopt/accounting/attained.py",
    "mfopt/accounting/loss_distribution/poisson.py",
}
CLASSES = {
    *(cls.__name__ for cls in strategies.registered().values()),
    "ToeplitzStrategy",
    *(cls.__name__ for cls in sampling.registered().values()),
    *(cls.__name__ for cls in workloads.Workload.__subclasses__()),
}
OWN = ("mfopt/strategies/", "mfopt/sampling/", "mfopt/workloads.py")


ASKED = re.compile(
    r"is(?:instance|subclass)\(.+?, [^()]*?\b(?:{0})\b|\bcase (?:\w+\.)*(?:{0})\("
    r"|\b(?:kind|type\([^()]+\)) (?:is|==|!=|in|is not) [^:\n]*?\b(?:{0})\b".format(
        "|".join(CLASSES)
    )
)


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(c, BLT)",
        "isinstance(c, strategies.Tree | Dense)",
        "type(c) is Toeplitz",
        "issubclass(k, ToeplitzStrategy)",
        "match c:\n  case S.BLT(): pass",
        "scheme.kind != sampling.BallsInBins.kind",
        "type(self.scheme) is Poisson",
        "isinstance(workload, PrefixSums)",
    ],
)
def test_a_question_is_seen(line):
    assert ASKED.search(line)
    assert not ASKED.search("isinstance(c, Strategy) or isinstance(n, int)")


def test_only_the_tables_ask_for_a_class():
    collected = []
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name not in TABLES and not name.startswith(OWN):
            text = path.read_text()
            lines = (text.count("\n", 0, match.start()) + 1 for match in ASKED.finditer(text))
            collected += [f"{name}:{line}" for line in lines]
    assert not collected, "use a method or a dispatch table"
