"""The folder of a run: its owner's alone, for one run at a time, shared by its processes."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import filelock

from mfopt._runtime import _check, _files
from mfopt.errors import UsageError
from mfopt.training import mesh as meshes
from mfopt.training.config import TrainConfig
from mfopt.training.secrets import RunSecret

CHECKPOINTS = "checkpoints"
REPORT = "privacy-report.json"
ACCOUNT = "account.npz"
MODEL = "model"  # what a run exports
_SECRETS = ("secret", "secret.copy")  # the same content: one flipped bit must not lose a run
_USED = b"\nnoise was drawn from it\n"  # the end of a secret after its run's first checkpoint


def hold(folder: Path) -> filelock.BaseFileLock:
    """Lock of a folder against other runs, until released or the process ends.

    The kernel's own lock on an open file: after a kill -9 or a power cut it is free. The first of
    several processes has it for all.
    """
    # released by whoever ends the run, in whatever thread
    lock = filelock.FileLock(folder / "lock", timeout=0, mode=0o600, thread_local=False)
    if not meshes.is_lead():
        return lock
    holder = folder / "lock.holder"
    try:
        lock.acquire()
    except filelock.Timeout:
        who = holder.read_text("utf-8", "replace").strip() if holder.is_file() else "unknown"
        rule = f"another run is at work in it (process {_check.printable(who[:100])})"
        way_out = "Wait for it or end it, or choose another folder."
        raise _check.reject("output", str(folder), rule, way_out) from None
    except (NotImplementedError, OSError):  # a file system without locks
        return lock
    _files.write(holder, f"{os.getpid()} on {platform.node()}\n", private=True)
    return lock


def check_folder(folder: Path, resume: bool) -> bool:
    """Return True if a run is resumed; refuse to write over one, or to begin one again."""
    has_checkpoints = (folder / CHECKPOINTS).is_dir()  # a first one may still be being written
    if has_checkpoints and not resume:
        way_out = "Resume it with `resume=True`, or choose another folder."
        raise _check.reject("output", str(folder), "holds a run already", way_out)
    # one that ended before its first checkpoint has used no noise: it begins with a new secret
    if resume and not has_checkpoints and not (folder / _SECRETS[0]).is_file():
        way_out = "Name the folder of the run, or begin one: leave `resume=True` out."
        raise _check.reject("output", str(folder), "holds no run to resume", way_out)
    begun = any(child.name.isdigit() for child in (folder / CHECKPOINTS).glob("*"))
    used = (folder / REPORT).is_file() or any(
        path.is_file() and path.read_bytes().endswith(_USED)
        for path in (folder / name for name in _SECRETS)
    )
    if used and not begun:
        rule = "holds a run whose checkpoints are gone: another would spend its epsilon again"
        raise _check.reject("output", str(folder), rule, "Begin a new run in another folder.")
    # a secret is used again only with a checkpoint, in which the data it was used on is sealed
    return begun


def make_folder(folder: Path) -> bool:
    """Make the folder of a run, readable by its owner only; return True if there was none."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as problem:
        rule = f"cannot be made a folder ({problem.strerror})"
        raise _check.reject("output", str(folder), rule) from None
    _files.sweep(folder)
    return new


@contextlib.contextmanager
def dropped_on_error(folder: Path, is_new: bool) -> Iterator[None]:
    """Take away a new folder of a run that an error inside keeps from beginning.

    One that holds more than an account and unused keys stays, and an interrupt leaves it: a
    pretrained model may be there.
    """
    try:
        yield
    except Exception:
        written = ("lock", "lock.holder", ACCOUNT, *_SECRETS)
        if is_new and all(path.name in written for path in folder.iterdir()):
            for name in written:
                (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another process wrote to it
                folder.rmdir()
        raise


def mark_used(folder: Path) -> None:
    """Note in the secret of a run, if it has one of its own, that noise is drawn from it."""
    for path in (folder / name for name in _SECRETS):
        if path.is_file() and not (content := path.read_bytes()).endswith(_USED):
            _files.write(path, content + _USED, private=True)


def secret_of(config: TrainConfig, folder: Path, resuming: bool) -> RunSecret:
    """The run's secret: its own, or a new one, kept twice with a checksum."""
    if config.seed >= 0:
        return RunSecret.pinned(config.seed)
    if meshes.is_lead() and not resuming:
        # replaces that of a run that was killed before its first checkpoint
        content = RunSecret.fresh().to_bytes()
        for name in _SECRETS:
            _files.write(folder / name, content, private=True)
    meshes.wait_for_lead("secret")
    for name in _SECRETS:
        with contextlib.suppress(OSError, UsageError):
            return RunSecret.from_bytes((folder / name).read_bytes().removesuffix(_USED))
    rule = "holds a run without its secret, or with a damaged one"
    way_out = "Without it the run cannot resume: begin a new one in another folder."
    raise _check.reject("output", str(folder), rule, way_out)
