"""Writing a token store from records in any order: a spool on disk, then one pass by user.

Records, users mixed, go into an SQLite file (the *spool*), whose index gives them back by user, in
memory that grows with neither. A commit makes everything so far durable with the reader's progress:
a build that was killed resumes from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mfopt._runtime import _check, _files
from mfopt.errors import FailureError
from mfopt.progress import Progress, Report, silent
from mfopt.training.data import store as stores
from mfopt.training.data.store import token_dtype
from mfopt.training.tokenizers import CONTEXT

# Texts are recognized by 128-bit digests, and a user's hold-out follows from one: a chance meeting
# among 10⁸ has probability below 1e-22.
_KEY_BYTES = 16
_TABLES = """
PRAGMA cache_size = -8192;
CREATE TABLE IF NOT EXISTS users (id INTEGER PRIMARY KEY, name BLOB UNIQUE);
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, user INTEGER NOT NULL, text BLOB, tokens BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, facts TEXT);
"""
_NEW = "INSERT OR IGNORE INTO users (name) VALUES (?)"
_ADD = "INSERT INTO records (user, text, tokens) SELECT id, ?, ? FROM users WHERE name = ?"
# the outer loop runs through the users, the inner through the index: nothing is sorted
_BY_USER = """
SELECT name, tokens, {repeated} FROM users CROSS JOIN records ON records.user = users.id
ORDER BY users.id, records.id
"""
_REPEATED = """EXISTS (
    SELECT 1 FROM records AS earlier
    WHERE earlier.user = records.user AND earlier.text = records.text AND earlier.id < records.id
)"""
_EVERY = 1000  # records between two words about progress


def key(text: bytes) -> bytes:
    """The 128-bit digest under which a user or a text is recognized."""
    return hashlib.blake2b(text, digest_size=_KEY_BYTES).digest()


@dataclasses.dataclass(frozen=True)
class HoldOut:
    """Shares of the data held out from training, for evaluation.

    Whether a user (or a user's k-th record) is held out depends on the seed and that user's own
    name alone, never on who else is in the data: adding or removing one user moves nobody else.

    ``users`` are held out whole, and of the others ``records``: shares in [0, 1).
    """

    users: float = 0.0
    records: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "records"):
            if _check.probability(f"held-out {name}", getattr(self, name), closed=True) == 1:
                raise _check.reject(f"held-out {name}", 1.0, "must be below 1")
        _check.seed("seed", self.seed)


class TokenStoreBuilder(contextlib.AbstractContextManager["TokenStoreBuilder"]):
    """Collect records in a spool folder and write them as stores grouped by user.

    Refused is a spool that is damaged, or was begun with another ``vocab_size``. ``context``: some
    tokens are read and not predicted.
    """

    def __init__(self, spool: str | Path, vocab_size: int, *, context: bool = False) -> None:
        self.spool, self.vocab_size = Path(spool), vocab_size
        self.dtype = np.dtype(np.uint32) if context else token_dtype(vocab_size)
        self.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._base = sqlite3.connect(self.spool / "records.sqlite")
        try:
            self._base.executescript(_TABLES)
            found = self._base.execute("SELECT facts FROM state").fetchone()
        except sqlite3.DatabaseError as problem:
            self.close()
            why = f"{self.spool} cannot be resumed ({problem}); start over with `restart=True`"
            raise FailureError(why) from None
        state: dict[str, Any] = {"vocab_size": vocab_size, "progress": {}}
        state |= json.loads(found[0]) if found else {}
        #: what :meth:`commit` was given last: {} for a new spool
        self.progress: dict[str, Any] = state["progress"]
        if state["vocab_size"] != vocab_size:
            self.close()
            rule = f"the build began with {state['vocab_size']}"
            raise _check.reject("vocab_size", vocab_size, rule)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the spool; what was not committed is read again by the next build."""
        self._base.close()

    @property
    def num_records(self) -> int:
        """Records in the spool, committed or not."""
        return int(self._base.execute("SELECT coalesce(max(id), 0) FROM records").fetchone()[0])

    def add(
        self, users: Sequence[str], records: Sequence[np.ndarray], texts: Sequence[str] = ()
    ) -> None:
        """Append records: ``records[i]`` is a (length,) integer array of user ``users[i]``.

        ``texts``, where given, are remembered by digest so that repeated texts can be dropped.
        """
        if len(users) != len(records) or len(texts) not in (0, len(users)):
            raise _check.reject("records", len(records), f"must be as many as users: {len(users)}")
        if not records:
            return
        tokens = np.concatenate(records)
        largest = int((tokens % CONTEXT).max(initial=0))
        if not (tokens.min(initial=0) >= 0 and largest < self.vocab_size):
            raise _check.reject("tokens", largest, f"must be below {self.vocab_size}")
        names = [user.encode("utf-8", "replace") for user in users]
        digests = [key(text.encode("utf-8", "surrogatepass")) for text in texts]
        keys: Sequence[bytes | None] = digests or [None] * len(users)
        contents = [record.astype(self.dtype).tobytes() for record in records]
        # a new one gets the next number: they stand in the order in which they first came
        self._base.executemany(_NEW, zip(names, strict=True))
        self._base.executemany(_ADD, zip(keys, contents, names, strict=True))

    def commit(self, progress: Mapping[str, Any]) -> None:
        """Make everything added so far durable, together with JSON-able ``progress``."""
        self.progress = dict(progress)
        state = json.dumps({"vocab_size": self.vocab_size, "progress": self.progress})
        self._base.execute("INSERT OR REPLACE INTO state VALUES (0, ?)", (state,))
        self._base.commit()

    def finish(
        self,
        folder: str | Path,
        metadata: Mapping[str, Any],
        *,
        name: str = "train",
        hold_out: HoldOut | None = None,
        drop_duplicates: bool = False,
        progress: Report = silent,
    ) -> dict[str, int]:
        """Group by user and write ``folder/<name>`` (and the held-out parts).

        Users stand in the order in which they first came, records of a user in the order in which
        they came. Returns records per part, and ``duplicates``: how many were dropped.

        Args:
            folder, name: where the parts go, and the name of the one that is not held out.
            metadata: facts for each part's ``metadata.json``; ``tokenizer_digest`` among them.
            hold_out, progress: what is kept from it, and callback for what has been grouped.
            drop_duplicates: keep the first of a user's records with the same text.
        """
        hold_out = hold_out or HoldOut()
        self._base.execute("CREATE INDEX IF NOT EXISTS by_user ON records (user)")
        if drop_duplicates:
            self._base.execute("CREATE INDEX IF NOT EXISTS by_text ON records (user, text)")
        counts = dict.fromkeys(("duplicates", name, "held-out-users", "held-out-records"), 0)
        parts: dict[str, _Part] = {}
        user, outside, number, total = b"", False, 0, self.num_records
        rows = self._base.execute(_BY_USER.format(repeated=_REPEATED if drop_duplicates else "0"))
        for done, (of, tokens, repeated) in enumerate(rows, 1):
            if of != user or done == 1:
                user, number = of, 0
                outside = _uniform(key(user), 2 * hold_out.seed) < hold_out.users
            held = bool(hold_out.records) and (
                _uniform(key(user), 2 * hold_out.seed + 1, number) < hold_out.records
            )
            part = "held-out-users" if outside else "held-out-records" if held else name
            number += 1
            if done % _EVERY == 0:
                progress(Progress(f"grouping {name}", done, total, "records"))
            counts["duplicates" if repeated else part] += 1
            if not repeated:
                if part not in parts:
                    parts[part] = _Part(Path(folder) / part, self.dtype)
                parts[part].add(user, tokens)
        for part, store in parts.items():
            store.close({**metadata, "part": part, "vocab_size": self.vocab_size})
        if not counts[name]:
            for store in parts.values():
                shutil.rmtree(store.folder)
            raise FailureError(f"No record is left for the part {name}; nothing written.")
        return counts


def _uniform(digest: bytes, salt: int, number: int = 0) -> float:
    """A number in [0, 1) from a key, a salt and a number: the finalizer of splitmix64, twice."""
    low, high = (int.from_bytes(digest[at : at + 8], "little") for at in (0, 8))
    x = low ^ (number << 32) ^ salt
    for addend in (high ^ number, 0x9E3779B97F4A7C15):
        x = (x + addend) % (1 << 64)
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % (1 << 64)
        x ^= x >> 31
    return float((x >> 11) * 2.0**-53)


class _Column:
    """A ``.npy`` file of one axis that is written piece by piece; its header holds the length."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._file, self._dtype, self.length = open(path, "wb"), dtype, 0  # noqa: SIM115
        self._head()

    def _head(self) -> None:
        facts = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.length,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, facts)

    def add(self, content: bytes) -> None:
        self._file.write(content)
        self.length += len(content) // self._dtype.itemsize

    def close(self) -> None:
        self._head()  # with room for any length
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class _Part:
    """A store that is written record by record, users one after the other."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        folder.mkdir(mode=0o700, parents=True)
        offsets, byte = np.dtype("<i8"), np.dtype(np.uint8)
        kinds = {"tokens": dtype, "user_names": byte}
        kinds |= dict.fromkeys(("record_offsets", "user_offsets", "name_offsets"), offsets)
        self._columns = {
            name: _Column(folder / f"{name}.npy", kind) for name, kind in kinds.items()
        }
        self.folder, self._user, self._records = folder, b"", 0
        self._mark("record_offsets", 0)

    def _mark(self, column: str, place: int) -> None:
        self._columns[column].add(place.to_bytes(8, "little"))

    def _end_user(self) -> None:
        self._mark("user_offsets", self._records)
        self._mark("name_offsets", self._columns["user_names"].length)

    def add(self, user: bytes, tokens: bytes) -> None:
        if user != self._user or not self._records:
            self._end_user()
            self._columns["user_names"].add(user)
        self._columns["tokens"].add(tokens)
        self._mark("record_offsets", self._columns["tokens"].length)
        self._user, self._records = user, self._records + 1

    def close(self, metadata: dict[str, Any]) -> None:
        self._end_user()
        for column in self._columns.values():
            column.close()
        arrays = [stores.map_array(self.folder / f"{name}.npy") for name in stores.ARRAYS]
        facts = metadata | {
            "format_version": stores.FORMAT_VERSION,
            "num_users": len(arrays[2]) - 1,
            "num_records": len(arrays[1]) - 1,
            "num_tokens": len(arrays[0]),
            "content_digest": stores.content_digest(*arrays),
        }
        text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
        _files.write(self.folder / stores.METADATA, text)
