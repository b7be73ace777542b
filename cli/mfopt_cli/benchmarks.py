"""The options of the benchmarks, in the vocabulary of the commands.

A benchmark stands in tests/benchmarks/bench_NAME.py and has ``parser()`` and ``main(arguments)``.
Whole numbers may be written 1e6 or 10M, a list is one word with commas, and what a command has too
has its name.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mfopt_cli.options import whole

T = TypeVar("T")


def count(text: str) -> int:
    """A whole number."""
    try:
        return whole(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} {problem}") from None


def listed(item: Callable[[str], T], choices: Iterable[str] = ()) -> Callable[[str], list[T]]:
    """A comma-separated list of what ``item`` reads, each of ``choices`` where there are any."""
    known = list(choices)

    def parse(text: str) -> list[T]:
        words = [word.strip() for word in text.split(",")]
        for word in words:
            if known and word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return [item(word) for word in words]

    parse.__name__ = f"list of {getattr(item, '__name__', 'values')}"
    return parse


class Parser(argparse.ArgumentParser):
    """Reads the words after ``mfopt bench NAME``.

    Args:
      name: of the benchmark.
      doc: its module's docstring, shown by --help.
    """

    def __init__(self, name: str, doc: str | None) -> None:
        super().__init__(
            prog=f"mfopt bench {name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def word(self, name: str, *, help: str, older: tuple[str, ...] = (), **more: Any) -> None:
        """An option; names that it had before go on working, unseen.

        Args:
          name: with its dashes.
          help: what it is.
          older: earlier names.
          more: as for :meth:`add_argument`.
        """
        action = self.add_argument(name, help=help, **more)
        hidden = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS, "dest": action.dest}
        for known in older:
            self.add_argument(known, **{**more, **hidden})

    def out(self, text: str = "JSON file to write, replacing what is there.") -> None:
        """``--out``."""
        self.add_argument("--out", type=Path, help=text)

    def seed(self) -> None:
        """``--seed``."""
        self.add_argument("--seed", type=count, default=0, help="Pin the randomness.")

    def command(self, arguments: Sequence[str]) -> str:
        """The words that run this once more, but for where its report goes."""
        words, left = [], iter(arguments)
        for word in left:
            if word == "--out":
                next(left, None)
            elif not word.startswith("--out="):
                words.append(word)
        return shlex.join([*self.prog.split(), *words])

    def parse_args(self, *arguments: Any, **named: Any) -> Any:
        """Parse the arguments; refuse what no benchmark can do before any work.

        That is an ``--out`` that could not be written, and numbers that are not above 0 or not
        finite, but for an option's own default.
        """
        found = super().parse_args(*arguments, **named)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if value == action.default or not action.option_strings:
                continue
            for each in value if isinstance(value, list | tuple) else [value]:
                if each is False or not isinstance(each, int | float):
                    continue
                if not 0 < each < math.inf:
                    self.error(f"{action.option_strings[0]} {each}: must be finite and above 0")
        out = getattr(found, "out", None)
        if out is not None and out.is_dir():
            self.error(f"--out {out}: is a folder; name a file")
        if out is not None and not out.resolve().parent.is_dir():
            self.error(f"--out {out}: its folder does not exist")
        return found


def keep(out: Path | None, report: Any, *, how: str, begun: float, seed: int | None = None) -> None:
    """Write a report as JSON, and into the manifest of its folder, or of the one above it.

    Args:
      out: the file, or None for none.
      report: JSON-able.
      how: the command that makes it again; where the manifest is beside the file, without --out.
      begun: ``time.perf_counter()`` at the start.
      seed: pinned, or None.
    """
    if out is None:
        return
    from mfopt import _files
    from mfopt.experiments import artifacts, runner

    _files.write(out, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    out = out.resolve()
    for folder in out.parents[:2]:
        if not (folder / artifacts.MANIFEST).is_file():
            continue
        name = out.relative_to(folder)
        artifacts.note(
            folder,
            name.with_suffix("").as_posix(),
            [out],
            how=f"{how} --out artifacts/{name}" if folder == out.parent else how,
            seed=seed,
            device=[runner.device()],
            seconds=time.perf_counter() - begun,
        )
