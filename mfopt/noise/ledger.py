"""The ledger of a noise key: what was released with it, in a file that outlives the process.

Beside the key that seals a run's states lies ``<handle>.ledger``, mode 0600, to which each step
adds a line: its number and a digest of the sum that its noise was added to. A run that resumes from
an older state may repeat these steps, with the same sums; another sum with the same noise would
show the data by the difference, and is refused. The file is locked as long as its run lives.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

from mfopt._runtime import _check, _files


class Ledger:
    """Steps that one noise key has released; in memory until the key itself is stored."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._path: Path | None = None
        self._descriptor = -1  # of the file, once there is one

    def store(self, path: Path) -> None:
        """Begin the file of a key that is stored from now on; nothing where it has one."""
        if self._path is None:
            self._open(path)
            lines = (f"{step} {digest}\n" for step, digest in self._digests.items())
            os.write(self._descriptor, "".join(lines).encode())

    def resume(self, path: Path) -> None:
        """Continue the ledger of a stored key.

        Raises:
          UsageError: a run that lives has it, in this process or another, or others may read it.
        """
        if self._path == path:
            return
        self._open(path)
        text = path.read_text()
        if text and not text.endswith("\n"):  # cut, where the process was killed
            os.write(self._descriptor, b"\n")
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        # a cut line is one word, or has a digest of fewer digits
        self._digests = {int(x[0]): x[1] for x in lines if len(x) == 2 and len(x[1]) == 32}

    def _open(self, path: Path) -> None:
        """Make the file, for its owner only, or open it, and lock it while this object lives."""
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
        weakref.finalize(self, os.close, descriptor)

    def release(self, step: int, digest: str) -> None:
        """Note that ``step`` is released with the sum of this digest.

        Raises:
          UsageError: it was released with another sum.
        """
        if step not in self._digests:
            self._digests[step] = digest
            if self._path is not None:
                os.write(self._descriptor, f"{step} {digest}\n".encode())
        elif self._digests[step] != digest:
            rule = f"was released already, with another sum: {max(self._digests) + 1} steps were "
            rule += "released with this key, and the same noise would show the data by the "
            rule += "difference"
            way_out = "Resume from the newest state, or repeat the steps exactly (data, model, "
            way_out += "rate, dropout); or make a new run: both count against privacy."
            raise _check.reject("state", f"step {step}", rule, way_out)
