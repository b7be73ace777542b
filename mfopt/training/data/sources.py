"""Streams of (user, text) from files, with a place for bad lines."""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import hashlib
import io
import json
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.training.tokenizers import CHAT_END, CHAT_START, Content, Piece

COMPLETION = ("prompt", "completion")
CHAT = ("messages",)
_MESSAGE = ("role", "content")
_ROLES = ("system", "user", "assistant", "tool")
# rows of a table, or why there is none; bytes so far; place
Lines = Iterator[tuple[JsonObject | str, int, str]]
_WRONG_TYPE = {
    "user": "neither text nor integer (of several users: see mfopt.sampling.Owners)",
    "messages": "not a list of roles and texts",
}
# A line of a CSV file whose quotes do not match swallows what follows: no field is that long.
_LONGEST_FIELD = 1 << 26


class Item(NamedTuple):
    """One step of a source: a record, or the reason why there is none.

    ``done``: progress so far, in the source's unit; ``where``: the place of the item, for people.
    """

    user: str | None = None
    text: Content | None = None
    reason: str | None = None
    done: int = 0
    where: str = ""

    @classmethod
    def of_row(cls, row: JsonObject, user_column: str, columns: Sequence[str]) -> Item:
        """A record, or the reason why a row cannot be one.

        ``columns``: one of text, prompt and completion, or messages. One person is one user however
        the name is encoded: it is taken in Unicode's composed form (NFC), without space around it.
        """
        text: Any = row.get(columns[0])
        if columns == CHAT:
            text = _chat(text)
        elif columns == COMPLETION:
            completion = row.get(columns[1])
            text = (
                isinstance(text, str)
                and isinstance(completion, str)
                and (Piece(text, predicted=False), Piece(completion))
            )
        user: Any = row.get(user_column)
        if isinstance(user, int) and not isinstance(user, bool):
            user = str(user)
        pieces = isinstance(text, tuple)
        learned = "".join(part.text for part in text if part.predicted) if pieces else text
        for name, value in (("user", user), (" or ".join(columns), learned)):
            if not isinstance(value, str):
                rule = _WRONG_TYPE.get(name, "not text")
                return cls(reason=f"{name} is {'missing' if value is None else rule}")
            if not value.strip():
                return cls(reason=f"{name} is empty")
        try:
            (user + "".join(part.text for part in text) if pieces else user + text).encode("utf-8")
        except UnicodeEncodeError:
            return cls(reason="not UTF-8")
        return cls(unicodedata.normalize("NFC", user.strip()), text)


def _chat(messages: object) -> object:
    """Pieces of a chat in ChatML, of which the assistant's are learned; else what was given."""
    pieces = []
    for message in messages if isinstance(messages, list) else [None]:
        role, text = (message.get(x) if isinstance(message, dict) else None for x in _MESSAGE)
        if role not in _ROLES or not isinstance(text, str):
            return None if messages is None else False  # which is no text
        learned = role == "assistant"
        pieces.append(Piece(f"{CHAT_START}{role}\n", predicted=False, special=True))
        pieces += [Piece(text, learned), Piece(f"{CHAT_END}\n", learned, special=True)]
    return tuple(pieces)


