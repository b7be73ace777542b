"""Compiled programs that run for seconds at most: in half the usual time of compilation.

XLA's CPU compiler spends most of it on fusing and optimizing once more what it has fused already,
LLVM after it on passes that it calls expensive itself.
For the programs of a search or a certificate that gains nothing that can be measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mfopt._jitted import Jitted, outermost

OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def options() -> dict[str, Any] | None:
    """For ``compiler_options`` of ``jax.jit``; None where these are not of the backend.

    Versions of the compiler differ in what they know, and refuse what they do not: it is asked.
    """
    if jax.default_backend() != "cpu":
        return None
    if _taken(OPTIONS):
        return dict(OPTIONS)
    return {name: value for name, value in OPTIONS.items() if _taken({name: value})} or None


def _taken(some: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=some).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


class jit(Jitted):
    """``jax.jit`` with :func:`options`, which are asked for at the first call, not at import.

    JAX takes options for whole programs only: where an argument is traced, the function becomes
    part of the program around it.

    Args:
      function: what is compiled.
      once: whether it stays one function there, which a program that calls it several times has
        once.
      static: as for ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        once: bool = False,
        **static: Any,
    ) -> None:
        super().__init__(function, "quick", options=options, **static)
        self._inner = jax.jit(function, **static) if once else None

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._inner is not None:
            return (super().__call__ if outermost() else self._inner)(*args, **named)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, named)))
        return self._function(*args, **named) if traced else super().__call__(*args, **named)
