"""Checkpoints of a run: asynchronous, atomic, sealed, the last k kept, for their owner only.

A checkpoint holds the noise keys and buffers: with it the noise can be subtracted from what was
released, so its folder has mode 0700. It is complete or absent: Orbax writes into a temporary
folder and renames it. Its seal is an HMAC-SHA256 under the run's secret over every bit of the state
and of the facts beside it. A run resumes from the newest one that reads back as it was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mfopt._runtime import _check, _extras
from mfopt._runtime._float64 import scope
from mfopt.errors import FailureError, UsageError
from mfopt.noise import NoiseState
from mfopt.training import mesh as meshes
from mfopt.training.loop import TrainState
from mfopt.training.secrets import RunSecret

with _extras.required():
    import orbax.checkpoint as ocp

_OWNER_ONLY = 0o700
_DAMAGED = "damaged-"


class Restored(NamedTuple):
    """A checkpoint that is whole, the facts in it, and {step: what is wrong} of newer ones."""

    state: TrainState
    facts: dict[str, Any]
    damaged: dict[int, str]


class Damaged(FailureError):
    """No checkpoint is valid, or not the one asked for."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The newest ``keep`` checkpoints in ``folder``, made if missing, for its owner alone.

    A context manager: leaving it waits for a save that is under way.
    """

    def __init__(self, folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(folder).absolute()
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.chmod(self.folder, _OWNER_ONLY)
        meshes.wait_for_lead("checkpoint folder")
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_check.integer("keep", keep),
            cleanup_tmp_directories=True,
            # threads would wait minutes for a folder that cannot be made, and the exit with them
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            file_options=ocp.options.FileOptions(path_permission_mode=_OWNER_ONLY),
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        logging.getLogger("absl").addFilter(_is_not_told)  # the same filter twice is one
        self._silenced = contextlib.ExitStack()
        self._silenced.enter_context(_late_calls_dropped())

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # where an error is under way it was told, and raised, before
        with contextlib.suppress(*[FailureError] if error else []), self._told():
            try:
                self._manager.wait_until_finished()
            finally:
                self._manager.close()
                if error is None:  # after an error the writer's threads are still calling back
                    self._silenced.close()

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

    def save(self, state: TrainState, secret: RunSecret, facts: Mapping[str, Any]) -> None:
        """Start to write ``state``; return as soon as the loop may continue.

        The ``secret`` seals what is written and is itself not written. ``facts`` are JSON-able:
        what a resumed run must agree with, the privacy report, ....
        """
        items = _items(state)
        facts = {**facts, "structure": _structure(state), "secret": _name(secret)}
        if blocks := _blocks(items):
            facts["blocks"] = blocks
        facts["check"] = _check_of(facts)
        facts["seal"] = secret.seal(_message(items, facts))
        parts = ocp.args.StandardSave(_detached(items)), ocp.args.JsonSave(facts)
        with self._told():  # of this save, or of the one before, which ends first
            args = ocp.args.Composite(state=parts[0], facts=parts[1])
            self._manager.save(int(state.step), args=args)

    def restore(self, like: TrainState, secret: RunSecret, step: int | None = None) -> Restored:
        """The newest checkpoint that is whole, or the one of ``step``.

        Newer ones are taken out of the way: damaged ones set aside under another name, those after
        ``step`` removed, since the run will write them again.

        ``like``: a state of the same run, which gives structure and placement.

        Raises:
            UsageError: there is none, or it is of another secret, model, optimizer or noise.
            Damaged: none is whole, or not that of ``step``.
        """
        wanted = list(reversed(self.steps)) if step is None else [step]
        if not wanted:
            raise _check.reject("checkpoint", str(self.folder), "holds none")
        if wanted[0] not in self.steps:
            rule = f"not found in {self.folder} (found: {self.steps or 'none'})"
            raise _check.reject("checkpoint", step, rule)
        damaged: dict[int, str] = {}
        for candidate in wanted:
            try:
                with _damage_told():
                    found, facts = self._read(secret, candidate, like)
            except Damaged as problem:
                damaged[candidate] = str(problem)
                continue
            self._clear(candidate, damaged)
            parts = {
                name: jax.tree.unflatten(jax.tree.structure(part), found.get(name, []))
                for name, part in vars(like).items()
            }
            return Restored(TrainState(**parts), facts, damaged)
        reasons = "; ".join(f"step {number}: {reason}" for number, reason in damaged.items())
        why = f"no checkpoint asked for in {self.folder} reads as it was written ({reasons}). "
        why += "Give another step with `resume_from`, or start a new run in another folder."
        raise Damaged(why)

    def _read(
        self, secret: RunSecret, step: int, like: TrainState | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and facts of ``step``; any exception where they are not what was written.

        ``like``: a state of the same run, whose placement they get.
        """
        asked = ocp.args.Composite(facts=ocp.args.JsonRestore())
        facts = dict(self._manager.restore(step, args=asked)["facts"])
        body = {name: value for name, value in facts.items() if name not in ("check", "seal")}
        if facts["check"] != _check_of(body):
            raise ValueError("its facts are not what was written")
        if facts["secret"] != _name(secret):
            rule = f"is not that of the checkpoint of step {step}"
            way_out = "Put the run's own secret back; without it the run cannot resume."
            raise _check.reject("secret", str(self.folder.parent / "secret"), rule, way_out)
        abstract: Any = None
        expected: dict[str, str] = {}
        if like is not None:
            expected = _structure(like)
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _items(like))
        other = [name for name in expected if facts["structure"].get(name) != expected[name]]
        if other:
            rule = f"its {' and '.join(other)} are not those of this run"
            way_out = "Resume with the settings of the run that wrote it."
            raise _check.reject("checkpoint", str(self.folder / str(step)), rule, way_out)
        seal = facts.pop("seal")
        asked = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        with scope():
            found: dict[str, Any] = self._manager.restore(step, args=asked)["state"]
        if not hmac.compare_digest(secret.seal(_message(found, facts)), seal):
            raise ValueError("its seal does not hold")
        own = ("structure", "secret", "check", "blocks")
        return found, {name: value for name, value in facts.items() if name not in own}

    def parameters(self, secret: RunSecret) -> tuple[list[Any], dict[str, Any]]:
        """(leaves of the parameters, facts) of the newest checkpoint; nothing is changed."""
        if not self.steps:
            raise _check.reject("checkpoint", str(self.folder), "holds none")
        try:
            with _damage_told():
                found, facts = self._read(secret, self.steps[-1])
        except Damaged as reason:
            way_out = "Resume that run once, which takes the newest one that is whole."
            rule = f"the newest checkpoint in {self.folder} is damaged ({reason}). {way_out}"
            raise Damaged(rule) from None
        return [np.asarray(leaf) for leaf in found["params"]], facts

    def _clear(self, step: int, damaged: Mapping[int, str]) -> None:
        """Leave ``step`` as the newest checkpoint: the run is about to write later ones."""
        later = [number for number in self.steps if number > step]
        for number in later:
            if number not in damaged:
                self._manager.delete(number)
            elif jax.process_index() == 0:
                # kept, since a disk may only have failed to read: but under a name of its own
                ends = ("", *(f"-{again}" for again in range(2, 1000)))
                names = (self.folder / f"{_DAMAGED}{number}{end}" for end in ends)
                (self.folder / str(number)).rename(next(x for x in names if not x.exists()))
        meshes.wait_for_lead("damaged checkpoints")
        if later:
            self._manager.reload()


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    """Raise :class:`Damaged` with the reason where a checkpoint does not read as it was written."""
    try:
        yield
    except (UsageError, MemoryError):
        raise
    # Whatever a reader of files raises on bytes that nobody wrote: there is no list of it.
    except Exception as problem:
        raise Damaged(_check.printable(str(problem).split("\n")[0][:200])) from None


