"""Files that appear whole or not at all: the one writer of everything that mfopt puts on disk.

A file is written under a hidden name in its own folder, flushed to the disk, read again where the
caller can check it, and only then moved into place. A reader sees the old file, the new one or
none, whatever is killed when; of two writers without ``force`` one wins and the other is told.

The hidden file is locked as long as its writer lives, so what a killed run left behind can be told
from what another run is writing at this moment, on network file systems too. :func:`sweep` removes
the former.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.errors import FailureError, UsageError

try:
    import fcntl
except ImportError:  # Windows refuses to remove a file that is open: nothing needs to be locked
    fcntl = None  # type: ignore[assignment]

Content: TypeAlias = bytes | str | JsonObject | Callable[[BinaryIO], object]

_PART = re.compile(r"\..*\.[0-9a-f]{12}\.mfopt-part")
_YOUNG = 60.0  # seconds in which a file may not be locked yet by the run that just made it
EXISTS = "Give `force=True` to replace it."


def write(
    path: str | os.PathLike[str],
    content: Content,
    *,
    force: bool = True,
    private: bool = False,
    check: Callable[[Path], object] | None = None,
) -> Path:
    """Write a file whole or not at all; returns its path.

    Args:
      path: where the file is to be. Its folder must exist.
      content: bytes, a text (written as UTF-8), an object to be written as JSON, or a function
        that writes to a binary stream (or to the file ``stream.name``, where a library wants a
        path).
      force: replace a file of that name; otherwise it is left alone, even one that appeared a
        moment ago.
      private: readable by the owner only, from the first byte on; otherwise as the umask says.
      check: called with the path of the complete hidden file before it takes its place; what it
        raises leaves everything as it was.

    Raises:
      FileExistsError: ``path`` exists and ``force`` is not set.
      OSError: disk full, no permission, ....
    """
    path = Path(path)
    if isinstance(content, dict):
        content = json.dumps(content, indent=2, sort_keys=True) + "\n"
    part, descriptor = _open_part(path, 0o600 if private else 0o666)
    try:
        # for writers that want a path, stream.name is it
        with open(part, "wb", opener=lambda *_: descriptor) as stream:
            if callable(content):
                content(stream)
            else:
                stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
            if check is not None:
                check(part)
            # still locked: nobody sweeps it away
            _place(part, path, force)
    except OSError as problem:
        if problem.filename is None and problem.errno is not None:  # a write does not name its file
            problem.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return path


def write_beside(
    path: str | os.PathLike[str], save: Callable[[Path, bool], Path], *, force: bool
) -> Path:
    """Keep a result that took long: at ``path``, or else under the first other name that works.

    Tried in turn: ``path``; the same folder with ``-2``, ``-3``, … before the suffix (the file
    appeared meanwhile); the working folder, the home folder and the folder for temporary files
    (disk full, the folder is gone or locked).

    Args:
      save: called as ``save(path, force)``; raises OSError or UsageError where that does not work.
      force: whether ``path`` itself may be replaced; no other name ever is.

    Returns:
      Where it is. A caller that gets another path than it asked for says so.

    Raises:
      FailureError: nowhere, with the reason at each place.
    """
    path = Path(path)
    reasons: list[str] = []

    def tried(candidate: Path, replace: bool) -> bool:
        try:
            save(candidate, replace)
        except (OSError, UsageError) as problem:
            reasons.append(f"{candidate}: {problem}")
            return False
        return True

    if tried(path, force):
        return path
    for folder in _fallback_folders(path.parent):
        for candidate in _other_names(folder / path.name):
            if tried(candidate, False):
                return candidate
            if not candidate.exists():  # this folder fails for another reason than the name
                break
    raise FailureError("the result could be written nowhere: " + "; ".join(reasons))


def npz(
    arrays: Mapping[str, np.ndarray], *, compress: bool = False
) -> Callable[[BinaryIO], object]:
    """The content of an ``.npz`` file of plain arrays.

    ``np.savez`` has its keyword ``allow_pickle`` only from numpy 2.2 on; an older one would store
    it as one more array. So pickles are kept out here.
    """
    for name, value in arrays.items():
        if value.dtype.hasobject:
            raise TypeError(f"array {name} holds Python objects")
    save: Any = np.savez_compressed if compress else np.savez
    return lambda stream: save(stream, **arrays)


def check_zip(path: Path) -> None:
    """Read every byte of an ``.npz`` again, against its checksums, in little memory.

    Raises:
      OSError: it does not read as it was written.
    """
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise OSError(errno.EIO, f"array {damaged} does not read as it was written", str(path))


def check_output(
    path: str | os.PathLike[str],
    *,
    force: bool,
    name: str = "path",
    suffixes: Sequence[str] = (),
    folder: bool = False,
) -> Path:
    """Refuse now, rather than after the work, what could not be written; sweep what is around it.

    Args:
      name: of the argument, for the message.
      suffixes: the endings allowed; any where none is given.
      folder: the output is a folder, for :func:`new_folder`.

    Raises:
      UsageError: wrong ending, exists (without ``force``), or cannot be written.
    """
    path = _check.path(name, path)
    _check.kind("force", force, bool)
    if not path.name:
        raise _check.reject(name, str(path), "is not the name of a file")
    if suffixes and path.suffix.lower() not in suffixes:
        raise _check.reject(name, str(path), f"must end in {' or '.join(suffixes)}")
    if _is_special(path) and not folder:
        raise _check.reject(name, str(path), "is a directory or a device")
    if os.path.lexists(path) and not force:
        raise _check.reject(name, str(path), "exists already", EXISTS)
    if not path.parent.is_dir():
        raise _check.reject(
            name, str(path), f"its folder {path.parent} does not exist", "Make it first."
        )
    sweep(path.parent)
    try:
        part, descriptor = _open_part(path, 0o600)
        os.close(descriptor)
        part.unlink()
    except OSError as problem:
        raise _check.reject(name, str(path), f"cannot be written ({problem.strerror})") from None
    return path


def require_secret(name: str, path: Path, way_out: str) -> None:
    """Refuse a file with a key in it, given as ``name``, that others than its owner may read."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        rule = f"can be read by others than its owner (mode {mode:04o})"
        way_out = f"{way_out}: check who has read it, then chmod 600."
        raise _check.reject(name, str(path), rule, way_out)


