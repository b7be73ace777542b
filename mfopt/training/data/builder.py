"""Writing a token store from records in any order: an append-only spool, then one grouping pass.

Records arrive as they are read, users mixed. They are appended to flat files (the *spool*) and
grouped by user at the end, with array operations only: no Python object per record or user is
kept. A commit makes everything so far durable together with the reader's position, so a build
that was killed goes on from the last commit.

Grouping needs about 100 bytes of memory per record (10 GB for 10⁸ records), mapped pages included;
tokens stay on disk.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mfopt import _check, _files
from mfopt.errors import FailureError
from mfopt.training.data.store import (
    FORMAT_VERSION,
    METADATA,
    content_digest,
    map_array,
    token_dtype,
)

STATE = "state.json"
# User names and texts are recognized by 128-bit digests: a chance meeting among 10⁸ has
# probability below 1e-22.
_KEY_BYTES = 16
_COLUMNS = ("tokens", "lengths", "users", "texts", "names", "name_lengths")
_CHUNK = 1 << 22


def key(text: str) -> bytes:
    """The 128-bit digest under which a user or a text is recognized."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


@dataclasses.dataclass(frozen=True)
class HoldOut:
    """What is kept from training, for evaluation.

    Whether a user (or a user's k-th record) is held out depends on the seed and that user's own
    name alone, never on who else is in the data: adding or removing one user moves nobody else.

    Args:
        users: share of users held out whole, in [0, 1).
        records: share of the remaining users' records held out, in [0, 1).
        seed: of the choice.
    """

    users: float = 0.0
    records: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "records"):
            share = _check.probability(f"held-out {name}", getattr(self, name), closed=True)
            if share == 1:
                raise _check.reject(f"held-out {name}", share, "must be below 1")
        _check.seed("seed", self.seed)


