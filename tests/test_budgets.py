"""Budgets: the most that the code may weigh. To raise a number, say why in the commit.

Lines are physical lines of ``*.py``, docstrings and comments included. The main job is
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

# room -> lines at most; the longest name that fits counts a file
LINES = {
    "mfopt": 1_754,
    "mfopt/_runtime": 1_517,
    "mfopt/accounting": 16_619,
    "mfopt/calibration": 188,
    "mfopt/experiments": 7_031,
    "mfopt/factorization": 675,
    "mfopt/jax": 499,
    "mfopt/noise": 3_758,
    "mfopt/optimize": 4_286,
    "mfopt/sampling": 1_534,
    "mfopt/strategies": 2_415,
    "mfopt/testing": 1_171,
    "mfopt/torch": 1_661,
    "mfopt/training": 10_021,
    "cli": 4_658,
    "tests": 35_658,
}
# of the main job
MAIN_JOB = {
    "files": 66,
    "functions": 548,
    "lines": 3_300,  # that can run, of the functions that do
    "classes": 42,
    "two-way pairs": 32,  # of files that call each other
    "frames": 34,
}
DUPLICATES = 2  # functions of at least 6 lines whose body, names aside, is another's


def room(path):
    """Entry of LINES that counts this file, a path relative to the root."""
    fitting = [name for name in LINES if path.as_posix().startswith(f"{name}/")]
    return max(fitting, key=len)


def sources():
    for top in ("mfopt", "cli", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text()


def test_no_room_outgrows_its_budget():
    lines = Counter()
    for path, text in sources():
        lines[room(path)] += text.count("\n")
    over = {name: (count, LINES[name]) for name, count in lines.items() if count > LINES[name]}
    assert not over, f"(lines, budget): {over}"
    # a budget far above what is there is none: lower it where code was taken out
    loose = {name: (lines[name], most) for name, most in LINES.items() if most > lines[name] + 300}
    assert not loose, f"(lines, budget): {loose}"


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
    from mfopt.optimize import factorize

    seen, told = Seen(), sys.monitoring
    told.use_tool_id(told.PROFILER_ID, "budgets")
    told.register_callback(told.PROFILER_ID, told.events.PY_START, seen)
    told.set_events(told.PROFILER_ID, told.events.PY_START)
    factorize(sampling.BallsInBins(bins=16, epochs=4), 2.0, 1e-5, seed=0)
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
