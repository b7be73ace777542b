"""Streams of (user, text) from files, with positions to go on from and a place for bad lines."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mfopt import _check

Position = list[int]
_EDGE = 1 << 16
# A line of a CSV file whose quotes do not match swallows what follows: no field is that long.
_LONGEST_FIELD = 1 << 26


class Item(NamedTuple):
    """One step of a source: a record, or the reason why there is none.

    Args:
        position: where to go on after this item.
        done: progress so far, in the source's unit.
        user, text: the record; None where ``reason`` is given.
        reason: why the item gives no record.
        where: the place of a bad item, for people.
        filtered: the item is sound and left out by rule (a forwarded mail), not broken.
    """

    position: Position
    done: int
    user: str | None = None
    text: str | None = None
    reason: str | None = None
    where: str = ""
    filtered: bool = False


class Source(Protocol):
    """Where records come from. ``read(position)`` goes on behind an item with that position."""

    unit: str

    def describe(self) -> dict[str, Any]:
        """JSON-able facts that a resumed build must find unchanged; no absolute paths."""

    def total(self) -> int:
        """All of it, in ``unit``; for the progress bar."""

    def read(self, position: Position | None = None) -> Iterator[Item]:
        """The items behind ``position``; all where None."""


def fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a digest of the first and last 64 KiB: cheap for files of any size."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(_EDGE))
        file.seek(max(0, size - _EDGE))
        digest.update(file.read(_EDGE))
    return {"name": path.name, "bytes": size, "edges": digest.hexdigest()}


def _existing(paths: Sequence[str | Path]) -> list[Path]:
    found = [Path(path) for path in paths]
    for path in found:
        if not path.is_file():
            raise _check.reject("data", str(path), "is no file")
    return found


def checked(user: Any, text: Any) -> tuple[str | None, str | None, str | None]:
    """(user, text, None), or (None, None, reason) where the values cannot be a record."""
    if isinstance(user, int) and not isinstance(user, bool):
        user = str(user)
    if not isinstance(user, str):
        return None, None, "user is missing" if user is None else "user is neither text nor integer"
    if not isinstance(text, str):
        return None, None, "text is missing" if text is None else "text is not text"
    if not user.strip():
        return None, None, "user is empty"
    if not text.strip():
        return None, None, "text is empty"
    try:
        (user + text).encode("utf-8")
    except UnicodeEncodeError:
        return None, None, "not UTF-8"
    return user, text, None


class _Files:
    """What the formats of one record per line or row share."""

    unit = "B"
    format = ""

    def __init__(self, paths: Sequence[str | Path], user_column: str, text_column: str) -> None:
        self.paths = _existing(paths)
        self.user_column, self.text_column = user_column, text_column

    def describe(self) -> dict[str, Any]:
        """Format, columns and a fingerprint of each file."""
        return {
            "format": self.format,
            "user_column": self.user_column,
            "text_column": self.text_column,
            "files": [fingerprint(path) for path in self.paths],
        }

    def total(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.paths)

    def read(self, position: Position | None = None) -> Iterator[Item]:
        """All items behind ``position`` = [file, place in the file]."""
        first, place = position or [0, 0]
        before = sum(path.stat().st_size for path in self.paths[:first])
        for number, path in enumerate(self.paths[first:], first):
            for item in self._read_file(path, place if number == first else 0):
                yield item._replace(
                    position=[number, *item.position],
                    done=before + item.done,
                    where=f"{path.name}: {item.where}",
                )
            before += path.stat().st_size

    def _read_file(self, path: Path, place: int) -> Iterator[Item]:
        raise NotImplementedError


class JsonLines(_Files):
    """One JSON object per line; the place in a file is the byte behind the line.

    A file that ends in ``.gz`` is read through gzip; its places are those of the text inside.
    """

    format = "jsonl"

    def _read_file(self, path: Path, place: int) -> Iterator[Item]:
        with open(path, "rb") as raw:
            packed = path.suffix.lower() == ".gz"
            file: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            try:
                file.seek(place)
                while line := file.readline():
                    begin, place = place, place + len(line)
                    if not line.strip():
                        continue
                    user, text, reason = self._parse(line)
                    done = raw.tell() if packed else place
                    yield Item([place], done, user, text, reason, f"byte {begin}")
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise _check.reject("data", str(path), f"is damaged: {error}") from None

    def _parse(self, line: bytes) -> tuple[str | None, str | None, str | None]:
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            return None, None, "not UTF-8"
        except (ValueError, RecursionError):
            return None, None, "not JSON"
        if not isinstance(value, dict):
            return None, None, "not a JSON object"
        return checked(value.get(self.user_column), value.get(self.text_column))


class Csv(_Files):
    """Comma-separated values with a header line; the place in a file counts its rows."""

    format = "csv"

    def _read_file(self, path: Path, place: int) -> Iterator[Item]:
        csv.field_size_limit(_LONGEST_FIELD)
        # Bytes that are not UTF-8 spoil their own row only.
        with (
            open(path, "rb") as raw,
            io.TextIOWrapper(raw, "utf-8-sig", "surrogateescape", newline="") as file,
        ):
            rows = csv.reader(file)
            header = next(rows, [])
            for column in (self.user_column, self.text_column):
                if column not in header:
                    raise _check.reject("column", column, f"{path.name} has columns {header}")
            user_at, text_at = header.index(self.user_column), header.index(self.text_column)
            count = 0
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    row, reason = [], f"not CSV ({error})"
                else:
                    reason = "" if len(row) == len(header) else "wrong number of columns"
                count += 1
                if count <= place or (not row and not reason.startswith("not CSV")):
                    continue
                where, done = f"line {rows.line_num}", raw.tell()
                if reason:
                    yield Item([count], done, reason=reason, where=where)
                else:
                    yield Item([count], done, *checked(row[user_at], row[text_at]), where)


class Parquet(_Files):
    """Parquet files; the place in a file counts its rows."""

    format = "parquet"

    def _read_file(self, path: Path, place: int) -> Iterator[Item]:
        import pyarrow as arrow
        from pyarrow import parquet

        try:
            file = parquet.ParquetFile(path)
        except arrow.ArrowInvalid as error:
            raise _check.reject("data", str(path), f"is no Parquet file: {error}") from None
        with file:
            names = file.schema_arrow.names
            for column in (self.user_column, self.text_column):
                if column not in names:
                    raise _check.reject("column", column, f"{path.name} has columns {names}")
            rows, size = max(file.metadata.num_rows, 1), path.stat().st_size
            row = 0
            for group in range(file.num_row_groups):
                length = file.metadata.row_group(group).num_rows
                if row + length <= place:
                    row += length
                    continue
                for batch in file.iter_batches(
                    1024, row_groups=[group], columns=[self.user_column, self.text_column]
                ):
                    users = batch.column(self.user_column).to_pylist()
                    texts = batch.column(self.text_column).to_pylist()
                    for user, text in zip(users, texts, strict=True):
                        row += 1
                        if row > place:
                            done = size * row // rows
                            yield Item([row], done, *checked(user, text), f"row {row}")


class HuggingFace(_Files):
    """A data set as ``datasets.save_to_disk`` leaves it; the place in a file counts its rows.

    Args:
        folder: of one split: it holds ``state.json`` and Arrow files.
        user_column: names the privacy unit.
        text_column: holds one record's text.

    Raises:
        UsageError: no such folder, or one of several splits.
    """

    format = "huggingface"

    def __init__(self, folder: str | Path, user_column: str, text_column: str) -> None:
        place = Path(folder)
        if (place / "dataset_dict.json").is_file():
            splits = sorted(path.parent.name for path in place.glob("*/state.json"))
            raise _check.reject(
                "data", str(folder), f"holds the splits {', '.join(splits)}", "Give one of them."
            )
        try:
            state = json.loads((place / "state.json").read_text(encoding="utf-8"))
            names = [Path(entry["filename"]).name for entry in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _check.reject("data", str(folder), f"is no saved data set ({error})") from None
        super().__init__([place / name for name in names], user_column, text_column)

    def _read_file(self, path: Path, place: int) -> Iterator[Item]:
        import pyarrow as arrow

        size, row = path.stat().st_size, 0
        with arrow.memory_map(str(path)) as file:
            try:
                batches = arrow.ipc.open_stream(file)
            except arrow.ArrowInvalid as error:
                raise _check.reject("data", str(path), f"is no Arrow stream: {error}") from None
            for column in (self.user_column, self.text_column):
                if column not in batches.schema.names:
                    raise _check.reject(
                        "column", column, f"{path.name} has columns {batches.schema.names}"
                    )
            for batch in batches:
                if row + batch.num_rows <= place:
                    row += batch.num_rows
                    continue
                users = batch.column(self.user_column).to_pylist()
                texts = batch.column(self.text_column).to_pylist()
                for user, text in zip(users, texts, strict=True):
                    row += 1
                    if row > place:
                        done = min(size, file.tell())
                        yield Item([row], done, *checked(user, text), f"row {row}")


def walk(folder: Path, left_out: Collection[str] = ()) -> Iterator[Path]:
    """All files below ``folder`` in a fixed order.

    Names that begin with a dot and folders named in ``left_out`` are passed by, links to folders
    are not followed.
    """
    with os.scandir(folder) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    for entry in ordered:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in left_out:
                yield from walk(Path(entry.path), left_out)
        elif entry.is_file():
            yield Path(entry.path)


class FileTree:
    """What sources made of many small files share; a position is [files done, items of the next].

    Sub-classes give ``items(path)``: the (user, text, reason, filtered) of one file.
    """

    unit = "files"
    format = ""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise _check.reject("data", str(folder), "is no folder")
        self._total: int | None = None

    def files(self) -> Iterator[Path]:
        """The files, in a fixed order."""
        return walk(self.folder)

    def describe(self) -> dict[str, Any]:
        """Format, number of files, and a digest of their names and sizes."""
        digest, count = hashlib.sha256(), 0
        for path in self.files():
            digest.update(f"{path.relative_to(self.folder)}\0{path.stat().st_size}\n".encode())
            count += 1
        self._total = count
        return {"format": self.format, "files": count, "names_and_sizes": digest.hexdigest()}

    def total(self) -> int:
        """Number of files."""
        if self._total is None:
            self._total = sum(1 for _ in self.files())
        return self._total

    def read(self, position: Position | None = None) -> Iterator[Item]:
        """All items behind ``position``."""
        first, skip = position or [0, 0]
        for number, path in enumerate(self.files()):
            if number < first:
                continue
            where = str(path.relative_to(self.folder))
            for count, (user, text, reason, filtered) in enumerate(self.items(path), 1):
                if number > first or count > skip:
                    yield Item([number, count], number + 1, user, text, reason, where, filtered)

    def items(self, path: Path) -> Iterator[tuple[str | None, str | None, str | None, bool]]:
        """The records of one file, or the reasons why there are none."""
        raise NotImplementedError


class Folder(FileTree):
    """One file or one sub-folder per user.

    A file directly in the folder belongs to the user named like it, without its last suffix; a file
    deeper down belongs to the user named like the first sub-folder.

    Args:
        folder: the root.
        records: what one record is: "file", "line", or "paragraph" (between blank lines).
    """

    format = "folder"

    def __init__(self, folder: str | Path, records: str = "file") -> None:
        super().__init__(folder)
        if records not in ("file", "line", "paragraph"):
            raise _check.reject("records", records, "must be file, line or paragraph")
        self.records = records

    def describe(self) -> dict[str, Any]:
        """As for every tree, and what one record is."""
        return super().describe() | {"records": self.records}

    def items(self, path: Path) -> Iterator[tuple[str | None, str | None, str | None, bool]]:
        """The records of one file."""
        parts = path.relative_to(self.folder).parts
        user = parts[0] if len(parts) > 1 else path.stem
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield None, None, "not UTF-8", False
            return
        pieces = [text]
        if self.records == "line":
            pieces = [line for line in text.splitlines() if line.strip()]
        elif self.records == "paragraph":
            pieces = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
        for piece in pieces:
            yield *checked(user, piece), False
