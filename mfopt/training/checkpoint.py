"""Checkpoints of a run: asynchronous, atomic, sealed, the last k kept, for their owner only.

A checkpoint holds the noise keys and buffers: with it the noise can be subtracted from what was
released, so its folder has mode 0700. It is complete or absent: Orbax writes into a temporary
folder and renames it. Its seal is an HMAC-SHA256 under the run's secret over the facts beside the
state, among which are digests of every array of it. A run resumes from the newest one that reads
back as it was written.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _extras
from mfopt._runtime._arrays import Array
from mfopt._runtime._float64 import scope
from mfopt._runtime._types import JsonObject, PyTree
from mfopt.errors import FailureError, UsageError
from mfopt.noise import NoiseState
from mfopt.training import mesh as meshes
from mfopt.training.loop import TrainState
from mfopt.training.secrets import RunSecret

with _extras.required():
    import orbax.checkpoint as ocp

_OWNER_ONLY = 0o700
# a save that waits for the one before is no news to a user, and none that could be acted on
logging.getLogger("absl").addFilter(
    lambda record: not record.getMessage().startswith("Waiting for previous save")
)


class _Restored(NamedTuple):
    """A checkpoint that is whole, the facts in it, and {step: what is wrong} of newer ones."""

    state: TrainState
    facts: JsonObject
    damaged: dict[int, str]


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The two newest checkpoints in ``folder``, made if missing, for its owner alone.

    A context manager: leaving it waits for a save that is under way.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        if meshes.is_lead():
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, _OWNER_ONLY)
        meshes.wait_for_lead("checkpoint folder")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            cleanup_tmp_directories=True,
            # threads would wait minutes for a folder that cannot be made, and the exit with them
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            file_options=ocp.options.FileOptions(path_permission_mode=_OWNER_ONLY),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # where an error is under way it was told, and raised, before
        with contextlib.suppress(*[FailureError] if error else []), self._told():
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()

    def wait(self) -> None:
        """Return once what was saved is on disk; FailureError where it could not be written."""
        with self._told():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Translate Orbax's errors of a full or missing disk into one line."""
        try:
            yield
        except (ValueError, OSError, RuntimeError) as problem:
            reason = _check.printable(str(problem).split("\n")[0].split(" [tensorstore")[0])
            rule = f"a checkpoint in {self.folder} could not be written: {reason}. "
            rule += "Free some space, and resume from the last complete one with `resume=True`."
            raise FailureError(rule) from problem

    @property
    def steps(self) -> list[int]:
        """The steps for which a complete checkpoint exists, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, secret: RunSecret, facts: JsonObject) -> None:
        """Start to write ``state``; return as soon as the loop may continue.

        The ``secret`` seals what is written and is itself not written. ``facts`` are JSON-able:
        ``run``, what a resumed run must agree with, and others.
        """
        items = _items(state)
        facts = {**facts, "arrays": _digests(items)}
        facts["seal"] = _seal(secret, facts)
        parts = ocp.args.StandardSave(_detached(items)), ocp.args.JsonSave(facts)
        with self._told():  # of this save, or of the one before, which ends first
            args = ocp.args.Composite(state=parts[0], facts=parts[1])
            self._manager.save(int(state.step), args=args)

    def restore(
        self,
        like: TrainState,
        secret: RunSecret,
        step: int | None = None,
        run: JsonObject | None = None,
    ) -> _Restored:
        """The newest checkpoint that is whole, or the one of ``step``.

        Newer ones, damaged or after ``step``, are removed: the run will write them again.

        Args:
            like: a state of the same run, which gives structure and placement.
            secret, step: those it was saved with; None: the newest step.
            run: facts that the run agrees with.

        Raises:
            UsageError: there is none, or it is of another run.
            FailureError: none is whole under this secret, or not that of ``step``.
        """
        candidates = list(reversed(self.steps)) if step is None else [step]
        if not {*candidates} & {*self.steps}:
            rule = f"not found in {self.folder} (found: {self.steps or 'none'})"
            raise _check.reject("checkpoint", step, rule)
        damaged = {}
        for candidate in candidates:
            try:
                arrays, facts = self._read(secret, candidate, like, run or {})
            except (UsageError, MemoryError):
                raise
            # Whatever a reader of files raises on bytes that nobody wrote: there is no list of it.
            except Exception as problem:
                damaged[candidate] = _check.printable(str(problem).split("\n")[0][:200])
                continue
            for number in (later for later in self.steps if later > candidate):
                self._manager.delete(number)
            parts = {
                name: jax.tree.map(
                    _placed,
                    part,
                    jax.tree.unflatten(jax.tree.structure(part), arrays.get(name, [])),
                )
                for name, part in vars(like).items()
            }
            return _Restored(TrainState(**parts), facts, damaged)
        reasons = "; ".join(f"step {number}: {reason}" for number, reason in damaged.items())
        why = f"no checkpoint asked for in {self.folder} reads as it was written ({reasons}). "
        why += "Give another step with `resume_from`, or start a new run in another folder."
        raise FailureError(why)

    def _read(
        self, secret: RunSecret, step: int, like: TrainState, run: JsonObject
    ) -> tuple[dict[str, list[Array]], JsonObject]:
        """The arrays and facts of ``step``; any exception where they are not what was written.

        ``like``: a state of the same run, whose placement they get; ``run``: facts to agree with.
        """
        request = ocp.args.Composite(facts=ocp.args.JsonRestore())
        facts = dict(self._manager.restore(step, args=request)["facts"])
        if not hmac.compare_digest(facts.pop("seal"), _seal(secret, facts)):
            raise ValueError("its facts are not what was written, or not under this run's secret")
        before = facts.get("run", {})
        changed = [f"{x} = {run[x]} (was {before.get(x)})" for x in run if run[x] != before.get(x)]
        if changed:
            rule = "differs from the run that wrote the checkpoint"
            way_out = "The same noise would meet other data: resume with its config.toml, or begin "
            raise _check.reject("resume", ", ".join(changed), rule, f"{way_out}anew.")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _items(like))
        request = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        with scope():
            arrays = self._manager.restore(step, args=request)["state"]
        if _digests(arrays) != facts["arrays"]:
            raise ValueError("its arrays are not what was written")
        return arrays, facts


def _seal(secret: RunSecret, facts: JsonObject) -> str:
    """Seal of the facts, read before the state can be; it holds digests of the state's arrays."""
    return secret.seal(json.dumps(facts, sort_keys=True).encode())


