"""An ``.npz`` file read with distrust: all headers first, contents only once they were agreed to.

numpy's own reader allocates and decompresses whatever a file claims; a deflated zip claims up to a
thousand times its size. Here names, types and shapes are known before anything is allocated, and
checksums are made of chunks, so a file that is refused has cost next to nothing.
"""

from __future__ import annotations

import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np

from mfopt._runtime import _check

_CHUNK = 2**20  # bytes
_DEFLATES = 64  # how many times its size a file may claim, beyond _FREE bytes
_FREE = 2**22


MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    OSError,
    EOFError,
    MemoryError,
    RuntimeError,  # RecursionError and NotImplementedError among them
    SyntaxError,
    Warning,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
    struct.error,
)
"""Every way in which the zip, npy and JSON parsers report a file that is not one of ours."""


class Header(NamedTuple):
    """Type and shape stated at the beginning of an array's part of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes, by exact arithmetic for any stated shape."""
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.str}{self.shape}"


class Archive:
    """An open file: ``headers`` by name of array, and :meth:`read` for one of them.

    Args:
      source: path of the file, or a stream of its bytes.
      most_bytes: size of all arrays together beyond which a file is refused.
      most_arrays: number of arrays beyond which a file is refused.

    Raises:
      ValueError: not an archive of plain arrays as ``np.savez`` writes them, each named once, or
        it claims more than its size can hold.
      others: of :data:`MALFORMED`, as zip and npy parsing have it.
    """

    def __init__(self, source: Path | IO[bytes], *, most_bytes: int, most_arrays: int) -> None:
        self._zip = zipfile.ZipFile(source)
        try:
            size = source.stat().st_size if isinstance(source, Path) else source.seek(0, 2)
            self.headers = self._agree(size, most_bytes, most_arrays)
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of an array, a piece at a time, up to the checksum."""
        with self._zip.open(f"{name}.npy") as stream:
            _read_header(stream)
            while piece := stream.read(_CHUNK):
                yield piece

    def read(self, name: str) -> np.ndarray:
        """One array."""
        dtype, shape = self.headers[name]
        value = np.empty(math.prod(shape), dtype)
        target, filled = value.view(np.uint8), 0
        for piece in self.chunks(name):
            target[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
        if filled != value.nbytes:
            raise ValueError(f"array {name!r} ends early")
        if dtype.kind == "U":
            # Python itself trusts numpy with these, and breaks on what is no character
            codes = target.view(np.uint32)
            if np.any((codes > 0x10FFFF) | ((codes >= 0xD800) & (codes < 0xE000))):
                raise ValueError(f"array {name!r} is not text")
        return value.reshape(shape)

    def _agree(self, size: int, most_bytes: int, most_arrays: int) -> dict[str, Header]:
        entries = self._zip.infolist()
        if len(entries) > most_arrays:
            raise ValueError(f"it holds {len(entries)} arrays, more than {most_arrays}")
        names = [entry.filename.removesuffix(".npy") for entry in entries]
        if len(set(names)) != len(names):
            raise ValueError("it names an array twice")
        if not all(entry.filename.endswith(".npy") for entry in entries):
            raise ValueError("it holds something that is not an array")
        methods = {entry.compress_type for entry in entries}
        if not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise ValueError("it is compressed in a way that numpy does not write")
        claimed = sum(entry.file_size for entry in entries)
        limit = min(most_bytes, _FREE + _DEFLATES * size)
        if claimed > limit:
            raise ValueError(f"it claims {claimed} bytes of arrays, more than {limit}")
        headers = {}
        for name, entry in zip(names, entries, strict=True):
            with self._zip.open(entry) as stream:
                headers[name], begins = _read_header(stream)
            if entry.file_size - begins != headers[name].nbytes:
                raise ValueError(f"array {name!r} does not have the size that its header says")
        return headers


def _read_header(stream: IO[bytes]) -> tuple[Header, int]:
    """The header and how many bytes it takes; only what numpy writes today for plain arrays."""
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"it has an array of format {version}, which mfopt does not write")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy only warns of headers that it had to repair
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=1000)
    if fortran or dtype.kind not in "fiuU" or not dtype.isnative:
        raise ValueError(f"it has an array of {dtype}{' by columns' if fortran else ''}")
    return Header(dtype, shape), stream.tell()


def array(path: str | Path, name: str) -> np.ndarray:
    """Real numbers of a user's ``.npy`` file, float64; ``name``: argument that errors name.

    Raises:
      UsageError: the file cannot be read, or holds something else.
    """
    path = _check.path(name, path)
    try:
        with open(path, "rb") as stream:
            values = np.load(stream, allow_pickle=False)
    except MALFORMED as error:
        raise _check.reject(name, str(path), f"is not a readable .npy array ({error})") from None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise _check.reject(name, str(path), "must hold one array of real numbers")
    return values.astype(np.float64)
