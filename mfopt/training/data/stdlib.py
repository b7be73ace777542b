"""The embedded corpus: the source of the running Python's standard library. No download.

The privacy unit is the module; each function or method is one record (``docs/training/data.md``).
Whole top-level packages are public or private, by their name alone, so that near-copies within a
package never stand on both sides. The Python version is recorded with the store.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import os
import platform
import sysconfig
import textwrap
import tokenize
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.data.build import Options, build
from mfopt.training.data.builder import HoldOut
from mfopt.training.data.sources import Lines, Source, format_of
from mfopt.training.tokenizers import Tokenizer

# Tests, demonstrations, bundled applications, and what is installed beside the library.
_LEFT_OUT = {"dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
_SALT = "mfopt"
_PUBLIC_SHARE = 0.25
_HELD_OUT = Options(hold_out=HoldOut(users=0.1, records=0.05))


def is_public(package: str) -> bool:
    """Return True if a top-level package or module belongs to the public part (one in four does).

    >>> is_public("asyncio"), is_public("json")
    (False, False)
    """
    name = package.removesuffix(".py")
    byte = hashlib.blake2b((_SALT + name).encode(), digest_size=1).digest()[0]
    return byte < 256 * _PUBLIC_SHARE


def _functions(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module and the methods of its classes; inner functions stay inside."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body)


def functions_of(source: str) -> list[str]:
    """The source of each function, decorators included, indented as if at the top.

    >>> functions_of("class A:\\n    @property\\n    def b(self):\\n        return 1\\n")
    ['@property\\ndef b(self):\\n    return 1\\n']
    """
    lines = source.splitlines(keepends=True)
    texts = []
    for node in _functions(ast.parse(source).body):
        begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        texts.append(textwrap.dedent("".join(lines[begin - 1 : node.end_lineno])))
    return texts


def docstrings_of(source: str) -> list[str]:
    """The docstrings of a module, its classes and its functions.

    >>> docstrings_of('class A:\\n    "Holds b."\\n    def b(self):\\n        "Gives 1."\\n')
    ['Holds b.', 'Gives 1.']
    """
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [
        ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)
    ]
    return [text for text in texts if text]


def walk(folder: Path, left_out: Collection[str] = ()) -> list[Path]:
    """The files below ``folder``, sorted by path.

    Names that begin with a dot and folders named in ``left_out`` are passed by, links to folders
    are not followed.
    """
    files = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        files += [Path(place, name) for name in names if name[0] != "."]
    return sorted(filter(Path.is_file, files))


class StandardLibrary(Source):
    """One part of the corpus; users are modules, named like ``json.decoder``.

    ``part``: "private", "public", or "prose" (the docstrings of the public part).
    """

    format = "stdlib"

    def __init__(self, part: str = "private", folder: str | Path | None = None) -> None:
        self.folder = Path(folder or sysconfig.get_path("stdlib"))
        self.part = _check.choice("part", part, ("private", "public", "prose"))
        in_public = self.part != "private"
        paths = [
            path
            for path in walk(self.folder, _LEFT_OUT)
            if path.suffix == ".py"
            and is_public(path.relative_to(self.folder).parts[0]) == in_public
        ]
        if not paths:  # a Python whose library is an archive
            raise _check.reject("data", str(self.folder), "has no modules of this part")
        super().__init__(paths, "user", "text")

    def describe(self) -> JsonObject:
        """Format, number of modules, and what decides which they are."""
        return {
            "format": self.format,
            "files": len(self.paths),
            "part": self.part,
            "python": platform.python_version(),
        }

    def _rows(self, path: Path) -> Lines:
        """The functions of one module, or their docstrings."""
        module = ".".join(path.relative_to(self.folder).with_suffix("").parts)
        rows: list[JsonObject | str] = ["not Python"]
        with contextlib.suppress(SyntaxError, UnicodeDecodeError), tokenize.open(path) as file:
            texts = (docstrings_of if self.part == "prose" else functions_of)(file.read())
            rows = [{"user": module.removesuffix(".__init__"), "text": text} for text in texts]
        for row in rows:
            yield row, path.stat().st_size, module


def build_stdlib(folder: str | Path, *, public: str = "public", **keywords: Any) -> JsonObject:
    """Build the embedded corpus: parts ``train``, ``public``, and held-out ones.

    The public part is "public" (code) or "prose" (docstrings). By default the tokenizer is a
    byte-level BPE of 2048 entries trained on it, and a tenth of the private modules and a twentieth
    of the others' functions are held out. ``folder``, ``keywords``, returns, raises: as
    :func:`mfopt.training.data.build.build`.
    """
    settings: JsonObject = {
        "tokenizer": 2048,
        "options": _HELD_OUT,
        "public": StandardLibrary(public),
    }
    return build(StandardLibrary("private"), folder, **settings | keywords)


def lines_of(path: str | Path) -> Source:
    """The records of a file with the columns ``user`` and ``text``, in a format of its name."""
    if (source := format_of(path)) is not None:
        return source([path], "user", "text")
    rule = "must be a folder or a file: .jsonl, .ndjson (either with .gz too), .csv or .parquet"
    raise _check.reject("data", str(path), rule, "Build a folder with `mfopt data build`.")


def build_lines(
    path: str | Path,
    folder: str | Path,
    tokenizer: str = "",
    *,
    skip_bad: bool = False,
    **keywords: Any,
) -> JsonObject:
    """Build the stores of a file (:func:`format_of`) with the columns ``user`` and ``text``.

    The rest is as for :func:`build_stdlib`, whose docstrings are the public part.

    Args:
      path, folder: the file, and the folder to make.
      tokenizer: folder of a model with its own; empty: one is trained.
      skip_bad: skip lines that are no record even if they are more than a hundredth.
    """
    keywords |= {
        "tokenizer": Tokenizer.load(tokenizer) if tokenizer else 2048,
        "options": dataclasses.replace(_HELD_OUT, skip_bad=skip_bad),
        "public": StandardLibrary("prose"),
    }
    return build(lines_of(path), folder, **keywords)
