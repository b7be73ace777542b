"""What an option does to a command: runs on toys, whose outcomes are compared.

An outcome is the exit code, what was printed but for times, and the files that are left. A run
begins in a folder of its own with the same input files, so that outcomes differ by options alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import click
from commands import invoked
from mfopt_cli import options, sweeps

TIMES = re.compile(
    r'"(?:\w*seconds|date|\w*_bytes)": [^,\n]+|\d{4}-\d\d-\d\dT[\d:]+Z|'
    r"\d[\d.]*(?:e-\d+)? (?:min|h|ms|µs|s)\b(?: \d+ s)?"
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended; equal where nothing that a user sees is another."""

    code: int
    said: str
    errors: str
    files: tuple[tuple[str, str], ...]

    @property
    def refused(self):
        """Whether usage was refused, in a line: click's own have others around it."""
        lines = [line for line in self.errors.splitlines() if "error: " in line.lower()]
        return self.code == 2 and len(lines) == 1


def run(words, inputs):
    """A command's outcome in a new folder that holds the files of ``inputs``."""
    previous_folder, folder = Path.cwd(), Path(tempfile.mkdtemp())
    shutil.copytree(inputs, folder, dirs_exist_ok=True)
    os.chdir(folder)
    try:
        result = invoked(*words)
        files = tuple(
            (path.relative_to(folder).as_posix(), _content(path))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        )
    finally:
        os.chdir(previous_folder)
        shutil.rmtree(folder)
    progress = [line for line in result.stderr.splitlines() if not line.startswith("[")]
    if len(progress) < len(result.stderr.splitlines()):
        progress.append("[progress]")
    return Outcome(
        result.exit_code,
        TIMES.sub("TIME", result.stdout).replace(str(folder), "."),
        TIMES.sub("TIME", "\n".join(progress)).replace(str(folder), "."),
        files,
    )


def _content(path):
    """A digest, of files whose bytes say no time."""
    if path.suffix in (".csv", ".txt", ".toml"):
        return hashlib.sha256(TIMES.sub("", path.read_text()).encode()).hexdigest()
    return ""


def name_of(param):
    """The main name of an option."""
    return next(name for name in param.opts if name.startswith("--"))


def replaced(base, words):
    """``base`` with ``words`` for what it says of the same options; ``!--x``: without that one."""
    names = {_option(word.removeprefix("!")) for word in words}
    kept = [word for word in base if _option(word) not in names]
    return [*kept, *(word for word in words if not word.startswith("!"))]


def _option(word):
    return word.split("=")[0].replace("--no-", "--") if word.startswith("--") else word


def values(param):
    """Words that give an option some value of its type."""
    name, kind = name_of(param), param.type
    if param.is_flag:
        return [name, *param.secondary_opts]
    if isinstance(kind, click.Choice):
        return [f"{name}={choice}" for choice in kind.choices]
    if isinstance(kind, options.StrategyName):
        return [f"{name}={kind}" for kind in kind.names]
    if isinstance(kind, options.Count | sweeps.Sweep) and getattr(kind, "kind", int) is int:
        return [f"{name}={number}" for number in (2, 1, 3, 5, 8, 32, 100, 512, "2,4")]
    if isinstance(kind, sweeps.Sweep) or kind is click.FLOAT:
        return [f"{name}={number}" for number in (0.5, 0.25, 0.01, 2)]
    return [f"{name}=here"]
