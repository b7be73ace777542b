"""Float64 in a scope: importing mfopt changes no global JAX flag of the host program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from mfopt import _quick

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "_mfopt_float64"


def _to_numpy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        return np.asarray(leaf)
    return leaf


def float64(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` under ``jax.enable_x64`` and hand concrete arrays back as numpy float64.

    Numpy results keep their width outside the scope, where a JAX float64 array would be cut to
    float32 by the next operation. Tracers pass through, so decorated methods stay
    differentiable and jittable.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):
            result: R = jax.tree.map(_to_numpy, function(*args, **kwargs))
        return result

    wrapper.__dict__[_MARK] = True
    return wrapper


def in_float64(function: Callable[..., Any]) -> bool:
    """Whether ``function`` runs in float64 by one of the decorators here."""
    return bool(getattr(function, _MARK, False))


def compiled(*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """:func:`float64` around ``jax.jit`` with the named arguments static.

    Without it each operation of a public method would be compiled on its own.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        return float64(_quick.jit(function, once=True, static_argnames=static))

    return decorate
