"""``jax.jit`` whose programs may be kept on disk (:mod:`mfopt._kept`)."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mfopt import _kept

_IN_THREAD = ("default_device", "enable_x64")  # of its settings, those that mfopt changes

Options = dict[str, Any]


class Jitted:
    """``jax.jit`` of a function, made at the first call that needs it.

    Args:
      function: what is compiled.
      parts: what ``options`` follow from, beside the code and the versions of libraries.
      options: for ``compiler_options``; asked for only when something is compiled.
      static_argnums, static_argnames: as for ``jax.jit``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *parts: Any,
        options: Callable[[], Options | None] = lambda: None,
        static_argnums: int | Sequence[int] = (),
        static_argnames: Sequence[str] = (),
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._parts, self._options = function, parts, options
        numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
        self._numbers, self._names = tuple(numbers), tuple(static_argnames)
        self._programs: dict[Any, _Program] = {}

    @functools.cached_property
    def jitted(self) -> Any:
        """JAX's own."""
        return self._jit(self._function)

    def lower_for(self, alone: bool, *args: Any) -> Any:
        """As :meth:`lower`; where ``alone``, of a program that JAX's cache has not seen.

        Its name is then one that no other has, and names are part of that cache's keys.
        """
        if not alone:
            return self.lower(*args)

        def own(*args: Any) -> Any:
            return self._function(*args)

        own.__name__ = f"{getattr(self._function, '__name__', 'program')}_{uuid.uuid4().hex}"
        own.__signature__ = inspect.signature(self._function)  # type: ignore[attr-defined]
        return self._jit(own).lower(*args)

    def _jit(self, function: Callable[..., Any]) -> Any:
        return jax.jit(
            function,
            compiler_options=self._options(),
            static_argnums=self._numbers or None,
            static_argnames=self._names or None,
        )

    @functools.cached_property
    def _static(self) -> frozenset[int]:
        """Places of static arguments."""
        if not self._names:
            return frozenset(self._numbers)
        names = list(inspect.signature(self._function).parameters)
        return frozenset((*self._numbers, *map(names.index, self._names)))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Its value."""
        if named or not _kept.on() or not outermost():
            return self.jitted(*args, **named)
        static = tuple((i, arg) for i, arg in enumerate(args) if i in self._static)
        others = tuple(arg for i, arg in enumerate(args) if i not in self._static)
        leaves, structure = jax.tree.flatten(others)
        shapes = tuple(map(_shape, leaves))
        if None in shapes:
            return self.jitted(*args)
        device, wide = (getattr(jax.config, f"jax_{name}") for name in _IN_THREAD)
        key = static, structure, shapes, device, wide
        found = self._programs.setdefault(key, _Program())
        with found.lock:
            if found.call is None:
                found.call = _kept.program(
                    lambda alone: self.lower_for(alone, *args),
                    *(self._function, self._parts, static, structure, shapes),
                )
        return found.call(*others)

    def lower(self, *args: Any, **named: Any) -> Any:
        """As of ``jax.jit``."""
        return self.jitted.lower(*args, **named)


@dataclasses.dataclass
class _Program:
    """One of them: made by the first thread that asks, while the others wait."""

    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    call: Callable[..., Any] | None = None


def outermost() -> bool:
    """Whether nothing is being traced around this: a value would become part of that program.

    JAX has no public name for it; without its own nothing is kept.
    """
    clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    return clean is not None and bool(clean())


def _shape(leaf: Any) -> Any:
    """All that a program knows of an argument; None where an argument is no plain array."""
    if isinstance(leaf, bool | int | float) and not isinstance(leaf, np.generic):
        return type(leaf).__name__
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, str(leaf.dtype), False
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return None
    if len(leaf.sharding.device_set) > 1:
        return None
    return leaf.shape, str(leaf.dtype), getattr(leaf, "weak_type", False)
