"""State files: readable by their owner only, and bound to one factorization.

A state file holds the key of the noise. It is created with mode 0600, written under a temporary
name in the same folder and renamed, so that there is never half a file and never a readable one.
It is an ``.npz`` without pickled objects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import jax
import ml_dtypes
import numpy as np

from mfopt._runtime import _check, _files
from mfopt._runtime._archive import MALFORMED, Archive
from mfopt._runtime._arrays import Array
from mfopt._runtime._types import JsonObject, PyTree
from mfopt.mechanism import stream_digest
from mfopt.noise import ledger
from mfopt.noise._draws import KEY_WORDS
from mfopt.noise.recursions import Rows
from mfopt.noise.state import Layout, NoiseState, check_arrays
from mfopt.noise.stream import NoiseStream

_FORMAT = "mfopt noise state 2"
_NOTICE = (
    "SECRET. Whoever reads this file can compute the noise of the run and remove it. "
    "Keep it as safe as the data itself, and delete it after the run."
)
Contents = tuple[JsonObject, dict[str, np.ndarray]]  # facts that JSON keeps, and arrays
Shapes = tuple[tuple[int, ...], ...]


@contextlib.contextmanager
def owner_only() -> Iterator[None]:
    """Files and folders made inside are for their owner only, whoever makes them.

    For checkpoints that Orbax, PyTorch or Opacus write and that hold a noise state::

        with owner_only():
            engine.save_checkpoint(path=path, module=model, optimizer=optimizer)

    It sets the umask, which all threads of the process share; what replaces an existing file keeps
    the mode that this file had. A writer in the background must have finished inside.
    """
    previous = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(previous)


def save_state(
    path: str | os.PathLike[str], stream: NoiseStream, state: NoiseState, *, force: bool = False
) -> None:
    """Write ``state`` to ``path``, readable by the owner only.

    The ledger of its key (:mod:`mfopt.noise.ledger`) is stored too, where that is not yet. A run
    that resumes from a file may repeat steps that were released after it, for the same sums.

    :class:`~mfopt.noise.for_torch.TorchNoise` reads the file for its list of parameters, if this
    state was made for a list of arrays of their shapes, and :func:`load_state` reads its files so.

    Args:
      path: of the ``.npz``.
      stream: the stream that the state belongs to; checked.
      state: what :meth:`~mfopt.noise.NoiseStream.next` gave; secret.
      force: replace a file that is there.

    Raises:
      UsageError: the file exists and ``force`` is not set, or the buffers are spread over several
        processes (then checkpoint the state, a pytree, with a library for such arrays, and
        restrict who can read what it writes).
    """
    stream.check_state(state)
    key, names = _local("key", state.key), _leaf_names(state.layout)
    buffers = {i: _local(names[i], b) for i, b in stream.buffers_by_leaf(state).items()}
    facts = {"parameters": names, "pinned": state.pinned}
    if state.counted:
        facts["ledger"] = str(ledger.store(key))
    contents = contents_of(stream, key, int(state.step), state.layout.shapes, buffers, **facts)
    write_secret(path, contents, force=force)


def load_state(path: str | os.PathLike[str], stream: NoiseStream, params: PyTree) -> NoiseState:
    """Read what :func:`save_state` wrote, laid out over devices as ``params`` is now.

    The devices may be others than those that wrote the file: the noise is the same.

    Raises:
      UsageError: the file was made with another factorization, other settings or other
        parameters, or others than its owner may read it.
    """
    layout, contents = Layout.of_params(params), read_secret(path)
    buffers = check_contents(contents, stream, layout.shapes, names=_leaf_names(layout))
    header, key = contents[0], contents[1]["key"]
    packed, pinned = stream.buffers_from_leaves(layout, buffers), header["pinned"]
    state = stream.state_of(layout, key, header["step"], packed, pinned=pinned, counted=False)
    if pinned:
        return state
    resumed = ledger.resume(key, header.get("ledger"), older="ledger" not in header)
    counted = dataclasses.replace(state, counted=True)
    return stream.skip(counted, resumed.first_free(header["step"]))


def _leaf_names(layout: Layout) -> list[str]:
    """The path of every parameter inside its pytree."""
    tree = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def contents_of(
    stream: NoiseStream,
    key: np.ndarray,
    step: int,
    shapes: Shapes,
    buffers: Mapping[int, np.ndarray],
    **facts: object,
) -> Contents:
    """The state of a run's noise as facts and arrays, one form for JAX and PyTorch. **Secret.**

    Args:
      stream: that makes the noise.
      key: uint32 (8,).
      step: steps done.
      shapes: of the parameters.
      buffers: of each parameter that has one, (slots, *its shape), by its number.
      facts: others that :func:`check_contents` reads: ``pinned``, ``parameters`` (names),
        ``draws``, ``part``, ``ledger``.
    """
    header = {"digest": stream.digest, "settings": stream.settings, "step": step}
    header |= {"shapes": [list(shape) for shape in shapes], **facts}
    return header, {"key": key, **{f"buffer/{i}": buffer for i, buffer in buffers.items()}}


def check_contents(
    contents: Contents,
    stream: NoiseStream,
    shapes: Shapes,
    *,
    names: Sequence[str] = (),
    draws: object = None,
    part: tuple[int, int] = (0, 1),
) -> dict[int, np.ndarray]:
    """The buffers of :func:`contents_of`, by number of the parameter.

    Args:
      contents: of a file or seal.
      stream: that would resume from them.
      shapes, names: of the parameters; without names they are a list.
      draws: how past draws are regenerated, where that is not by counters for each parameter.
      part: number of the process, and how many share the noise.

    Raises:
      UsageError: key, step or buffers are not what ``stream`` would save for these parameters.
    """
    header, arrays = contents
    check_header(header, stream)
    if tuple(header.get("part", (0, 1))) != part:
        rule = f"is another process's share of the noise than this one's, {part}"
        way_out = "Load what the process of this rank saved, with as many processes."
        raise _check.reject("state: part", header.get("part"), rule, way_out)
    listed = [f"[{i}]" for i in range(len(shapes))]
    names, sizes = names or listed, [list(shape) for shape in shapes]
    saved = header.get("parameters", listed), header.get("shapes")
    if saved != (names, sizes):
        rule = f"are not those that the state was made for: {saved[0]} of shapes {saved[1]}"
        raise _check.reject("parameters", dict(zip(names, sizes, strict=True)), rule)
    counters = [["counters", *range(len(shapes))]]
    draws = draws or counters
    if isinstance(stream.recursion, Rows) and header.get("draws", counters) != draws:
        rule = f"past draws are regenerated here by {draws}, which gives different numbers"
        way_out = "Resume with the parameters on the same kinds of devices."
        raise _check.reject("state: draws", header.get("draws"), rule, way_out)
    if type(pinned := header.get("pinned")) is not bool:
        raise _check.reject("state: pinned", pinned, "must be true or false")
    key = {"key": ((KEY_WORDS,), np.uint32)}
    check_arrays(arrays, {**key, **stream.buffer_arrays(shapes)})
    buffers = {n: arrays[k] for n in range(len(shapes)) if (k := f"buffer/{n}") in arrays}
    for number, value in buffers.items():
        # a stream past its end holds NaN; it makes no more noise
        if header["step"] < stream.iterations and not np.all(np.isfinite(value)):
            raise _check.reject(f"state: buffer/{number}", "NaN or infinite", "must be finite")
    return buffers


def check_header(header: JsonObject, stream: NoiseStream) -> None:
    """Raise :class:`UsageError` unless a state is of this stream, at one of its steps."""
    stream.refuse_other("state", header.get("digest"), header.get("settings"))
    step = header.get("step")
    if type(step) is not int or not 0 <= step <= stream.iterations:
        raise _check.reject("state: step", step, f"must be from 0 to {stream.iterations}")


def write_secret(path: str | os.PathLike[str], contents: Contents, *, force: bool) -> None:
    """An ``.npz`` with mode 0600 from its first byte on, renamed into place.

    Args:
      path, force: of the file, whose folder must exist, and whether one that is there is replaced.
      contents: as for :func:`packed`.
    """
    path = _files.check_output(path, force=force)
    content = packed(contents)
    try:
        _files.write(path, content, force=force, private=True, check=_files.check_zip)
    except FileExistsError:
        raise _check.reject("path", str(path), "appeared meanwhile", _files.EXISTS) from None


def packed(contents: Contents) -> Callable[[BinaryIO], object]:
    """What writes facts that JSON keeps, and arrays of any dtype, to a stream as an ``.npz``."""
    header, arrays = contents
    dtypes = {name: str(value.dtype) for name, value in arrays.items()}
    raw = {name: np.ascontiguousarray(_raw(value)) for name, value in arrays.items()}
    header = {**header, "format": _FORMAT, "notice": _NOTICE, "dtypes": dtypes}
    header["content"] = _content(header, raw)
    return _files.npz({"header": np.array(json.dumps(header)), **raw})


def read_secret(path: str | os.PathLike[str]) -> Contents:
    """The contents of a file of :func:`write_secret`; nothing in it is executed."""
    path = Path(path)
    if not path.is_file():
        raise _check.reject("path", str(path), "no such file")
    _files.require_secret("path", path, "It holds the key of the noise")
    return unpacked(path, "path", str(path))


def unpacked(source: Path | BinaryIO, name: str, shown: str) -> Contents:
    """The inverse of :func:`packed`.

    Args:
      source: path of a file, or a stream.
      name, shown: of the argument that errors name, and its value.
    """
    try:
        with Archive(source, most_bytes=2**63, most_arrays=2**20) as archive:
            if archive.headers["header"].shape:
                raise ValueError("its header is not text")
            header = json.loads(str(archive.read("header")[()]))
            if header["format"] != _FORMAT:
                raise ValueError(f"format {header['format']!r}")
            raw = {name: archive.read(name) for name in archive.headers if name != "header"}
        stated = header.pop("content")
        if raw.keys() != header["dtypes"].keys() or stated != _content(header, raw):
            raise ValueError("its digest does not match its contents: the file is damaged")
        arrays = {
            name: raw[name].view(np.dtype(getattr(ml_dtypes, dtype, dtype)))
            for name, dtype in header["dtypes"].items()
        }
    except MALFORMED as error:
        reason = _check.printable(str(error) or type(error).__name__)
        raise _check.reject(name, shown, f"is not a noise state file ({reason})") from None
    return header, arrays


def _content(header: JsonObject, raw: dict[str, np.ndarray]) -> str:
    """A digest against damage. Who can write the file can also read the key in it."""
    arrays = (
        (name, value.dtype, value.shape, [value.reshape(-1).view(np.uint8).data])
        for name, value in sorted(raw.items())
    )
    return stream_digest(header, arrays)


def _raw(value: np.ndarray) -> np.ndarray:
    """numpy cannot name bfloat16 and its like in a file: store their bits."""
    if value.dtype.kind != "V":
        return value
    return value.view(np.dtype(f"u{value.dtype.itemsize}"))


def _local(name: str, value: Array) -> np.ndarray:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        rule = "its buffers are spread over several processes"
        way_out = "Checkpoint the state, a pytree, with a library for such arrays; keep it secret."
        raise _check.reject("state", name, rule, way_out)
    return np.asarray(value)
