"""The folder of a run: made once, read by its owner only, shared by its processes."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from mfopt import _check, _files
from mfopt.training.config import TrainConfig
from mfopt.training.secrets import RunSecret


def check_folder(folder: Path, resume: bool) -> bool:
    """Whether a run is gone on with; refuses to write over one."""
    there = (folder / "checkpoints").is_dir()
    if there and not resume:
        raise _check.reject(
            "output",
            str(folder),
            "holds a run already",
            "Go on with it by `resume=True`, or choose another folder.",
        )
    make_folder(folder)
    return there


def make_folder(folder: Path) -> None:
    """The folder of a run, readable by its owner only."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
    except OSError as problem:
        raise _check.reject(
            "output", str(folder), f"cannot be made a folder ({problem.strerror})"
        ) from None
    _files.sweep(folder)


def secret_of(config: TrainConfig, folder: Path, resuming: bool) -> RunSecret:
    if config.seed >= 0:
        return RunSecret.pinned(config.seed)
    path = folder / "secret"
    if resuming and not path.is_file():
        raise _check.reject("output", str(folder), "holds a run without its secret")
    if jax.process_index() == 0 and not resuming:
        # replaces that of a run that was killed before its first checkpoint
        _files.write(path, RunSecret.fresh().words().tobytes(), private=True)
    wait_for_lead("secret")
    return RunSecret(path.read_bytes())


def wait_for_lead(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)