class Source:
    """Base of formats with one record per line or row, the same in the same order at every reading.

    The first row decides whether records have a column of text, a prompt and a completion, or chat
    messages.
    """

    format = ""

    def __init__(self, paths: Sequence[str | Path], user_column: str, text_column: str) -> None:
        self.paths = [_check.file("data", path) for path in paths]
        self.user_column = user_column
        self.text_column = text_column

    def describe(self) -> JsonObject:
        """Format, columns, and the name, size and SHA-256 of each file."""
        columns = {name: getattr(self, name) for name in ("user_column", "text_column")}
        files = []
        for path in self.paths:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
        return {"format": self.format, **columns, "files": files}

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns that the text of a record is in, by the first row of the first file."""
        rows = (row for row, _, _ in self._rows(self.paths[0]))
        first_row = next((row for row in rows if isinstance(row, dict)), {})
        kinds = [(self.text_column,), COMPLETION, CHAT]
        return next((kind for kind in kinds if first_row.keys() >= {*kind}), kinds[0])

    @property
    def context(self) -> bool:
        """True if some of the text is read and not predicted."""
        return self.columns in (COMPLETION, CHAT)

    def total(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def read(self) -> Iterator[Item]:
        """Read the items of all files."""
        bytes_done = 0
        for path in self.paths:
            for row, done, position in self._rows(path):
                item = Item(reason=str(row))
                if isinstance(row, dict):
                    item = Item.of_row(row, self.user_column, self.columns)
                yield item._replace(done=bytes_done + done, where=f"{path.name}: {position}")
            bytes_done += path.stat().st_size

    def _rows(self, path: Path) -> Lines:
        """(a row, or why there is none; bytes so far; place) of each line of a file."""
        raise NotImplementedError

    def _check_columns(self, path: Path, names: Sequence[str]) -> None:
        """Refuse a table without users, or without texts of any kind."""
        alternatives = {self.text_column: {COMPLETION[0], CHAT[0]}}
        for column in (self.user_column, self.text_column):
            if not {column, *alternatives.get(column, ())} & {*names}:
                way_out = "A CSV file has commas; `mfopt data build` can be told other names."
                rule = f"{path.name} has columns {list(names)}"
                raise _check.reject("column", column, rule, way_out)


class JsonLines(Source):
    """One JSON object per line; a file that ends in ``.gz`` is read through gzip."""

    format = "jsonl"

    def _rows(self, path: Path) -> Lines:
        with open(path, "rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
            begin = 0
            try:
                while line := file.readline():
                    if line.strip():
                        # a byte order mark is no part of the first record
                        text = line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line
                        yield _parsed(text), raw.tell(), f"byte {begin}"
                    begin += len(line)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise _check.reject("data", str(path), f"is damaged: {error}") from None


def _parsed(line: bytes) -> JsonObject | str:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "not JSON"
    return row if isinstance(row, dict) else "not a JSON object"


class Csv(Source):
    """Comma-separated values with a header line."""

    format = "csv"

    def _rows(self, path: Path) -> Lines:
        csv.field_size_limit(_LONGEST_FIELD)
        # Bytes that are not UTF-8 spoil their own row only.
        with (
            open(path, "rb") as raw,
            io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            rows = csv.DictReader(file)
            self._check_columns(path, rows.fieldnames or ())
            while True:
                try:
                    fields = next(rows)
                    # where a field is missing, or there is one more
                    uneven = None in (*fields, *fields.values())
                    row = "wrong number of columns" if uneven else fields
                except StopIteration:
                    return
                except csv.Error as error:
                    row = f"not CSV ({error})"
                yield row, raw.tell(), f"line {rows.line_num}"


class Parquet(Source):
    """Parquet files, read in batches of rows."""

    format = "parquet"

    def _rows(self, path: Path) -> Lines:
        import pyarrow as arrow
        from pyarrow import parquet

        number = 0
        size = path.stat().st_size
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                count = max(file.metadata.num_rows, 1)
                self._check_columns(path, names)
                columns = {self.user_column, self.text_column, *COMPLETION, *CHAT}
                read = [name for name in names if name in columns]
                for batch in file.iter_batches(1024, columns=read):
                    for row in batch.to_pylist():
                        number += 1
                        yield row, size * number // count, f"row {number}"
        except arrow.ArrowInvalid as error:
            raise _check.reject("data", str(path), f"is not a Parquet file: {error}") from None


_BY_SUFFIX: dict[str, type[Source]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".csv": Csv,
    ".parquet": Parquet,
}


def format_of(path: str | Path) -> type[Source] | None:
    """The format that a file's name ends in; None: no known one."""
    name = str(path).lower()
    kind = _BY_SUFFIX.get(Path(name.removesuffix(".gz")).suffix)
    return None if name.endswith(".gz") and kind is not JsonLines else kind
