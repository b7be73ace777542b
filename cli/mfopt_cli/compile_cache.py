"""JAX's persistent compilation cache, switched on for the command line in the user's cache folder.

Most of a first command's seconds are compilation; the next one reads what was compiled. The library
itself keeps nothing on disk. A cache that the user or a host program chose stays: nothing is done
where ``JAX_COMPILATION_CACHE_DIR`` is set or JAX has been imported. ``MFOPT_COMPILED`` names
another folder, or is ``off``; ``mfopt --no-compile-cache`` switches it off for one command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path

import platformdirs

VARIABLE = "MFOPT_COMPILED"
MOST_BYTES = 2**26  # JAX removes the least recently used
_OFF = ("off", "0", "no", "false")


def switch_on() -> Path | None:
    """Let JAX, imported later, cache what it compiles; return the folder, or None for no cache.

    By the environment, so that processes started by this one use the same folder.
    """
    chosen_folder = os.environ.get(VARIABLE, "")
    if (
        "jax" in sys.modules
        or "JAX_COMPILATION_CACHE_DIR" in os.environ
        or chosen_folder.lower() in _OFF
    ):
        return None
    folder = base() / _processor()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True, mode=0o700)
        if not all(map(_private, (folder.parent, folder))):
            return None
        for entry in folder.glob("*-cache"):
            # written in part by a process that was killed: JAX would write nothing more
            if not entry.with_name(f"{entry.name.removesuffix('cache')}atime").exists():
                entry.unlink(missing_ok=True)
    except OSError:  # a home that cannot be written is no reason to fail
        return None
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(MOST_BYTES))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    # what cannot be read or written is compiled: nobody needs to know
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    return folder


def base() -> Path:
    """Folder of all compiled programs: in ``$MFOPT_COMPILED``, or the user's cache folder."""
    chosen_folder = os.environ.get(VARIABLE, "")
    default = platformdirs.user_cache_path("mfopt", appauthor=False)
    return Path(default if chosen_folder.lower() in ("", *_OFF) else chosen_folder) / "compiled"


def _processor() -> str:
    """Return a name for this kind of processor: compiled code may use all that this one has."""
    words = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        words += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _private(folder: Path) -> bool:
    """Return whether only this user may write there: an entry is code that is run.

    The mode of an own folder is narrowed first.
    """
    if not hasattr(os, "getuid"):
        return True
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or folder.is_symlink():
        return False
    if facts.st_mode & 0o077:
        folder.chmod(0o700)
    return True