def sweep(folder: str | os.PathLike[str]) -> None:
    """Remove what killed runs left in ``folder``; files that are being written stay."""
    # another process may sweep too, or the folder may belong to somebody else: what cannot be
    # listed or removed is no reason to stop
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _PART.fullmatch(name):
                with contextlib.suppress(OSError):
                    _remove_abandoned(Path(folder, name))


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder to fill; it takes the place of ``target`` when the block ends well.

    A folder cannot be replaced in one step. If the process is killed between the two steps, the
    old one is put back by the next call (or :func:`recover`).
    """
    part = _part_of(target)
    part.mkdir()
    descriptor = _locked_folder(part)
    try:
        yield part
        _replace_folder(part, target)
    finally:
        if descriptor is not None:
            os.close(descriptor)
        _remove(part)


def _replace_folder(folder: Path, target: Path) -> None:
    """Move ``folder``, complete, to ``target``, in place of what is there."""
    recover(target)
    _sync_folder(folder)
    old = _aside(target)
    if os.path.lexists(target):
        os.replace(target, old)
    os.replace(folder, target)
    _sync_folder(target.parent)
    _remove(old)


def recover(target: Path) -> None:
    """Finish or take back a replacement of a folder that was cut short by a kill."""
    old = _aside(target)
    if os.path.lexists(target):
        _remove(old)
    elif os.path.lexists(old):
        os.replace(old, target)


def _part_of(path: Path) -> Path:
    # names have a limit of 255 bytes
    return path.with_name(f".{path.name[:60]}.{uuid.uuid4().hex[:12]}.mfopt-part")


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.mfopt-replaced")


def _open_part(path: Path, mode: int) -> tuple[Path, int]:
    part = _part_of(path)
    descriptor = os.open(
        part, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode
    )
    lock(descriptor)
    return part, descriptor


def _is_special(path: Path) -> bool:
    """Whether there is a directory or a device, in whose place no file is put."""
    return path.exists() and not path.is_file()


def _place(part: Path, path: Path, force: bool) -> None:
    if force and not _is_special(path):
        os.replace(part, path)
        return
    try:
        os.link(part, path)  # unlike a rename, fails where the name is taken
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "exists", str(path)) from None
    except OSError:
        # a file system without hard links: take the name first, then fill it
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.replace(part, path)


def lock(descriptor: int) -> bool:
    """Take the lock of an open file; False if it is held.

    It ends when the file is closed, and with the process, however that ends.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another process, or a file system without locks
        return False
    return True


def _locked_folder(folder: Path) -> int | None:
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    lock(descriptor)
    return descriptor


def _remove_abandoned(part: Path) -> None:
    facts = part.lstat()
    kind = facts.st_mode
    if time.time() - facts.st_mtime < _YOUNG or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        return
    if fcntl is None:
        if stat.S_ISREG(kind):
            part.unlink()
        return
    descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if lock(descriptor):
            _remove(part)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # the name too is to survive a power cut; some file systems cannot sync a folder
    if fcntl is None:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fallback_folders(preferred: Path) -> Iterator[Path]:
    tried = set()
    # by what they are: a working folder that was removed has no path
    for folder in (preferred, Path(), Path.home(), Path(tempfile.gettempdir())):
        if folder.is_dir() and (place := (folder.stat().st_dev, folder.stat().st_ino)) not in tried:
            tried.add(place)
            yield folder


def _other_names(path: Path) -> Iterator[Path]:
    for number in range(2, 1000):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def trim(folder: Path, pattern: str, max_bytes: int) -> None:
    """Remove the oldest files of a folder, by name, until the rest take at most ``max_bytes``.

    Args:
      folder: may be missing.
      pattern: of the files that count.
      max_bytes: size that the remaining files may have together.
    """
    files = []
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process removes it
            facts = path.stat()
            files.append((facts.st_mtime, facts.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= size
