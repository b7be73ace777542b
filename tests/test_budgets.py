"""Budgets: the most that the code may weigh. To raise a number, say why in the commit.

Weight is counted in syntax nodes without docstrings, which layout cannot change. The main job is
``factorize`` of the default strategy, in a fresh process: what its calls run, seen by a profiler.
"""

import ast
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from processes import python

ROOT = Path(__file__).parent.parent
HOME = str(ROOT / "mfopt")

# room -> syntax nodes at most; the longest name that fits counts a file
NODES = {
    "mfopt": 10_815,
    "mfopt/_runtime": 7_975,
    "mfopt/accounting": 108_720,
    "mfopt/calibration": 310,
    "mfopt/experiments": 16_525,
    "mfopt/factorization": 4_370,
    "mfopt/jax": 4_835,
    "mfopt/noise": 29_240,
    "mfopt/optimize": 26_430,
    "mfopt/sampling": 7_430,
    "mfopt/strategies": 14_965,
    "mfopt/testing": 9_590,
    "mfopt/torch": 18_244,
    "mfopt/training": 60_000,
    "cli": 27_475,
    "tests": 292_515,
}
PUBLIC_NAMES = 1040  # functions and classes of mfopt and cli
WIDE_FUNCTIONS = 14  # with more than 6 parameters
# of the main job
MAIN_JOB = {
    "files": 59,
    "functions": 476,
    "lines": 3_040,  # that can run, of the functions that do
    "classes": 45,
    "two-way pairs": 16,  # of files that call each other
    "frames": 25,
}
DUPLICATES = 2  # functions of at least 6 lines whose body, names aside, is another's


def room(path):
    """Entry of NODES that counts this file, a path relative to the root."""
    fitting = [name for name in NODES if path.as_posix().startswith(f"{name}/")]
    return max(fitting, key=len)


def sources():
    for top in ("mfopt", "cli", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def without_docstrings(tree):
    for node in ast.walk(tree):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return tree


def weight(text):
    """Syntax nodes of a source text, docstrings aside."""
    return sum(1 for _ in ast.walk(without_docstrings(ast.parse(text))))


def test_no_room_outgrows_its_budget():
    nodes = Counter()
    for path, text in sources():
        nodes[room(path)] += weight(text)
    over = {name: (count, NODES[name]) for name, count in nodes.items() if count > NODES[name]}
    assert not over, f"(nodes, budget): {over}"
    # a budget far above what is there is none: lower it where code was taken out
    loose = {name: (nodes[name], most) for name, most in NODES.items() if most > 1.02 * nodes[name]}
    assert not loose, f"(nodes, budget): {loose}"
    # a control: layout and docstrings weigh nothing
    assert weight('def f(a):\n    """Text."""\n    return (\n        a\n    )\n') == weight(
        "def f(a):\n    return a\n"
    )


def test_few_names_are_public_and_few_functions_are_wide():
    names, wide = 0, 0
    for path, text in sources():
        if path.parts[0] == "tests":
            continue
        tree = ast.parse(text)
        named = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        names += sum(not node.name.startswith("_") for node in named)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                wide += sum(arg.arg not in ("self", "cls") for arg in every) > 6
    assert 0 < names <= PUBLIC_NAMES and 0 < wide <= WIDE_FUNCTIONS, (names, wide)


def shape(function):
    """Body of a function without its docstring, with all names and constants alike."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    tree = ast.Module(body, [])  # what lies within it has the same shape afterwards
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr", "value" if isinstance(node, ast.Constant) else ""):
            if isinstance(getattr(node, field, None), (str, int, float)):
                setattr(node, field, "x")
    return ast.dump(tree)


def duplicates(files):
    """Lists of functions of one shape, of those of 6 lines and more."""
    same = defaultdict(list)
    for path, text in files:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1:] if ast.get_docstring(node) is not None else node.body
                if first and node.end_lineno - first[0].lineno + 1 >= 6:
                    same[shape(node)].append(f"{path}:{node.name}")
    return [names for names in same.values() if len(names) > 1]


def test_no_function_is_written_twice():
    found = duplicates((path, text) for path, text in sources() if path.parts[0] != "tests")
    assert sum(len(names) - 1 for names in found) <= DUPLICATES, found
    twice = "def f(a):\n" + "".join(f"    a = g(a, {i})\n" for i in range(6)) + "    return a\n"
    assert duplicates([("one.py", twice), ("two.py", twice.replace("a", "b"))])  # a control


class Seen:
    """What runs of this package once it is told of calls: see :data:`MAIN_JOB`."""

    def __init__(self):
        self.code, self.classes, self.calls, self.frames = set(), set(), set(), 0

    def __call__(self, code, _):
        if not code.co_filename.startswith(HOME):
            return sys.monitoring.DISABLE  # told of it no more
        frame = sys._getframe(1)
        self.code.add(code)
        owner = frame.f_locals.get("self")
        if type(owner).__module__.startswith("mfopt"):
            self.classes.add(type(owner))
        depth, above, caller = 1, frame.f_back, None
        while above is not None:
            if self._ours(above):
                depth += 1
                caller = caller or above
            above = above.f_back
        self.frames = max(self.frames, depth)
        if caller is not None:
            self.calls.add((caller.f_code.co_filename, code.co_filename))
        return None

    @staticmethod
    def _ours(frame):
        return frame.f_code.co_filename.startswith(HOME)

    def measured(self):
        pairs = {pair for pair in self.calls if pair[0] < pair[1] and pair[::-1] in self.calls}
        return {
            "files": len({code.co_filename for code in self.code}),
            "functions": len(self.code),
            "lines": sum(len({line for *_, line in code.co_lines() if line}) for code in self.code),
            "classes": len(self.classes),
            "two-way pairs": len(pairs),
            "frames": self.frames,
        }


def main_job():
    """Measure the main job in this process."""
    from mfopt import sampling
    from mfopt.optimize import Question, Target, factorize

    seen, told = Seen(), sys.monitoring
    told.use_tool_id(told.PROFILER_ID, "budgets")
    told.register_callback(told.PROFILER_ID, told.events.PY_START, seen)
    told.set_events(told.PROFILER_ID, told.events.PY_START)
    factorize(sampling.BallsInBins(bins=16, epochs=4), Question(Target(2.0, seed=0)))
    return seen.measured()


@pytest.mark.ci
@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python 3.12 tells of calls")
def test_the_main_job_stays_readable():
    found = json.loads(python(__file__))
    over = {name: (found[name], most) for name, most in MAIN_JOB.items() if not found[name] <= most}
    assert not over, f"(found, budget): {over}"
    assert found["files"] > 40  # a control: it was seen


if __name__ == "__main__":
    print(json.dumps(main_job()))
