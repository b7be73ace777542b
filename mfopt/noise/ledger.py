"""The ledger of a noise key: what was released with it, in a file that outlives the process.

In ``mfopt-keys/``, or another folder that a run names, lies ``<hash of the key>.ledger``, mode
0600, to which each step adds a line: its number and a digest of the sum that its noise was added
to. A run that resumes from an older state may repeat these steps, with the same sums; another sum
with the same noise would show the data by the difference, and is refused. The file is locked as
long as its run lives.

A line outlives the process. To outlive a power cut too, the steps of some seconds are reserved at
once, by a line that is on the disk before the first of them. What a block lacks after another start
of the machine may have been released: a run that resumes leaves these steps out.

A state of JAX is a value, and can be copied: all copies of a process share the ledger of their key.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np

from mfopt._runtime import _check, _files

KEY_FOLDER = "mfopt-keys"
_LOST = "-" * 32  # in place of the digest of a step that may have been released
_STARTS = Path("/proc/sys/kernel/random/boot_id")  # names a start of the machine
_START = _STARTS.read_text().strip() if _STARTS.is_file() else ""
_AHEAD = 5.0  # seconds of steps that are reserved at once, about
_by_handle: dict[str, Ledger] = {}  # of the keys of JAX states in this process
LOCK = threading.RLock()  # the callbacks of a compiled program come from its threads


def path_of(
    key: np.ndarray, stored: str | None = None, folder: str | os.PathLike[str] = KEY_FOLDER
) -> Path:
    """Path of the ledger of a key: ``stored`` if it is there, or ``folder``/<hash>.ledger.

    Args:
      key: uint32 (8,).
      stored: where it was when a state was written.
      folder: of keys and ledgers.
    """
    if stored is not None and Path(stored).is_file():
        return Path(stored)
    digest = hashlib.sha256(b"mfopt ledger" + key.astype("<u4").tobytes()).hexdigest()
    return Path(folder).absolute() / f"{digest[:16]}.ledger"


def begin(key: np.ndarray) -> Ledger:
    """The ledger of a key in this process; a new one, in memory, where there is none."""
    path = path_of(key)
    with LOCK:
        return resume(key) if path.is_file() else _by_handle.setdefault(path.stem, Ledger())


def resume(key: np.ndarray, stored: str | None = None, *, older: bool = False) -> Ledger:
    """The ledger of a key that this process has, or that it reads from the file of another one.

    Args:
      key: uint32 (8,).
      stored: where it was when the state was written.
      older: take a key without a ledger, of a version that wrote none, and begin one.

    Raises:
      UsageError: there is no file of it; and as :meth:`Ledger.resume`.
    """
    handle = path_of(key).stem
    with LOCK:
        if handle in _by_handle:
            return _by_handle[handle]
        ledger = Ledger()
        ledger.resume(path_of(key, stored), older=older)
        return _by_handle.setdefault(handle, ledger)


def is_counted(key: np.ndarray) -> bool:
    """Return True if this process has a ledger of the key."""
    return path_of(key).stem in _by_handle


def store(key: np.ndarray) -> Path:
    """Path of the ledger of a key, which is stored from now on."""
    with LOCK:
        kept = begin(key)
        return kept.store(path_of(key))


class Ledger:
    """Steps that one noise key has released; in memory until the key itself is stored."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._unwritten: list[str] = []  # lines that the file lacks
        self._constants = ""
        self._reserved = 0  # steps before this one are on the disk, or their reservation is
        self._block, self._reserved_at = 1, 0.0  # steps of the last reservation, and when
        self._path: Path | None = None
        self._descriptor = -1  # of the file, once there is one
        self._process = os.getpid()

    @property
    def released(self) -> int:
        """Steps up to the last one that was certainly released."""
        return max((n + 1 for n, digest in self._digests.items() if digest != _LOST), default=0)

    def store(self, path: Path) -> Path:
        """The file of a key that is stored from now on: at ``path`` unless it has one.

        Raises:
          UsageError: this is a copy of the process.
        """
        self._refuse_copy()
        if self._path is None:
            self._open(path)
        self._write_lines(self.next_step - 1)
        os.fsync(self._descriptor)
        assert self._path is not None
        return self._path

    def resume(self, path: Path, *, older: bool = False) -> None:
        """Continue the ledger of a stored key.

        Args:
          path: of its file.
          older: take a key without a ledger, of a version that wrote none, and begin one.

        Raises:
          UsageError: the file is not there; a run that lives has it, in this process or another; or
          others may read it.
        """
        if self._path == path:
            return
        if not older and not path.is_file():
            rule = f"comes from a file, and {path} is not there, which says what was released"
            way_out = "Copy that file from where the run was made; or, for a state that an older "
            way_out += "version or other code wrote and that no run has continued, make it empty, "
            way_out += "mode 0600."
            raise _check.reject("state", f"ledger {path.stem}", rule, way_out)
        self._open(path)
        text = path.read_text()
        is_cut = text and not text.endswith("\n")  # where the process was killed
        self._unwritten = ["\n"] if is_cut else []
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        # a cut line is one word, or has a digest of fewer digits
        self._digests.update((int(x[0]), x[1]) for x in lines if len(x) == 2 and len(x[1]) == 32)
        _, reserved, start = next((x for x in reversed(lines) if len(x) == 3), ("", 0, _START))
        lost = range(self.next_step, int(reserved) if start != _START else 0)
        self._digests.update(dict.fromkeys(lost, _LOST))
        self._unwritten += [f"{step} {_LOST}\n" for step in lost]
        if self._unwritten:
            self._write_lines(self.next_step - 1)

    @property
    def next_step(self) -> int:
        """The step after the last one that was released, or may have been."""
        return max(self._digests, default=-1) + 1

    def first_free(self, step: int) -> int:
        """The step from which a run resumed at ``step`` continues: after those that are lost."""
        lost = (number for number, digest in self._digests.items() if digest == _LOST)
        return max(step, *(number + 1 for number in lost), 0)

    def _open(self, path: Path) -> None:
        """Make the file, for its owner only, or open it, and lock it while this object lives."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            _files.require_secret("ledger", path, "It says what the run released")
            if not _files.lock(descriptor):
                gc.collect()  # a run that was dropped lives on in its optimizer's hooks until then
                if not _files.lock(descriptor):
                    rule = "belongs to a run that is alive: two would release the same noise"
                    way_out = "End that run, or delete it, and load again."
                    raise _check.reject("state", path.name, rule, way_out)
        except _check.UsageError:
            os.close(descriptor)
            raise
        self._path, self._descriptor = path, descriptor
        weakref.finalize(self, _close, descriptor, self._digests, os.getpid())

    def hold(self, constants: str) -> None:
        """Note a digest of the arrays that the gradients of this run depend on, in this process.

        Raises:
          UsageError: it is another one than before: arrays beside the parameters have changed.
        """
        self._constants = self._constants or constants
        if constants != self._constants:
            rule = "depends on arrays beside parameters and example that are not those of the first"
            rule += " step: they may hold other examples, without noise"
            way_out = "Keep them as they are; or, if they follow from public or released values "
            way_out += "alone, give them as `public`."
            raise _check.reject("function", "of the gradient of an example", rule, way_out)

    def release(self, step: int, content: bytes) -> None:
        """Note that ``step`` is released with the sum of this content, of which a hash is kept.

        Raises:
          UsageError: it was released with another sum; or this is a copy of the process.
          OSError: the file has no space for it: then no noise may be made.
        """
        self._refuse_copy()
        digest = hashlib.sha256(content).hexdigest()[:32]
        if step not in self._digests:
            self._digests[step] = digest
            self._unwritten.append(f"{step} {digest}\n")
        elif self._digests[step] != digest:
            rule = f"was released already, with another sum: {self.next_step} steps were "
            rule += "released with this key, and the same noise would show the data by the "
            rule += "difference"
            way_out = "Resume from the newest state, or repeat the steps exactly (data, model, "
            way_out += "rate, dropout); or make a new run: both count against privacy."
            raise _check.reject("state", f"step {step}", rule, way_out)
        if self._path is not None:
            self._write_lines(step)

    def _refuse_copy(self) -> None:
        if os.getpid() != self._process:
            rule = "is a copy of the process that the run lives in: both would release the same"
            rule += " noise"
            way_out = "Train and save in that process; or make the run after the fork."
            raise _check.reject("process", os.getpid(), rule, way_out)

    def _write_lines(self, step: int) -> None:
        """Write the lines that the file lacks, or nothing of them, and reserve ``step``.

        Raises:
          OSError: there is no space for them; the next call writes them.
        """
        lines, block, is_new = self._unwritten, self._block, step >= self._reserved
        if is_new:
            pace = _AHEAD / max(time.monotonic() - self._reserved_at, 1e-9)
            block = max(1, int(block * min(8.0, pace))) if _START else 1
            lines = [*lines, f"until {step + block} {_START or '-'}\n"]
        data, written = "".join(lines).encode(), 0
        try:
            written = os.write(self._descriptor, data)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            if is_new:
                os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise
        if is_new:
            self._block, self._reserved, self._reserved_at = block, step + block, time.monotonic()
        self._unwritten.clear()


def _close(descriptor: int, digests: dict[int, str], process: int) -> None:
    """Close a ledger; in the process that wrote it nothing is reserved any more."""
    if os.getpid() == process:
        with contextlib.suppress(OSError):  # its folder may be gone
            os.write(descriptor, f"until {max(digests, default=-1) + 1} {_START or '-'}\n".encode())
    os.close(descriptor)
