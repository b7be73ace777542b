"""What a compiled program follows from, in one digest: code, machine, settings, static arguments.

Two programs of one digest are the same program. Whatever has no name here that says all of it,
such as a function from outside of this package, is refused (:class:`UnknownError`), and a program
that it is part of has no digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import platform
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KNOWN = ("mfopt", "jax", "jaxlib", "numpy", "builtins", "functools")  # whose code is in the digest
_PLACES = ("_cache", "_dir", "log_", "dump_")  # in names of settings that change no program


class UnknownError(Exception):
    """Something that a program follows from cannot be named."""


def digest(*parts: Any) -> str:
    """Of everything that a program of these parts follows from.

    Raises:
      UnknownError: a part, or the machine, has no name that says all of it.
    """
    found = hashlib.sha256(_surroundings().encode())
    for word in _words((*_settings(), *parts)):
        found.update(f"{len(word)}:{word};".encode())
    return found.hexdigest()


@functools.cache
def processor() -> str:
    """A name for this kind of processor: what may be used of it is part of compiled code."""
    words = [platform.system(), platform.machine(), platform.processor()]
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        words += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def sources(folder: Path) -> str:
    """Digest of the Python files below ``folder``: their names and all that is in them.

    Raises:
      UnknownError: there are none, as in an archive.
    """
    found, files = hashlib.sha256(), sorted(folder.rglob("*.py"))
    if not files:
        raise UnknownError(f"no source files in {folder}")
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()}:{len(content)}:".encode())
        found.update(content)
    return found.hexdigest()


@functools.cache
def _surroundings() -> str:
    """Code and machine: the same for all programs of a process."""
    import jax
    import jaxlib
    import ml_dtypes
    import numpy as np
    import scipy

    devices = [(device.platform, device.device_kind) for device in jax.devices()]
    if [platform for platform, _ in devices] != ["cpu"]:
        raise UnknownError("a GPU, or several devices")
    versions = [(one.__name__, one.__version__) for one in (jax, jaxlib, np, scipy, ml_dtypes)]
    flags = sorted(item for item in os.environ.items() if item[0].startswith(("XLA_", "LIBTPU")))
    here = sources(Path(__file__).parent), processor(), sys.version
    return repr((here, versions, devices, flags))


def _settings() -> Iterator[Any]:
    """JAX's own, as they are in this thread, but for where it keeps and tells things."""
    import jax

    values = getattr(jax.config, "values")  # noqa: B009 - not in its stubs
    for name in sorted(values):
        if not any(word in name for word in _PLACES):
            yield name, repr(getattr(jax.config, name, values[name]))


def _words(value: Any) -> Iterator[str]:
    """``value`` as a sequence of words; two values with the same words are the same."""
    import jax
    import numpy as np

    kind = type(value)
    if kind in (type(None), type(...), bool, int, float, complex, str, bytes):
        yield f"{kind.__name__} {value!r}"
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        content = np.ascontiguousarray(value).tobytes()
        yield f"array {kind.__name__} {value.dtype.str} {value.shape} {content.hex()}"
    elif isinstance(value, np.dtype):
        yield f"dtype {value}"
    elif isinstance(value, jax.ShapeDtypeStruct):
        if value.sharding is not None:
            raise UnknownError("an array over several devices")
        yield f"shape {value.shape} {value.dtype} {value.weak_type}"
    elif isinstance(value, jax.Device):
        yield f"device {value.platform} {value.id} {value.device_kind}"
    elif isinstance(value, jax.tree_util.PyTreeDef):
        yield "tree"
        yield from _words((value.node_data(), value.children()))
    elif kind in (tuple, list, frozenset, dict) or _named_tuple(kind):
        if kind is frozenset:
            value = sorted(value, key=lambda item: tuple(_words(item)))
        items = [*value.items()] if kind is dict else [*value]
        yield f"{_place(kind)} of {len(items)}"
        for item in items:
            yield from _words(item)
    elif isinstance(value, functools.partial):
        yield "partial"
        yield from _words((value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield "method"
        yield from _words((value.__self__, value.__name__))
    elif value is type(None) or _found_by_name(value):
        yield f"name {_place(value)}"
    elif isinstance(value, types.FunctionType):
        yield from _function(value)
    elif dataclasses.is_dataclass(value):
        yield f"fields of {_place(kind)}"
        yield from _words({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    else:
        raise UnknownError(f"a {kind.__module__}.{kind.__qualname__}")


def _function(function: types.FunctionType) -> Iterator[str]:
    """One that was made in another: its place, its code, and what it has been closed over."""
    if function.__globals__.get("__name__", "").partition(".")[0] not in _KNOWN:
        raise UnknownError(f"the function {function.__qualname__}")
    yield f"function {function.__globals__['__name__']} {function.__qualname__}"
    yield from _code(function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    yield from _words((cells, function.__defaults__, function.__kwdefaults__))


def _code(code: types.CodeType) -> Iterator[str]:
    yield f"code {code.co_firstlineno} {code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield from _words(constant)


def _found_by_name(value: Any) -> bool:
    """Whether a module of known code holds it under its own name."""
    found: Any = sys.modules.get(getattr(value, "__module__", None) or "")
    for part in getattr(value, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is value and _known(value)


def _place(value: Any) -> str:
    if not _known(value):
        raise UnknownError(f"{value!r} from outside")
    return f"{value.__module__} {value.__qualname__}"


def _known(value: Any) -> bool:
    return value.__module__.partition(".")[0] in _KNOWN


def _named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
