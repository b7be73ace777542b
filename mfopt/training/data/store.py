"""The user data store: token arrays on disk, grouped by user, mapped and never loaded.

A store is a folder of plain ``.npy`` arrays and one JSON file, readable with numpy alone:

====================  ==============  ========================================================
``tokens.npy``        (T,) uint16/32  every record's tokens, one after the other; 2^31 is added
                                      to those that are read and not predicted (a prompt's)
``record_offsets.npy``  (R+1,) int64  record r is ``tokens[record_offsets[r]:record_offsets[r+1]]``
``user_offsets.npy``  (U+1,) int64    user u has records ``user_offsets[u]:user_offsets[u+1]``
``user_names.npy``    (N,) uint8      UTF-8 names, one after the other
``name_offsets.npy``  (U+1,) int64    where each name begins in ``user_names``
``metadata.json``                     version, tokenizer digest, counts, provenance, content digest
====================  ==============  ========================================================

A *user* is the privacy unit and a *record* is one text of that user; records of one user are
neighbours. No Python object is made per record or user: all fetches are array operations.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject

FORMAT_VERSION = 1
CONTEXT = np.uint32(1 << 31)  # added to a token that is read and not predicted
METADATA = "metadata.json"
PARTS = ("train", "held-out-users", "held-out-records", "public")
ARRAYS = ("tokens", "record_offsets", "user_offsets")
Rows = tuple[np.ndarray, np.ndarray]  # tokens (..., L) int32, and their mask, bool
_CHUNK = 1 << 18
_DAMAGED = "The store is damaged; build it again."
_MAKE_ONE = "Make one with `mfopt data build`."


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest token type: uint16 up to 65,536 entries, else uint32."""
    _check.integer("vocab_size", vocab_size, at_most=int(CONTEXT))
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def content_digest(tokens: np.ndarray, record_offsets: np.ndarray, user_offsets: np.ndarray) -> str:
    """SHA-256 over the three arrays that training depends on, hex; read in chunks."""
    digest = hashlib.sha256()
    for array in (tokens, record_offsets, user_offsets):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        for part in _chunks(array):
            digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()


def _chunks(array: np.ndarray, extra: int = 0) -> Iterator[np.ndarray]:
    """Parts of an array, each with ``extra`` of the next; of a map one is in memory at once."""
    for begin in range(0, len(array), _CHUNK):
        yield array[begin : begin + _CHUNK + extra]
        give_back(array)


def give_back(array: object) -> None:
    """Let the system have the pages of a mapped array that were read; they are read again."""
    while isinstance(array, np.ndarray):
        array = array.base
    if isinstance(array, mmap.mmap):
        array.madvise(mmap.MADV_DONTNEED)


