"""Docstrings: parameters are explained, and what is used most has an example that runs."""

import ast
import doctest
import importlib
import re

import pytest
from sources import FILES, ROOT, parsed

MANY = 4  # parameters, from which on each is explained
SECTION = re.compile(r"\n *(?:Args|Returns|Raises|Yields|Attributes):\n")

# name -> where
MOST_USED = {
    "load": "mfopt.factorization",
    "factorize": "mfopt.optimize",
    "optimize": "mfopt.optimize",
    "account": "mfopt.accounting",
    "release": "mfopt.calibration",
    "certify": "mfopt.calibration",
    "NoiseStream": "mfopt.noise",
    "from_factorization": "mfopt.noise",
    "BallsInBins": "mfopt.sampling",
    "rmse": "mfopt.query_error",
}


def public_functions(tree):
    """(qualified name, function, parameters) of every public function and method."""

    def walk(body, prefix=""):
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                args = node.args
                actual = [p.arg for p in args.posonlyargs + args.args + args.kwonlyargs]
                if prefix and actual[:1] in (["self"], ["cls"]):
                    actual = actual[1:]
                yield prefix + node.name, node, actual

    return walk(tree.body)


def explained(docstring):
    """Names that the section ``Args`` explains."""
    _, _, section = docstring.partition("Args:\n")
    section = SECTION.split("\n" + section)[0]
    lines = [re.match(r" {2,4}([\w*, ]+): \S", line) for line in section.splitlines()]
    return {name for line in lines if line for name in re.findall(r"\w+", line[1])}


def unexplained(tree, documented):
    """(name, parameters without a text) of a module; methods may be explained where they are
    first declared, ``documented``."""
    for name, node, parameters in public_functions(tree):
        # the options of a command have help texts
        command = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
        if len(parameters) < MANY or command:
            continue
        docstring = ast.get_docstring(node)
        if docstring is None and "." in name and node.name in documented:
            continue
        missing = [p for p in parameters if p not in explained(docstring or "")]
        if missing:
            yield name, missing


def public_modules():
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in parts):
            yield path.relative_to(ROOT).as_posix(), parsed(path)


def test_parameters_are_explained_where_there_are_many():
    documented = {
        node.name
        for _, tree in public_modules()
        for name, node, parameters in public_functions(tree)
        if "." in name
        and len(parameters) >= MANY
        and set(parameters) <= explained(ast.get_docstring(node) or "")
    }
    actual = [
        f"{path}: {name}: {', '.join(missing)}"
        for path, tree in public_modules()
        for name, missing in unexplained(tree, documented)
    ]
    assert not actual, "\n".join(["no text in an Args section:", *actual])


def test_what_the_rule_sees():
    tree = ast.parse('''
def f(a, b, *, c, d=1):
    """Does.

    Args:
      a, b: numbers.
      c: a longer text
        that goes on: here.

    Returns:
      d: nothing.
    """
class K:
    def g(self, a, b, c, d): ...
    def h(self, a, b, c): ...
''')
    assert dict(unexplained(tree, set())) == {"f": ["d"], "K.g": ["a", "b", "c", "d"]}
    assert dict(unexplained(tree, {"g"})) == {"f": ["d"]}


@pytest.mark.parametrize("name", MOST_USED)
def test_the_most_used_have_an_example_that_runs(name):
    value = getattr(importlib.import_module(MOST_USED[name]), name)
    home = importlib.import_module(value.__module__)
    collected = doctest.DocTestFinder(exclude_empty=True).find(home)
    if f"{home.__name__}.{name}" in {example.name for example in collected if example.examples}:
        return  # pytest runs it (addopts in pyproject.toml)
    # by hand: doctest does not look behind decorators
    example = doctest.DocTestParser().get_doctest(value.__doc__, dict(vars(home)), name, None, 0)
    assert example.examples
    assert doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example).failed == 0


# --- how docstrings begin ------------------------------------------------------------------------

# pronouns, prepositions, question words, conjunctions and determiners without a noun of their own
OPENERS = re.compile(
    "of|what|whether|its?|this|that|these|those|they|their|where|how|which|whose|who|when|why|if|as"
    "|in|for|with|by|from|at|to|on|under|after|before|here|there|while|because|than|so|until|both"
    "|only|no|not|none|all|such|each|every"
)


def begins_with_an_opener(text):
    return bool(OPENERS.fullmatch(re.match(r"\W*([A-Za-z']*)", text)[1].lower()))
