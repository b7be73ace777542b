"""Compiled programs kept on disk whole: a later process does not trace, lower or compile them.

JAX's own cache saves the last of the three, and to know which program is wanted it needs the
first two, which are most of what is left. Here a program is found by what it follows from
(:mod:`mfopt._identity`). Closed to error:

* What cannot be named is not kept: functions from outside of this package, programs of a GPU or
  of several devices, code that calls anything but LAPACK. Nothing is once a plugin has been
  loaded: it may change what a function of this package does.
* A file is code: folder and file must be the user's own, and nobody else may write to them.
* A file that is damaged or does not load is a miss, never an error. It is written under another
  name and moved into place.

It is switched on by the command line alone, with the cache of JAX: see :func:`use`. Processes that
it starts are told of the folder (:func:`shared`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mfopt import _identity, _plugins

MOST_BYTES = 2**26  # of all files; those that nobody has used for longest go first
SUFFIX, _PART = ".program", ".part"
_CALLED = re.compile(r'custom_call_target="([^"]*)"')
_LAPACK = "lapack_"
_DIGEST = hashlib.sha256().digest_size

_folder: Path | None = None


def use(folder: Path | None) -> None:
    """Keep programs in ``folder`` from now on, or nowhere."""
    global _folder
    _folder = folder if folder is not None and _own(folder) else None


def on() -> bool:
    """Whether programs are kept."""
    return _folder is not None and not _plugins.loaded()


def shared() -> Path | None:
    """The folder, for processes that are to :func:`use` it too; None where nothing is kept."""
    return _folder if on() else None


def program(lower: Callable[[bool], Any], *parts: Any) -> Any:
    """A compiled program, from disk where it is there.

    Args:
      lower: makes it, but for its compilation, ``jax.jit(...).lower(...)``: of a name that no other
        program has where True, so that it is compiled here and can be kept. What is not kept has
        the name that JAX's own cache may know.
      parts: all that it follows from beside code, machine and settings.
    """
    if not on() or _folder is None:
        return lower(False).compile()
    try:
        path = _folder / f"{_identity.digest(*parts)}{SUFFIX}"
    except _identity.UnknownError:
        return lower(False).compile()
    if (found := _read(path)) is None:
        _listen()
        lowered, before = lower(True), _taken.hits
        with _unwritten():
            found = lowered.compile()
        # written again, what JAX read from its cache lacks some of its functions: XLA drops them
        if _taken.hits == before:
            with contextlib.suppress(OSError):  # a full disk is no reason to fail
                _write(path, found)
    return found


class _Taken(threading.local):
    """Programs that JAX has read from its own cache in this thread."""

    hits = 0


_taken = _Taken()


@functools.cache
def _listen() -> None:
    import jax

    def hear(event: str, **_: Any) -> None:
        _taken.hits += event == "/jax/compilation_cache/cache_hits"

    jax.monitoring.register_event_listener(hear)


def _unwritten() -> contextlib.AbstractContextManager[Any]:
    """JAX's own cache takes nothing that this thread compiles: nobody would ask it for that name.

    JAX has no public name for it, in one thread; without its own it is written twice.
    """
    known = sys.modules.get("jax._src.config")
    least: Any = getattr(known, "persistent_cache_min_compile_time_secs", None)
    try:
        nothing: contextlib.AbstractContextManager[Any] = least(float("inf"))
    except TypeError:  # of another version: not there, or no context
        return contextlib.nullcontext()
    return nothing


def _read(path: Path) -> Any:
    """What was written there, or None."""
    import jax  # late: who switches this on has not imported it
    from jax.experimental import serialize_executable

    try:
        if not _own(path):
            return None
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
            return None
        called, *parts = pickle.loads(content[_DIGEST:])
        if called:
            _link()
        found = serialize_executable.deserialize_and_load(*parts)
        os.utime(path)
    # whatever a file of ours holds that cannot be used is compiled again
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, EOFError):
        return None
    except (pickle.UnpicklingError, jax.errors.JaxRuntimeError):
        return None
    return found


def _write(path: Path, compiled: Any) -> None:
    """Keep it, where it can be."""
    import jax
    from jax.experimental import serialize_executable

    called = set(_CALLED.findall(compiled.as_text()))
    if not all(name.startswith(_LAPACK) for name in called):
        return
    try:
        parts = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        return  # a program that holds on to arrays, or a compiler that cannot
    content = pickle.dumps((bool(called), *parts))
    # not flushed to the disk: what is lost there is seen by its digest
    descriptor, part = tempfile.mkstemp(suffix=_PART, dir=path.parent)  # its owner's alone
    try:
        with open(descriptor, "wb") as stream:
            stream.write(hashlib.sha256(content).digest() + content)
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)
    _bound(path.parent)


def _bound(folder: Path) -> None:
    """Remove the files that have not been used for longest, down to the bound.

    What a process that was killed left half written is among them.
    """
    seen = []
    for path in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{_PART}")):
        with contextlib.suppress(FileNotFoundError):  # another process was quicker
            found = path.stat()
            seen.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in seen)
    for _, size, path in sorted(seen):
        if total <= MOST_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= size


def _link() -> None:
    """Let compiled code find LAPACK, which JAX does where it lowers a call."""
    import numpy as np
    from jaxlib import lapack

    link: Any = lapack.prepare_lapack_call
    link("potrf_ffi", np.dtype(np.float64))


def _own(path: Path) -> bool:
    """Whether it is the user's, no link, and nobody else may write to it."""
    found = path.lstat()
    mine = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    alone = not hasattr(os, "getuid") or not found.st_mode & 0o022
    return mine and alone and not stat.S_ISLNK(found.st_mode)