class TokenStoreBuilder:
    """Collect records in a spool folder and write them as stores grouped by user.

    Args:
        spool: folder for the work files; taken up again where it holds a commit.
        vocab_size: entries of the tokenizer.

    Raises:
        UsageError: the spool was begun with another ``vocab_size``.
    """

    def __init__(self, spool: str | Path, vocab_size: int) -> None:
        self.spool = Path(spool)
        self.dtype = token_dtype(vocab_size)
        self.vocab_size = vocab_size
        self.spool.mkdir(parents=True, exist_ok=True)
        #: what :meth:`commit` was given last: {} for a new spool
        self.progress: dict[str, Any] = {}
        self._committed = dict.fromkeys(_COLUMNS, 0)
        if (self.spool / STATE).is_file():
            state = json.loads((self.spool / STATE).read_text())
            if state["vocab_size"] != vocab_size:
                raise _check.reject(
                    "vocab_size", vocab_size, f"the build began with {state['vocab_size']}"
                )
            self.progress, self._committed = state["progress"], state["bytes"]
        self._last_user = self.progress.get("last_user")
        self._files: dict[str, BinaryIO] = {}
        for name, size in self._committed.items():
            path = self._path(name)
            path.touch()
            if path.stat().st_size < size:
                raise FailureError(
                    f"{path} is shorter than its last commit; start anew with `restart=True`"
                )
            os.truncate(path, size)  # what was written after the last commit is read again
            self._files[name] = open(path, "ab")  # noqa: SIM115 (closed in close())

    def _path(self, name: str) -> Path:
        return self.spool / f"{name}.bin"

    def __enter__(self) -> TokenStoreBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the spool's files; what was not committed is read again by the next build."""
        for file in self._files.values():
            file.close()

    @property
    def num_records(self) -> int:
        """Records in the spool, committed or not."""
        return self._files["lengths"].tell() // 8

    @property
    def num_tokens(self) -> int:
        """Tokens in the spool, committed or not."""
        return self._files["tokens"].tell() // self.dtype.itemsize

    def add(
        self, users: Sequence[str], records: Sequence[np.ndarray], texts: Sequence[str] = ()
    ) -> None:
        """Append records: ``records[i]`` is a (length,) integer array of user ``users[i]``.

        ``texts``, where given, are remembered by digest so that repeated texts can be dropped.

        Raises:
            UsageError: a token is outside the vocabulary, or lengths of the lists differ.
        """
        if len(users) != len(records) or len(texts) not in (0, len(users)):
            raise _check.reject("records", len(records), f"must be as many as users: {len(users)}")
        if not records:
            return
        tokens = np.concatenate(records)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise _check.reject("tokens", int(tokens.max()), f"must be below {self.vocab_size}")
        names, name_lengths = [], []
        for user in users:
            # The first record of a user always comes after another user's, so its name is kept.
            encoded = b"" if user == self._last_user else user.encode("utf-8", "replace")
            names.append(encoded)
            name_lengths.append(len(encoded))
            self._last_user = user
        write = {
            "tokens": tokens.astype(self.dtype).tobytes(),
            "lengths": np.array([len(record) for record in records], np.int64).tobytes(),
            "users": b"".join(map(key, users)),
            "texts": b"".join(map(key, texts)) if texts else bytes(_KEY_BYTES * len(users)),
            "names": b"".join(names),
            "name_lengths": np.array(name_lengths, np.int64).tobytes(),
        }
        for name, data in write.items():
            self._files[name].write(data)

    def commit(self, progress: Mapping[str, Any]) -> None:
        """Make everything added so far durable, together with JSON-able ``progress``."""
        sizes = {}
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            sizes[name] = file.tell()
        self.progress = {**progress, "last_user": self._last_user}
        state = {"vocab_size": self.vocab_size, "progress": self.progress, "bytes": sizes}
        _files.write(self.spool / STATE, json.dumps(state))
        self._committed = sizes

    def _column(self, name: str, dtype: Any, width: int = 1) -> np.ndarray:
        path = self._path(name)
        if path.stat().st_size == 0:
            return np.empty((0, width) if width > 1 else 0, dtype)
        flat = np.memmap(path, dtype, "r").view(np.ndarray)
        return flat.reshape(-1, width) if width > 1 else flat

    def finish(
        self,
        folder: str | Path,
        metadata: Mapping[str, Any],
        *,
        name: str = "train",
        hold_out: HoldOut | None = None,
        drop_duplicates: bool = False,
        advance: Callable[[int], object] = lambda tokens: None,
    ) -> dict[str, int]:
        """Group by user and write ``folder/<name>`` (and the held-out parts).

        Users stand in the order in which they first came, records of a user in the order in which
        they came.

        Args:
            folder: where the parts go; must not hold them yet.
            metadata: facts for each part's ``metadata.json``; ``tokenizer_digest`` among them.
            name: of the part that is not held out.
            hold_out: what is kept from it; None: nothing.
            drop_duplicates: keep the first of a user's records with the same text.
            advance: called with the number of tokens written since the last call.

        Returns:
            Records per part, and ``duplicates``: how many were dropped.

        Raises:
            FailureError: no record is left to train on.
        """
        for file in self._files.values():
            file.flush()
        lengths = self._column("lengths", np.int64)
        user_of, keys, first = _group(self._column("users", np.uint64, 2))
        keep = np.ones(len(lengths), bool)
        if drop_duplicates:
            keep = _first_of_each(user_of, self._column("texts", np.uint64, 2))
        order = np.argsort(user_of, kind="stable")
        part = _assign(order, user_of, keys, hold_out or HoldOut())
        counts = {"duplicates": int(np.count_nonzero(~keep))}
        starts = np.concatenate([[0], np.cumsum(lengths)])
        tokens = self._column("tokens", self.dtype)
        for number, part_name in enumerate((name, "held-out-users", "held-out-records")):
            records = order[(part == number) & keep[order]]
            counts[part_name] = len(records)
            if not len(records):
                if number == 0:
                    raise FailureError(f"No record is left for the part {name}; nothing written.")
                continue
            users, begins = np.unique(user_of[records], return_index=True)
            destination = Path(folder) / part_name
            destination.mkdir(parents=True)
            _write_tokens(destination, tokens, starts, lengths, records, advance)
            _save_array(destination / "user_offsets.npy", np.append(begins, len(records)))
            self._write_names(destination, first[users])
            _write_metadata(
                destination, {**metadata, "part": part_name, "vocab_size": self.vocab_size}
            )
        return counts

    def _write_names(self, folder: Path, records: np.ndarray) -> None:
        name_lengths = self._column("name_lengths", np.int64)
        stops = np.cumsum(name_lengths)[records]
        sizes = name_lengths[records]
        _save_array(folder / "name_offsets.npy", np.concatenate([[0], np.cumsum(sizes)]))
        names = self._column("names", np.uint8)
        _save_array(folder / "user_names.npy", names[_spans(stops - sizes, sizes)])

    def discard(self) -> None:
        """Remove the spool."""
        self.close()
        shutil.rmtree(self.spool)


