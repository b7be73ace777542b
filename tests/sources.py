"""Source files of the library and its commands, each parsed once."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "mfopt").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def texts():
    """(place, text) of every string in them, its white space as single blanks."""
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", re.sub(r"\s+", " ", node.value))
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
