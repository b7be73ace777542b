"""Checkpoints of a run: asynchronous, atomic, the last k kept, readable by their owner only.

A checkpoint holds the secret of the run (sampling and noise keys, noise buffers): with it the
noise can be subtracted from what was released. Its folder is made with mode 0700. What may leave
the machine is written by :mod:`mfopt.training.export`.

A checkpoint is complete or absent: Orbax writes into a temporary folder and renames it. After a
kill at any moment the last complete one is found again, and the run continues from there with the
same batches and the same noise.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mfopt import _extras

try:
    import orbax.checkpoint as ocp
except ModuleNotFoundError as problem:
    raise _extras.missing(problem) from None

from mfopt import _check
from mfopt.errors import FailureError
from mfopt.noise import NoiseState
from mfopt.training.loop import TrainState
from mfopt.training.secrets import RunSecret

_OWNER_ONLY = 0o700


class Checkpoints:
    """The checkpoints in ``folder``.

    Args:
        folder: made if missing, with permissions for its owner alone.
        keep: how many of the newest are kept.

    A context manager: leaving it waits for a save that is under way.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder).absolute()
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, _OWNER_ONLY)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices("checkpoint folder")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_check.integer("keep", keep),
            cleanup_tmp_directories=True,
            file_options=ocp.options.FileOptions(path_permission_mode=_OWNER_ONLY),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the save under way, then let go of the folder."""
        with self._told():
            self._manager.wait_until_finished()
        self._manager.close()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What Orbax says of a disk that is full or gone, in one line."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as problem:
            reason = _check.printable(str(problem).split("\n")[0])
            raise FailureError(
                f"a checkpoint in {self.folder} could not be written: {reason}. "
                "Resuming goes on from the last whole one."
            ) from problem

    @property
    def steps(self) -> list[int]:
        """The steps for which a complete checkpoint exists, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, secret: RunSecret, facts: Mapping[str, Any]) -> None:
        """Start to write ``state``; returns once the loop may go on.

        Args:
            secret: what the run's streams are derived from.
            facts: JSON-able; what a resumed run must agree with, the privacy report, ....
        """
        items = {name: _leaves(part) for name, part in _parts(state).items()}
        items["secret"] = [secret.words()]
        items = {name: leaves for name, leaves in items.items() if leaves}
        facts = {**facts, "structure": _structure(state)}
        with self._told():  # of this save, or of the one before, which ends first
            self._manager.save(
                int(state.step),
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(_detached(items)), facts=ocp.args.JsonSave(facts)
                ),
            )

    def facts(self, step: int | None = None) -> dict[str, Any]:
        """The facts of the newest checkpoint, or of ``step``."""
        step = self._step(step)
        restored = self._manager.restore(
            step, args=ocp.args.Composite(facts=ocp.args.JsonRestore())
        )
        return dict(restored["facts"])

    def restore(
        self, like: TrainState, step: int | None = None
    ) -> tuple[TrainState, RunSecret, dict[str, Any]]:
        """(state, secret, facts) of the newest checkpoint, or of ``step``.

        Args:
            like: a state of the same run, for example the one before step 0: gives structure
                and placement, and is not changed.

        Raises:
            UsageError: there is no checkpoint, or it is of another model, optimizer or noise.
        """
        step = self._step(step)
        facts = self.facts(step)
        saved, expected = facts.pop("structure"), _structure(like)
        other = [name for name in expected if saved.get(name) != expected[name]]
        if other:
            raise _check.reject(
                "checkpoint",
                str(self.folder / str(step)),
                f"its {' and '.join(other)} are not those of this run",
                "Resume with the settings of the run that wrote it.",
            )
        wanted = {name: _leaves(part) for name, part in _parts(like).items()}
        wanted["secret"] = [np.zeros(8, np.uint32)]
        wanted = {name: leaves for name, leaves in wanted.items() if leaves}
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        found = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        )["state"]
        parts = {
            name: jax.tree.unflatten(jax.tree.structure(part), found.get(name, []))
            for name, part in _parts(like).items()
        }
        return TrainState(**parts), RunSecret.from_words(found["secret"][0]), facts

    def _step(self, step: int | None) -> int:
        known = self.steps
        if step is None and known:
            return known[-1]
        if step is None or step not in known:
            raise _check.reject(
                "checkpoint", step, f"not found in {self.folder} (found: {known or 'none'})"
            )
        return step


def _parts(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "params": state.params,
        "optimizer": state.optimizer,
        "noise": state.noise,
    }


def _leaves(part: Any) -> list[Any]:
    # numpy scalars (a step counter on the host) are not arrays to the writer
    return [
        leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in jax.tree.leaves(part)
    ]


def _structure(state: TrainState) -> dict[str, str]:
    """A digest per part, so that an error can say which part is another one."""
    digests = {}
    for name, part in _parts(state).items():
        lines = [
            f"{jax.tree_util.keystr(path)} {np.dtype(leaf.dtype)} {np.shape(leaf)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(part)
        ]
        if isinstance(part, NoiseState):
            lines += [part.digest, part.settings]
        digests[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return digests


def _detached(items: Any) -> Any:
    """Copies where the writer would share memory with buffers that the loop is about to reuse."""

    if jax.default_backend() != "cpu":
        return items  # the writer copies to the host before it returns
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, items)