def _group(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number users by first appearance: (user of each record, key of each user, first record)."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = np.any(ordered[1:] != ordered[:-1], axis=1)
    first = order[fresh]  # lexsort is stable: the first of each group came first
    rank = np.empty(len(first), np.int64)
    by_arrival = np.argsort(first)
    rank[by_arrival] = np.arange(len(first))
    user_of = np.empty(len(keys), np.int64)
    user_of[order] = rank[np.cumsum(fresh) - 1]
    return user_of, keys[first[by_arrival]], first[by_arrival]


def _first_of_each(user_of: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """True on the first record of each (user, text)."""
    order = np.lexsort((texts[:, 1], texts[:, 0], user_of))
    same = np.zeros(len(order), bool)
    same[1:] = (user_of[order][1:] == user_of[order][:-1]) & np.all(
        texts[order][1:] == texts[order][:-1], axis=1
    )
    keep = np.empty(len(order), bool)
    keep[order] = ~same
    return keep


def _uniform(keys: np.ndarray, salt: int) -> np.ndarray:
    """A number in [0, 1) from each (·, 2) key and a salt: the finalizer of splitmix64, twice."""
    with np.errstate(over="ignore"):
        x = keys[:, 0] ^ np.uint64(salt % (1 << 64))
        for addend in (keys[:, 1], np.uint64(0x9E3779B97F4A7C15)):
            x = x + addend
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _assign(
    order: np.ndarray, user_of: np.ndarray, keys: np.ndarray, hold_out: HoldOut
) -> np.ndarray:
    """The part of each record in ``order``: 0 train, 1 held-out users, 2 held-out records."""
    part = np.zeros(len(order), np.int8)
    users = user_of[order]
    if hold_out.records:
        begins = np.searchsorted(users, np.arange(len(keys)))
        number = (np.arange(len(order)) - begins[users]).astype(np.uint64)
        record_keys = keys[users] ^ np.stack([number << np.uint64(32), number], axis=1)
        part[_uniform(record_keys, 2 * hold_out.seed + 1) < hold_out.records] = 2
    if hold_out.users:
        part[(_uniform(keys, 2 * hold_out.seed) < hold_out.users)[users]] = 1
    return part


def _spans(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The indices of all spans [starts[i], starts[i] + sizes[i]), one span after the other."""
    shift = starts - np.concatenate([[0], np.cumsum(sizes)[:-1]]) if len(sizes) else starts
    return np.repeat(shift, sizes) + np.arange(int(sizes.sum()))


def _blocks(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of records of at most _CHUNK tokens together (or one longer record)."""
    ends = np.cumsum(lengths)
    begin = 0
    while begin < len(lengths):
        done = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, done + _CHUNK, side="right")), begin + 1)
        yield begin, end
        begin = end


def _save_array(path: Path, array: np.ndarray) -> None:
    _files.write(path, lambda stream: np.save(stream, array, allow_pickle=False))


def _write_tokens(
    folder: Path,
    tokens: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    records: np.ndarray,
    advance: Callable[[int], object],
) -> None:
    sizes = lengths[records]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    _save_array(folder / "record_offsets.npy", offsets)
    total = int(offsets[-1])
    if total == 0:
        _save_array(folder / "tokens.npy", np.empty(0, tokens.dtype))
        return
    out = np.lib.format.open_memmap(folder / "tokens.npy", "w+", tokens.dtype, (total,))
    for begin, end in _blocks(sizes):
        block = tokens[_spans(starts[records[begin:end]], sizes[begin:end])]
        out[offsets[begin] : offsets[end]] = block
        advance(len(block))
    out.flush()


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    names = ("tokens", "record_offsets", "user_offsets")
    arrays = [map_array(folder / f"{name}.npy") for name in names]
    facts = metadata | {
        "format_version": FORMAT_VERSION,
        "num_users": len(arrays[2]) - 1,
        "num_records": len(arrays[1]) - 1,
        "num_tokens": len(arrays[0]),
        "content_digest": content_digest(*arrays),
    }
    _files.write(folder / METADATA, json.dumps(facts, indent=2, sort_keys=True) + "\n")
