"""Dataclasses as JAX pytrees, distinguished by their class.

``jax.tree_util.register_dataclass`` leaves the class out of the comparison of structures (seen in
JAX 0.10): two classes with equal static fields and as many children are equal there, and only a
hash of addresses keeps them apart, so in one process of a hundred or so the compiled program of one
was run for the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax

from mfopt._runtime._types import T

STATIC = {"static": True}  # metadata of a field that is part of the structure


def pytree(cls: type[T]) -> type[T]:
    """Register a dataclass: fields with :data:`STATIC` are structure, all others are children.

    A method ``before_flatten`` is called whenever an object is taken apart.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static = [f.name for f in fields if f.metadata.get("static")]
    children = [f.name for f in fields if not f.metadata.get("static")]
    before_flatten = getattr(cls, "before_flatten", None)

    def flatten(instance: T) -> tuple[list[tuple[object, object]], tuple[object, ...]]:
        if before_flatten is not None:
            before_flatten(instance)
        key = jax.tree_util.GetAttrKey
        values = [(key(name), getattr(instance, name)) for name in children]
        return values, tuple(getattr(instance, name) for name in static)

    def unflatten(structure: tuple[object, ...], values: Iterable[object]) -> T:
        instance = object.__new__(cls)  # what was checked when it was created is not checked again
        for name, value in zip([*static, *children], [*structure, *values], strict=True):
            object.__setattr__(instance, name, value)
        return instance

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
