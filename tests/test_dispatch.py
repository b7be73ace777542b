"""Nobody asks a strategy, scheme or workload for its class, but tables that give it functions."""

import ast
from pathlib import Path

import pytest

from mfopt import sampling, strategies, workloads

ROOT = Path(__file__).parent.parent
# what finds something by the class of a strategy; kinds and schemes may ask about themselves
TABLES = {
    "mfopt/noise/choice.py",
    "mfopt/query_error.py",
    "mfopt/time_scaled_error.py",
    "mfopt/optimize/kinds.py",
    "mfopt/optimize/starts.py",
}
CLASSES = {
    *(cls.__name__ for cls in strategies.registered().values()),
    "ToeplitzStrategy",
    *(cls.__name__ for cls in sampling.registered().values()),
    *(cls.__name__ for cls in workloads.Workload.__subclasses__()),
}
OWN = ("mfopt/strategies/", "mfopt/sampling/", "mfopt/workloads.py")


def names(node):
    """The last part of every name inside a node."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def questions(source):
    """Lines that ask an object for being of some class."""
    if not any(name in source for name in CLASSES):
        return
    for node in ast.walk(ast.parse(source)):
        asked: set[str] = set()
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            asked = names(node.args[1])
        elif isinstance(node, ast.MatchClass):
            asked = names(node.cls)
        elif isinstance(node, ast.Compare) and names(node.left) & {"type", "kind"}:
            asked = set().union(*(names(c) for c in node.comparators))
        if asked & CLASSES:
            yield node.lineno if hasattr(node, "lineno") else node.cls.lineno


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
    assert list(questions(line))
    assert not list(questions("isinstance(c, Strategy) or isinstance(n, int)"))


def test_only_the_tables_ask_for_a_class():
    found = []
    for folder in ("mfopt", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name in TABLES or name.startswith(OWN):
                continue
            found += [f"{name}:{line}" for line in questions(path.read_text())]
    assert not found, "use a method or a dispatch table"
