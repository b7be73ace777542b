"""Programs that JAX compiled, kept from one command to the next in the user's cache folder.

Most of the first seconds of a command are compilation. JAX can keep its results on disk; here that
is switched on for the command line alone, and made fit to be on by default:

* What a host program chose stays: nothing is done where JAX is imported already or
  ``JAX_COMPILATION_CACHE_DIR`` is set. ``MFOPT_COMPILED`` is another folder, or ``off``;
  ``mfopt --no-compile-cache`` is for one command.
* Whoever can write an entry can run code as whoever reads it: the folder has mode 0700, and one
  that is another user's, or that others may write to, is not used.
* A program is for one kind of processor: each has its own folder, so that machines may share a
  home.
* A bound on the size makes JAX take a lock for every read and write, so that no process sees what
  another is writing; the least recently used go first.
* The programs of this package are kept whole beside that (:mod:`mfopt._kept`), and found without
  being traced: most of what JAX's own cache leaves to do.
* What a process that was killed left half written would stop JAX's own clearing for good, and a
  damaged entry might not be seen as one: at the start of a command both are removed, by a thread
  beside the import of JAX, whose first read waits for the same lock. An entry is whole once its
  time stamp is there; from then on the SHA-256 beside it tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from mfopt import _kept
from mfopt._identity import processor

VARIABLE = "MFOPT_COMPILED"
MOST_BYTES = 2**26
_OFF = ("off", "0", "no", "false")
_ENTRY, _STAMP, _SEAL = "-cache", "-atime", "-sha256"  # the first two are JAX's
_PATIENCE = 2.0  # seconds for the lock


def switch_on() -> Path | None:
    """Let JAX, imported later, keep what it compiles; the folder, or None where it is not used."""
    given = os.environ.get(VARIABLE, "")
    if "jax" in sys.modules or "JAX_COMPILATION_CACHE_DIR" in os.environ or given.lower() in _OFF:
        return None
    base = Path(given) if given else platformdirs.user_cache_path("mfopt", appauthor=False)
    folder = base / "compiled" / processor()
    programs = folder / "programs"
    try:
        for part in (folder.parent, folder, programs):
            part.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _own(part):
                return None
    except OSError:  # a home that cannot be written is no reason to fail
        return None
    if not _tidy_beside(folder):
        return None
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MOST_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    _kept.use(programs)
    # what cannot be read or written is compiled: nobody needs to know
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return folder


def _tidy_beside(folder: Path) -> bool:
    """:func:`tidy` in a thread; whether its lock, which is JAX's, was to be had.

    The lock is held when this returns, so that JAX reads nothing before. To look at 64 MiB takes
    a tenth of a second, most of it without the interpreter.
    """
    begun, problems = threading.Event(), list[OSError]()

    def work() -> None:
        try:
            tidy(folder, begun.set)
        except OSError as problem:
            problems.append(problem)
        finally:
            begun.set()

    threading.Thread(target=work, name="tidying compiled programs").start()
    begun.wait()
    return not problems


def tidy(folder: Path, begun: Callable[[], object] = lambda: None) -> None:
    """Remove what is not whole or not as it was written; seal what is new.

    Args:
      folder: of JAX's entries.
      begun: called once the lock is held, before anything is read.
    """
    with _locked(folder) as held:
        begun()
        if not held:
            return
        entries = {path.name.removesuffix(_ENTRY) for path in folder.glob(f"*{_ENTRY}")}
        for name in entries:
            entry, stamp, seal = (folder / f"{name}{suffix}" for suffix in (_ENTRY, _STAMP, _SEAL))
            digest = hashlib.sha256(entry.read_bytes()).hexdigest()
            whole = stamp.is_file() and stamp.stat().st_size == 8
            if not seal.exists() and whole:
                seal.write_text(digest)
            elif not whole or seal.read_text() != digest:
                for path in (entry, stamp, seal):
                    path.unlink(missing_ok=True)
        for suffix in (_STAMP, _SEAL):
            for path in folder.glob(f"*{suffix}"):
                if path.name.removesuffix(suffix) not in entries:
                    path.unlink()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """JAX's own lock; False where others keep it for long."""
    import filelock

    lock = filelock.FileLock(folder / ".lockfile", timeout=_PATIENCE)
    try:
        lock.acquire()
    except filelock.Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _own(folder: Path) -> bool:
    """Whether nobody else may write to it; a mode that is wider is set right first."""
    if not hasattr(os, "getuid"):
        return True
    found = folder.stat()
    if found.st_uid != os.getuid():
        return False
    if found.st_mode & 0o077:
        folder.chmod(0o700)
    return not folder.is_symlink()
