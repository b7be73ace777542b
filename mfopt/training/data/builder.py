"""Writing of token stores from records in any order: a file in that order, then a pass by user.

Tokens go into a temporary file as they come; in memory are the names of the users and three numbers
a record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mfopt._runtime import _check, _files
from mfopt._runtime._types import JsonObject
from mfopt.errors import FailureError
from mfopt.progress import Progress, Report, silent
from mfopt.training.data import store as stores
from mfopt.training.data.store import CONTEXT, token_dtype
from mfopt.training.secrets import GOLDEN, mix

_EVERY = 1000  # records between two reports of progress


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
    """Collect records in a temporary file and write them as stores grouped by user.

    ``folder``: where the file is, which nobody else can open; ``context``: some tokens are read and
    not predicted.
    """

    def __init__(self, folder: str | Path, vocab_size: int, *, context: bool = False) -> None:
        self.vocab_size = vocab_size
        self.dtype = np.dtype(np.uint32) if context else token_dtype(vocab_size)
        self._tokens = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (until the end)
        self._users: dict[bytes, int] = {}  # numbered in the order in which they first came
        self._owners = array("q")
        self._sizes = array("q")

    def __exit__(self, *_: object) -> None:
        self._tokens.close()

    @property
    def num_records(self) -> int:
        """Records so far."""
        return len(self._owners)

    def add(self, users: Sequence[str], records: Sequence[np.ndarray]) -> None:
        """Append records: ``records[i]`` is a (length,) integer array of user ``users[i]``."""
        if len(users) != len(records):
            raise _check.reject("records", len(records), f"must be as many as users: {len(users)}")
        if not records:
            return
        tokens = np.concatenate(records)
        largest = int((tokens % CONTEXT).max(initial=0))
        if not (tokens.min(initial=0) >= 0 and largest < self.vocab_size):
            raise _check.reject("tokens", largest, f"must be below {self.vocab_size}")
        self._tokens.write(tokens.astype(self.dtype).tobytes())
        self._sizes.extend(map(len, records))
        for user in users:
            owner = self._users.setdefault(user.encode("utf-8", "replace"), len(self._users))
            self._owners.append(owner)

    def finish(
        self,
        folder: str | Path,
        metadata: JsonObject,
        *,
        name: str = "train",
        hold_out: HoldOut | None = None,
        progress: Report = silent,
    ) -> None:
        """Group by user and write ``folder/<name>`` (and the held-out parts).

        Users stand in the order in which they first came, records of a user in the order in which
        they came.

        Args:
            folder, name: where the parts go, and the name of the one that is not held out.
            metadata: facts for each part's ``metadata.json``; ``tokenizer_digest`` among them.
            hold_out, progress: what is kept from it, and callback for what has been grouped.
        """
        hold_out = hold_out or HoldOut()
        names = list(self._users)
        # a user's hold-out follows from a 128-bit digest of the name
        digests = [hashlib.blake2b(name, digest_size=16).digest() for name in names]
        keys = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        owners = np.array(self._owners, np.int64)
        order = np.argsort(self._owners, kind="stable")
        counts = np.bincount(owners, minlength=len(names))
        position = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        seed = 2 * hold_out.seed
        outside = _uniform(keys, seed) < hold_out.users
        held_out = _uniform(keys[owners[order]], seed + 1, position) < hold_out.records
        part_of = np.where(outside[owners[order]], 1, np.where(held_out, 2, 0))
        parts = {
            part: order[part_of == number]
            for number, part in enumerate((name, "held-out-users", "held-out-records"))
        }
        if not len(parts[name]):
            raise FailureError(f"No record is left for the part {name}; nothing written.")
        for part, records in parts.items():
            if len(records):
                facts = {**metadata, "part": part, "vocab_size": self.vocab_size}
                self._write(Path(folder) / part, records, owners[records], names, facts, progress)

    def _write(
        self,
        folder: Path,
        records: np.ndarray,
        owners: np.ndarray,
        names: Sequence[bytes],
        metadata: JsonObject,
        progress: Report,
    ) -> None:
        """Write the store of some records (R,), by user, and their ``owners`` (R,)."""
        folder.mkdir(mode=0o700, parents=True)
        sizes = np.array(self._sizes, np.int64)
        user_begins = np.flatnonzero(np.diff(owners, prepend=-1))
        texts = [names[owner] for owner in owners[user_begins].tolist()]
        begins = np.cumsum(sizes) - sizes
        offsets = np.cumsum([0, *sizes[records]])
        arrays = {
            "record_offsets": offsets,
            "user_offsets": np.append(user_begins, len(records)),
            "name_offsets": np.cumsum([0, *map(len, texts)]),
            "user_names": np.frombuffer(b"".join(texts), np.uint8),
        }
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)
        self._tokens.flush()
        tokens = np.lib.format.open_memmap(
            folder / "tokens.npy", "w+", self.dtype, (int(offsets[-1]),)
        )
        if len(tokens):
            spool = np.memmap(self._tokens, self.dtype, "r")
            for i, record in enumerate(records.tolist()):
                begin = begins[record]
                tokens[offsets[i] : offsets[i + 1]] = spool[begin : begin + sizes[record]]
                if i % _EVERY == 0:
                    progress(Progress(f"grouping {metadata['part']}", i, len(records), "records"))
        tokens.flush()
        hashed = tokens, arrays["record_offsets"], arrays["user_offsets"]
        facts = metadata | {
            "format_version": stores.FORMAT_VERSION,
            "num_users": len(user_begins),
            "num_records": len(records),
            "num_tokens": len(tokens),
            "content_digest": stores.content_digest(*hashed),
        }
        _files.write(folder / stores.METADATA, facts)


def _uniform(keys: np.ndarray, salt: int, number: int | np.ndarray = 0) -> np.ndarray:
    """Numbers in [0, 1) from keys (n, 2), a salt and numbers: two rounds of SplitMix64."""
    (low, high) = keys.T
    numbers = np.asarray(number, np.uint64)
    mixed = low ^ (numbers << np.uint64(32)) ^ np.uint64(salt % (1 << 64))
    with np.errstate(over="ignore"):
        mixed = mix(mix(mixed + (high ^ numbers) - GOLDEN))
    return np.asarray((mixed >> np.uint64(11)) * 2.0**-53)
