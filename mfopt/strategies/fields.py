"""Field declarations of strategies.

The declarations give the constructor's checks, the JAX pytree and the conversion to and from files
(:mod:`mfopt.strategies.base`): nothing about a field is written twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._arrays import Array as Array
from mfopt._runtime._pytree import STATIC

_ROLE = "mfopt"


def wide(name: str, value: Array) -> Array:
    """A leaf's numbers as numpy float64, every one the same; a tracer as it is.

    What is computed from narrower ones is rounded to their width: it is that of another C.

    Args:
      name: of the parameter.
      value: a numpy or a JAX array.

    Raises:
      UsageError: numbers that are not real, or floats of 16 bits and fewer.
    """
    if isinstance(value, jax.core.Tracer):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" or array.dtype == np.float16:
        rule = "parameters must be real numbers, float32 or wider"
        way_out = "Convert them first: C is what is stored."
        raise _check.reject(name, str(array.dtype), rule, way_out)
    return array.astype(np.float64, copy=False)


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An array of real numbers: a leaf of the pytree, float64 in a file."""

    dimensions: int

    def checked(self, name: str, value: Any) -> Array:
        """``value`` as a float64 array (a tracer stays what it is), or :class:`UsageError`."""
        if isinstance(value, jax.Array):
            value = value if value.dtype == np.float64 else wide(name, value)
        else:
            if isinstance(value, np.ndarray) and value.dtype.kind not in "fiu":
                raise _check.reject(name, f"array of {value.dtype}", "must hold real numbers")
            try:
                value = np.array(value, np.float64)
            except (TypeError, ValueError):
                raise _check.reject(
                    name, type(value).__name__, "must be an array of numbers"
                ) from None
        if value.ndim != self.dimensions or value.size == 0:
            rule = f"must be a non-empty array of {self.dimensions} dimension(s)"
            raise _check.reject(name, f"array of shape {value.shape}", rule)
        return value


@dataclasses.dataclass(frozen=True)
class Setting:
    """A JSON-able value that shapes the strategy: structure of the pytree, text in a file."""

    check: Callable[[str, Any], object]

    def checked(self, name: str, value: object) -> object:
        """``value`` as the check returns it."""
        return self.check(name, value)


@dataclasses.dataclass(frozen=True)
class Inner:
    """Another strategy that this one is built on."""


Role: TypeAlias = Parameter | Setting | Inner


def parameter(*, dimensions: int, default: object = dataclasses.MISSING) -> Any:
    """A field that holds an array with so many dimensions.

    A parameter with a default is left out of files where it has that value.
    """
    return dataclasses.field(default=default, metadata={_ROLE: Parameter(dimensions)})


def setting(*, check: Callable[[str, Any], object] = _check.integer) -> Any:
    """A field that is a whole number >= 1, or whatever ``check(name, value)`` lets through."""
    return dataclasses.field(metadata={_ROLE: Setting(check), **STATIC})


def inner() -> Any:
    """A field that is itself a strategy."""
    return dataclasses.field(metadata={_ROLE: Inner()})


def roles(cls: type) -> dict[str, Role]:
    """The role of each field of the dataclass ``cls``, by name.

    Raises:
      UsageError: a field that was not declared by one of the functions above.
    """
    roles_by_name: dict[str, Role] = {}
    for field in dataclasses.fields(cls):
        role = field.metadata.get(_ROLE)
        if role is None:
            raise _check.reject(
                f"{cls.__name__}.{field.name}",
                field.type,
                "is a field without a role",
                "Declare it with parameter(), setting() or inner() of mfopt.strategies, or as a "
                "ClassVar.",
            )
        roles_by_name[field.name] = role
    return roles_by_name