@contextlib.contextmanager
def _late_calls_dropped() -> Iterator[None]:
    """Keep the writer's threads from printing what a :class:`FailureError` says in one line.

    When a disk is full, Orbax logs each thread's traceback before it raises the error, and what
    TensorStore has still under way calls back into an event loop that is closed by then.
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        late = isinstance(error, RuntimeError) and "Event loop is" in str(error)
        if not late or threading.current_thread() is threading.main_thread():
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


def _is_not_told(record: logging.LogRecord) -> bool:
    return record.exc_info is None or f"{os.sep}orbax{os.sep}" not in record.pathname


def _name(secret: RunSecret) -> str:
    """Tells one secret from another, and nothing about it."""
    return secret.derive("name").hex()[:16]


def _check_of(facts: Mapping[str, Any]) -> str:
    """A checksum of the facts alone: what they say of the run is read before the seal can be."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _message(items: Mapping[str, list[Any]], facts: Mapping[str, Any]) -> bytes:
    """Sealed message: the facts, and a digest of each array."""
    named, blocks = _named(items), facts.get("blocks", {})
    parts = [_parts(x, tuple(blocks.get(str(i), np.shape(x)))) for i, (_, x) in enumerate(named)]
    table = np.zeros((sum(count for count, _ in parts), 32), np.uint8)
    rows = np.split(table, np.cumsum([count for count, _ in parts])[:-1])  # views, an array each

    def note(i: int, number: int, data: Any) -> None:
        rows[i][number] = np.frombuffer(_digest(*named[i], data), np.uint8)

    with ThreadPoolExecutor() as threads:  # hashing lets other threads run
        work = [(i, number, data) for i, (_, mine) in enumerate(parts) for number, data in mine]
        list(threads.map(lambda each: note(*each), work))
    if jax.process_count() > 1:  # what a process did not hash is 0 in its table
        table[:] = multihost_utils.process_allgather(table).max(axis=0)
    lines = [json.dumps(facts, sort_keys=True)]
    for i, mine in enumerate(rows):
        cut = f"{blocks.get(str(i))} ".encode() + mine.tobytes()
        lines.append((hashlib.sha256(cut).digest() if str(i) in blocks else mine.tobytes()).hex())
    return "\n".join(lines).encode()


