"""Types that many layers speak of; without JAX, which some of them never import."""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

PyTree: TypeAlias = Any
"""Arrays in nested containers: no type checker knows of what structure."""

JsonObject: TypeAlias = dict[str, Any]
"""Names and values that JSON can hold."""
