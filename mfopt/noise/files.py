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
from collections.abc import Iterator
from pathlib import Path

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
from mfopt.noise.state import Layout, NoiseState, check_arrays
from mfopt.noise.stream import NoiseStream

_FORMAT = "mfopt noise state 2"
_NOTICE = (
    "SECRET. Whoever reads this file can compute the noise of the run and remove it. "
    "Keep it as safe as the data itself, and delete it after the run."
)


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
    arrays: dict[str, np.ndarray] = {"key": _local("key", state.key)}
    names = _leaf_names(state.layout)
    for i, buffer in stream.buffers_by_leaf(state).items():
        arrays[f"buffer/{i}"] = _local(names[i], buffer)
    write_secret(
        path,
        {
            "kind": "jax",
            "digest": state.digest,
            "settings": state.settings,
            "pinned": state.pinned,
            "step": int(state.step),
            "parameters": names,
            "shapes": [list(shape) for shape in state.layout.shapes],
            **({"ledger": str(ledger.store(arrays["key"]))} if state.counted else {}),
        },
        arrays,
        force=force,
    )


def load_state(path: str | os.PathLike[str], stream: NoiseStream, params: PyTree) -> NoiseState:
    """Read what :func:`save_state` wrote, laid out over devices as ``params`` is now.

    The devices may be others than those that wrote the file: the noise is the same.

    Raises:
      UsageError: the file was made with another factorization, other settings or other
        parameters, or others than its owner may read it.
    """
    header, arrays = read_secret(path)
    stream.refuse_other("state file", header.get("digest"), header.get("settings"))
    layout = Layout.of_params(params)
    names = _leaf_names(layout)
    shapes = [list(shape) for shape in layout.shapes]
    if header.get("parameters") != names or header.get("shapes") != shapes:
        rule = "are not those that the state was made for: "
        rule += f"{header.get('parameters')} of shapes {header.get('shapes')}"
        raise _check.reject("params", dict(zip(names, shapes, strict=True)), rule)
    check_saved(header, arrays, stream, layout.shapes)
    kept = {i: arrays[n] for i in range(len(names)) if (n := f"buffer/{i}") in arrays}
    buffers = stream.buffers_from_leaves(layout, kept)
    step, pinned = header["step"], header["pinned"]
    state = stream.state_of(layout, arrays["key"], step, buffers, pinned=pinned, counted=False)
    if pinned:
        return state
    stored = header.get("ledger")
    resumed = ledger.resume(arrays["key"], stored, older=stored is None)
    return stream.skip(dataclasses.replace(state, counted=True), resumed.first_free(step))


def _leaf_names(layout: Layout) -> list[str]:
    """The path of every parameter inside its pytree."""
    tree = jax.tree.unflatten(layout.treedef, range(len(layout.shapes)))
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_saved(
    header: JsonObject,
    arrays: dict[str, np.ndarray],
    stream: NoiseStream,
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Raise :class:`UsageError` unless key, step and buffers are what ``stream`` would save.

    Args:
      header: of the file: ``step`` and ``pinned`` are examined.
      arrays: the key and the buffers, by name.
      stream: that would resume from them.
      shapes: of the parameters, leaf by leaf.
    """
    step, pinned = header.get("step"), header.get("pinned")
    if type(step) is not int or not 0 <= step <= stream.iterations:
        raise _check.reject("state: step", step, f"must be from 0 to {stream.iterations}")
    if type(pinned) is not bool:
        raise _check.reject("state: pinned", pinned, "must be true or false")
    key = {"key": ((KEY_WORDS,), np.uint32)}
    check_arrays(arrays, {**key, **stream.buffer_arrays(shapes)})
    for name, value in arrays.items():
        # a stream past its end holds NaN; it makes no more noise
        if name != "key" and step < stream.iterations and not np.all(np.isfinite(value)):
            raise _check.reject(f"state: {name}", "NaN or infinite", "must be finite")


def write_secret(
    path: str | os.PathLike[str],
    header: JsonObject,
    arrays: dict[str, np.ndarray],
    *,
    force: bool,
) -> None:
    """An ``.npz`` with mode 0600 from its first byte on, renamed into place.

    Args:
      path, force: of the file, whose folder must exist, and whether one that is there is replaced.
      header: facts that JSON keeps; what says which run the arrays belong to.
      arrays: of any dtype, also those that numpy alone lacks.
    """
    path = _files.check_output(path, force=force)
    dtypes = {name: str(value.dtype) for name, value in arrays.items()}
    raw = {name: np.ascontiguousarray(_raw(value)) for name, value in arrays.items()}
    header = {"format": _FORMAT, "notice": _NOTICE, "dtypes": dtypes, **header}
    header["content"] = _content(header, raw)
    text = np.array(json.dumps(header))
    try:
        _files.write(
            path,
            _files.npz({"header": text, **raw}),
            force=force,
            private=True,
            check=_files.check_zip,
        )
    except FileExistsError:
        raise _check.reject("path", str(path), "appeared meanwhile", _files.EXISTS) from None


def read_secret(path: str | os.PathLike[str]) -> tuple[JsonObject, dict[str, np.ndarray]]:
    """(header, arrays) of a file of :func:`write_secret`; nothing in it is executed."""
    path = Path(path)
    if not path.is_file():
        raise _check.reject("path", str(path), "no such file")
    _files.require_secret("path", path, "It holds the key of the noise")
    try:
        with Archive(path, most_bytes=2**63, most_arrays=2**20) as archive:
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
        raise _check.reject("path", str(path), f"is not a noise state file ({reason})") from None
    if header.get("kind") != "jax":
        rule = "is a state of PyTorch, which versions up to 0.2.0 wrote and read"
        way_out = "Load it there and save state_dict() by torch.save, inside of owner_only()."
        raise _check.reject("path", str(path), rule, way_out)
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