def _named(items: Mapping[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(name, leaf) for name, leaves in sorted(items.items()) for leaf in leaves]


def _blocks(items: Mapping[str, list[Any]]) -> dict[str, list[int]]:
    """{number of the array: shape of its shards} of those that are cut over devices."""
    found = {}
    for number, (_, leaf) in enumerate(_named(items)):
        shape = leaf.sharding.shard_shape(leaf.shape) if isinstance(leaf, jax.Array) else leaf.shape
        if shape != leaf.shape:
            found[str(number)] = [*shape]
    return found


def _parts(leaf: Any, block: tuple[int, ...]) -> tuple[int, list[tuple[int, Any]]]:
    """Number of blocks of that shape in an array, and (number, values) of those to be hashed here.

    Where a block is a shard, each is hashed by the process that has it, and nothing is moved.
    """
    shape = np.shape(leaf)
    grid = tuple(whole // part if part else 1 for whole, part in zip(shape, block, strict=True))
    if isinstance(leaf, jax.Array) and leaf.sharding.shard_shape(shape) == block:
        shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        corners = [
            [(cut.start or 0) // max(1, part) for cut, part in zip(shard.index, block, strict=True)]
            for shard in shards
        ]
        numbers = [int(np.ravel_multi_index(corner, grid)) if grid else 0 for corner in corners]
        return math.prod(grid), [*zip(numbers, (shard.data for shard in shards), strict=True)]
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    values = np.asarray(leaf)
    return math.prod(grid), [
        (i, values[tuple(slice(c * b, (c + 1) * b) for c, b in zip(corner, block, strict=True))])
        for i, corner in enumerate(np.ndindex(grid))
    ]


def _digest(name: str, leaf: Any, data: Any) -> bytes:
    """SHA-256 of one block of an array, with the array's name, type and shape."""
    array = np.ascontiguousarray(np.asarray(data))
    digest = hashlib.sha256(f"{name} {array.dtype.str} {np.shape(leaf)} ".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _items(state: TrainState) -> dict[str, list[Any]]:
    # numpy scalars (a step counter on the host) are not arrays to the writer
    found = {
        name: [x if isinstance(x, jax.Array) else np.asarray(x) for x in jax.tree.leaves(part)]
        for name, part in vars(state).items()
    }
    return {name: leaves for name, leaves in found.items() if leaves}


def _structure(state: TrainState) -> dict[str, str]:
    """A digest per part, so that an error can say which part is another one."""
    digests = {}
    for name, part in vars(state).items():
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
    if not meshes.on_cpu():
        return items  # the writer copies to the host before it returns
    with scope():  # secure noise has buffers in float64
        return jax.tree.map(
            lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, items
        )