def _digests(items: Mapping[str, list[Array]]) -> dict[str, list[str]]:
    """A digest of each array of a state, by part."""
    # hashing lets other threads run; all processes gather the same array at once
    with ThreadPoolExecutor(None if jax.process_count() == 1 else 1) as threads:
        digests = {name: threads.map(meshes.digest_of, part) for name, part in items.items()}
        return {name: list(part) for name, part in digests.items()}


def _items(state: TrainState) -> dict[str, list[Array]]:
    # numpy scalars (a step counter on the host) are not arrays to the writer
    leaves_of = {
        name: [
            _joined(part, x) if isinstance(x, jax.Array) else np.asarray(x)
            for x in jax.tree.leaves(part)
        ]
        for name, part in vars(state).items()
    }
    return {name: leaves for name, leaves in leaves_of.items() if leaves}


def _joined(part: object, leaf: Array) -> Array:
    """``leaf`` of a part of the state; buffers of noise without the axis of devices."""
    if not isinstance(part, NoiseState) or leaf.ndim < 3:
        return leaf
    with scope():  # secure noise has buffers in float64
        return leaf.reshape(len(leaf), -1)


def _placed(like: jax.Array, leaf: jax.Array) -> jax.Array:
    """What was read, in the shape and on the devices of ``like``."""
    if leaf.shape == like.shape:
        return leaf
    with scope():
        return jax.jit(lambda x: x.reshape(like.shape), out_shardings=like.sharding)(leaf)


def _detached(items: PyTree) -> PyTree:
    """Copies where the writer would share memory with buffers that the loop is about to reuse."""
    if not meshes.on_cpu():
        return items  # the writer copies to the host before it returns
    with scope():  # secure noise has buffers in float64
        return jax.tree.map(
            lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, items
        )
