"""Overlaps of very many modes in noise units: one table for all σ, rows of it made as asked.

At 16,384 bins a matrix of all overlaps takes 2 GiB, and so do S = G/σ² beside G and what is left of
it without a common part. :class:`TableGram` stands for them; the functions here take it or a
matrix.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.strategies.fields import Array

_ROWS = 64  # looked at together


class TableGram(NamedTuple):
    """(``table`` − ``common``)/``unit``.

    Attributes:
      table: symmetric, (bins, bins).
      common: a number.
      unit: σ².
    """

    table: Array
    common: Any = 0.0
    unit: Any = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    def __truediv__(self, squared: Any) -> TableGram:
        return self._replace(unit=self.unit * squared)

    def of(self, entries: Any) -> Any:
        """What entries of the table stand for."""
        return (entries - self.common) / self.unit


Gram: TypeAlias = Array | TableGram


def rows(gram: Gram, chosen: Any) -> Any:
    """S[chosen]."""
    return gram.of(jnp.asarray(gram.table)[chosen]) if isinstance(gram, TableGram) else gram[chosen]


def diagonal(gram: Gram, offset: int = 0) -> Any:
    """The diagonal of S, or that many beside it."""
    if isinstance(gram, TableGram):
        return gram.of(gram.table.diagonal(offset))
    return gram.diagonal(offset)


def means(gram: Gram) -> Any:
    """Of the columns of S."""
    if isinstance(gram, TableGram):
        return gram.of(gram.table.mean(axis=0))
    return gram.mean(axis=0)


def by_rows(function: Any, gram: Gram) -> jax.Array:
    """``function(rows of S, their numbers)`` of some rows at a time, stacked; in compiled code.

    The last are looked at again where they are no whole number of times so many.
    """
    bins = gram.shape[0]
    count = min(bins, _ROWS)
    numbers = jnp.minimum(jnp.arange(-(-bins // count) * count), bins - 1).reshape(-1, count)
    result: jax.Array = jax.lax.map(lambda at: function(rows(gram, at), at), numbers)
    return result


def scaled(gram: Any, squared: float, many: bool) -> Gram:
    """G/σ²; for many bins without making it.

    Args:
      gram: G.
      squared: σ².
      many: whether to.
    """
    if isinstance(gram, TableGram) or many:
        kept = gram if isinstance(gram, TableGram) else TableGram(jnp.asarray(gram))
        return kept / squared
    return np.asarray(gram) / squared
