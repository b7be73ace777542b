"""Nobody asks a strategy for its class, but the tables where a class is given its functions."""

import ast
from pathlib import Path

import pytest

from mfopt import strategies

ROOT = Path(__file__).parent.parent
# what finds something by the class of a strategy; a kind may also ask about itself
TABLES = {
    "mfopt/noise/choice.py",
    "mfopt/query_error.py",
    "mfopt/time_scaled_error.py",
    "mfopt/optimize/kinds.py",
    "mfopt/optimize/starts.py",
}
CLASSES = {cls.__name__ for cls in strategies.registered().values()} | {"ToeplitzStrategy"}


def names(node):
    """The last part of every name inside a node."""
    found = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def questions(source):
    """Lines that ask an object for being a strategy of some class."""
    for node in ast.walk(ast.parse(source)):
        asked: set[str] = set()
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            asked = names(node.args[1])
        elif isinstance(node, ast.MatchClass):
            asked = names(node.cls)
        elif isinstance(node, ast.Compare) and "type" in names(node.left):
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
    ],
)
def test_a_question_is_seen(line):
    assert list(questions(line))
    assert not list(questions("isinstance(c, Strategy) or isinstance(n, int)"))


def test_only_the_tables_ask_a_strategy_for_its_class():
    found = []
    for folder in ("mfopt", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name in TABLES or name.startswith("mfopt/strategies/"):
                continue
            found += [f"{name}:{line}" for line in questions(path.read_text())]
    assert not found, "use a method of Strategy or a dispatch table"
