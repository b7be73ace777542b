"""``jax.jit`` with compiler options that halve the time of compilation.

XLA's CPU compiler spends most of its time on fusing and on optimizing again what it has fused, LLVM
after it on passes that it calls expensive itself. The programs of a search or a certificate run for
seconds at most and gain nothing measurable from either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from mfopt._runtime._types import T

OPTIONS = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


@functools.cache
def options() -> dict[str, int] | None:
    """Return ``compiler_options`` for ``jax.jit``; None where the backend knows none of these.

    Versions of the compiler differ in what they know, and refuse what they do not: it is asked.
    """
    if jax.default_backend() != "cpu":
        return None
    if are_known(OPTIONS):
        return OPTIONS
    return {name: value for name, value in OPTIONS.items() if are_known({name: value})} or None


def are_known(some: dict[str, int]) -> bool:
    """Return True if the compiler knows these options."""
    try:
        jax.jit(lambda: 0, compiler_options=some).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


def jit(function: Callable[..., T], *, once: bool = False, **static: Any) -> Callable[..., T]:
    """``jax.jit`` with :func:`options`, which are asked for at the first call, not at import.

    JAX takes options for whole programs only. Where an argument is traced, the function becomes
    part of the program around it; where none is, it is a program of its own, also within a trace.

    Args:
      function: what is compiled.
      once: keep it one function of the program around it, which holds it once however often it is
        called there.
      static: static_argnums or static_argnames, as for ``jax.jit``.
    """
    inner: Callable[..., T] = jax.jit(function, **static) if once else function

    @functools.cache
    def program() -> Callable[..., T]:
        return jax.jit(function, compiler_options=options(), **static)

    @functools.wraps(function)
    def call(*args: object, **keywords: object) -> T:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, keywords))):
            return inner(*args, **keywords)
        with jax.core.eval_context():
            return program()(*args, **keywords)

    return call
