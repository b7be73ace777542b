"""JAX's settings in a scope, and the devices that it is told to use.

Importing mfopt changes no global flag of the host program.

The work needs float64, and arrays that may be mixed, moved and compiled: a host program may have
turned each of these off for its own code (``jax_numpy_dtype_promotion=strict``,
``jax_numpy_rank_promotion=raise``, ``jax_transfer_guard=disallow``, ``jax_disable_jit``,
``jax_debug_nans``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec

import jax
import numpy as np

from mfopt._runtime import _quick, _sizes
from mfopt._runtime._types import T

P = ParamSpec("P")

Devices = tuple[jax.Device, ...]

MARK = "_mfopt_float64"  # attribute of what runs in float64 by one of the decorators here


def devices() -> Devices:
    """Local devices, or JAX's ``jax_default_device`` alone where it is set."""
    chosen = jax.config.jax_default_device  # type: ignore[attr-defined] # not in its stubs
    if isinstance(chosen, str):  # a platform
        return (jax.local_devices(backend=chosen)[0],)
    return tuple(jax.local_devices()) if chosen is None else (chosen,)


def _to_numpy(leaf: object) -> object:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return np.asarray(leaf)
    return leaf


@contextlib.contextmanager
def scope(wide: bool | None = True) -> Iterator[None]:
    """Pin the settings of JAX that the work needs, in this thread.

    Args:
      wide: whether arrays may be float64; None leaves that to the host program.
    """
    _sizes.require_address_space()
    with (
        contextlib.nullcontext() if wide is None else jax.enable_x64(wide),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.transfer_guard("allow"),
        jax.disable_jit(False),
        jax.debug_nans(False),  # a trial σ may give NaN, which is then refused
        jax.debug_infs(False),
    ):
        yield


pinned = scope(None)
"""A decorator that runs a function in a :func:`scope`, in the width of the host program."""

wide = scope()
"""A decorator that runs a function in a :func:`scope` with float64, and hands on what it returns:
for inner functions, whose callers are in such a scope as well."""


def float64(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function`` in a :func:`scope` and hand concrete arrays back as numpy float64.

    Numpy results keep their width outside the scope, where a JAX float64 array would be cut to
    float32 by the next operation. Tracers pass through, so decorated methods stay
    differentiable and jittable.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        with scope():
            result: T = jax.tree.map(_to_numpy, function(*args, **kwargs))
        return result

    wrapper.__dict__[MARK] = True
    return wrapper


def compiled(*static: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """:func:`float64` around ``jax.jit`` with the named arguments static.

    Without it each operation of a public method would be compiled on its own.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        return float64(_quick.jit(function, once=True, static_argnames=static))

    return decorate
