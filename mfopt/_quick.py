"""Compiled programs that run for seconds at most: in half the usual time of compilation.

XLA's CPU compiler spends most of it on fusing and optimizing once more what it has fused already.
For the programs of a search or a certificate that gains nothing that can be measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import jax

OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
_TRIED = (0, 8), (0, 12)  # versions of jaxlib: others may refuse an option that they do not know


def tried() -> bool:
    """Whether this version of jaxlib knows :data:`OPTIONS`."""
    first, beyond = _TRIED
    return first <= tuple(map(int, version("jaxlib").split(".")[:2])) < beyond


@functools.cache
def options() -> dict[str, Any] | None:
    """For ``compiler_options`` of ``jax.jit``; None where these are not of the backend."""
    return dict(OPTIONS) if tried() and jax.default_backend() == "cpu" else None


class jit:
    """``jax.jit`` with :func:`options`, which are asked for at the first call, not at import.

    JAX takes options for whole programs only: where an argument is traced, the function is called
    as it is and becomes part of the program around it.
    """

    def __init__(self, function: Callable[..., Any], **static: Any) -> None:
        functools.update_wrapper(self, function)
        self._function, self._static = function, static

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._function, compiler_options=options(), **self._static)

    def __call__(self, *args: Any, **named: Any) -> Any:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, named)))
        return (self._function if traced else self._compiled)(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """As of ``jax.jit``."""
        return self._compiled.lower(*args, **named)