@dataclasses.dataclass(eq=False, repr=False)
class TokenStore:
    """Records of tokens grouped by user; arrays may be memory maps.

    The arrays are those of its files; users without records are allowed. ``metadata`` are JSON-able
    facts, ``tokenizer_digest`` and ``vocab_size`` among them. Refused are arrays that do not fit.
    """

    tokens: np.ndarray
    record_offsets: np.ndarray
    user_offsets: np.ndarray
    metadata: JsonObject = dataclasses.field(default_factory=dict)
    path: Path | None = None

    def __post_init__(self) -> None:
        ends = {"record_offsets": len(self.tokens), "user_offsets": len(self.record_offsets) - 1}
        for name, end in ends.items():
            offsets = getattr(self, name)
            first_and_last = offsets[[0, -1]].tolist() if offsets.ndim == 1 and len(offsets) else []
            if first_and_last != [0, end]:
                raise _check.reject(name, first_and_last, f"must run from 0 to {end}", _DAMAGED)

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Map the store in folder ``path``; nothing but the offsets' ends is read."""
        folder = Path(path)
        if not (folder / METADATA).is_file():
            raise _check.reject("path", str(folder), "is not a token store", _MAKE_ONE)
        try:
            metadata = json.loads((folder / METADATA).read_text(encoding="utf-8"))
            version = metadata.get("format_version")
            kinds = type(metadata.get("vocab_size")), type(metadata.get("content_digest"))
            if version == FORMAT_VERSION and kinds != (int, str):
                raise ValueError("vocab_size or content_digest")
        except (ValueError, AttributeError, RecursionError) as error:
            raise _check.reject("path", str(folder), f"has unreadable metadata ({error})") from None
        if version != FORMAT_VERSION:
            rule = f"this mfopt reads version {FORMAT_VERSION}"
            way_out = "Build the store again with `mfopt data build`."
            raise _check.reject("format_version", version, rule, way_out)
        tokens, records, users = (map_array(folder / f"{name}.npy") for name in ARRAYS)
        return cls(tokens, records, users, metadata, folder)

    @classmethod
    def from_records(
        cls, users: Sequence[Sequence[ArrayLike]], vocab_size: int = 1 << 16, **metadata: object
    ) -> TokenStore:
        """A small store in memory: ``users[u][j]`` is the j-th record of user u.

        >>> store = TokenStore.from_records([[[1, 2], [3]], [], [[4, 5, 6]]])
        >>> store.num_users, store.num_records, store.records_per_user().tolist()
        (3, 3, [2, 0, 1])
        """
        dtype = token_dtype(vocab_size)
        records = [np.asarray(record, dtype) for user in users for record in user]
        tokens = np.concatenate([np.empty(0, dtype), *records])
        record_offsets = np.cumsum([0, *map(len, records)], dtype=np.int64)
        user_offsets = np.cumsum([0, *map(len, users)], dtype=np.int64)
        facts = {
            "format_version": FORMAT_VERSION,
            "vocab_size": vocab_size,
            "tokenizer_digest": "",
            "content_digest": content_digest(tokens, record_offsets, user_offsets),
        }
        return cls(tokens, record_offsets, user_offsets, facts | metadata)

    @property
    def num_users(self) -> int:
        """Privacy units U."""
        return len(self.user_offsets) - 1

    @property
    def num_records(self) -> int:
        """Records R."""
        return len(self.record_offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens T over all records."""
        return len(self.tokens)

    @property
    def vocab_size(self) -> int:
        """Entries of the tokenizer; every token is smaller."""
        return int(self.metadata["vocab_size"])

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of tokens and offsets, hex, from the arrays; :meth:`verify` compares metadata."""
        return content_digest(self.tokens, self.record_offsets, self.user_offsets)

    def records_of(self, user: int) -> range:
        """The record numbers of ``user``."""
        _check.integer("user", user, at_least=0, at_most=self.num_users - 1)
        return range(int(self.user_offsets[user]), int(self.user_offsets[user + 1]))

    def records_per_user(self) -> np.ndarray:
        """(U,) int64."""
        return np.diff(self.user_offsets)

    def record_lengths(self) -> np.ndarray:
        """Tokens in each record: (R,) int64."""
        return np.diff(self.record_offsets)

    def batch(self, records: ArrayLike, length: int) -> Rows:
        """The first ``length`` tokens of each record, padded with 0 at the end.

        ``records``: (B,) record numbers; -1 stands for an empty record (all padding).

        Returns:
            (tokens (B, L) int32, mask (B, L) bool); mask is True on real tokens that are predicted
            or begin a prediction.
        """
        numbers = np.asarray(records, np.int64)
        count = self.num_records
        if numbers.ndim != 1:
            raise _check.reject("records", numbers.shape, "must be one-dimensional")
        if len(wrong := numbers[(numbers < -1) | (numbers >= count)]):
            worst = int(wrong[0])
            raise _check.reject("records", worst, f"must lie in [0, {count}), or be -1 for padding")
        start = self.record_offsets[np.maximum(numbers, 0)]
        sizes = np.where(numbers < 0, 0, self.record_offsets[numbers + 1] - start)
        position = np.arange(_check.integer("length", length), dtype=np.int64)
        mask = position < sizes[:, None]
        tokens = np.zeros(mask.shape, self.tokens.dtype)
        tokens[mask] = self.tokens[(start[:, None] + position)[mask]]
        return (tokens % CONTEXT).astype(np.int32), mask & (tokens < CONTEXT)

    def in_chunks(self, length: int) -> TokenStore:
        """The same tokens, each record of more than ``length`` cut into records of at most that.

        A record of n tokens becomes ceil(n / length) of nearly equal sizes, so that all are read
        and none has a single token. Users, and the digest, are those of this store.
        """
        length = _check.integer("length", length, at_least=2)
        begin = np.asarray(self.record_offsets[:-1])
        sizes = self.record_lengths()
        counts = np.maximum(1, -(-sizes // length))
        ends = np.concatenate([[0], np.cumsum(counts)])
        chunk_index = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)  # of a chunk in its record
        of_record = [np.repeat(values, counts) for values in (begin, sizes, counts)]
        offsets = of_record[0] + chunk_index * of_record[1] // of_record[2]
        offsets = np.append(offsets, self.record_offsets[-1])
        chunks = TokenStore(self.tokens, offsets, ends[self.user_offsets], self.metadata, self.path)
        chunks.digest = self.digest
        return chunks

    def verify(self) -> None:
        """Read everything once: order of offsets, token range, content digest.

        The digest alone says that a store is as it was written, not that its users are apart.
        """
        for name in ("record_offsets", "user_offsets"):
            offsets = getattr(self, name)
            if any(np.any(np.diff(part) < 0) for part in _chunks(offsets, extra=1)):
                raise _check.reject(name, str(self.path), "must not decrease")
        largest = max((int((part % CONTEXT).max()) for part in _chunks(self.tokens)), default=-1)
        if largest >= self.vocab_size:
            raise _check.reject("tokens", largest, f"must be below {self.vocab_size}")
        stated = self.metadata["content_digest"]
        if self.digest != stated:
            rule = f"metadata of {self.path} says {stated}: the data was changed or damaged"
            way_out = "Build the store again; a run can only resume with the data it began with."
            raise _check.reject("content_digest", self.digest, rule, way_out)


def map_array(path: Path) -> np.ndarray:
    """The array of a ``.npy`` file, mapped read-only."""
    if not path.is_file():
        raise _check.reject("path", str(path), "is missing", _DAMAGED)
    try:
        # A file of zero bytes of data cannot be mapped; it is read, which costs nothing.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError:
        array = np.load(path, allow_pickle=False)
    return array.view(np.ndarray)


def open_parts(path: str | Path, name: str = "path") -> dict[str, TokenStore]:
    """The stores under ``path``: {"train": store} for a store, else those of ``PARTS`` it holds.

    ``train`` is always there; all but ``public`` are private. An error says ``name``.
    """
    folder = _check.path(name, path)
    if (folder / METADATA).is_file():
        return {"train": TokenStore.open(folder)}
    existing = [part for part in PARTS if (folder / part / METADATA).is_file()]
    stores = {part: TokenStore.open(folder / part) for part in existing}
    if "train" not in stores:
        rule = "holds no token store" if folder.exists() else "does not exist"
        raise _check.reject(name, str(folder), rule, _MAKE_ONE)
    return stores
