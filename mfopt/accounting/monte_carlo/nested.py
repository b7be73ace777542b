"""Triangular factor with hierarchical low-rank blocks away from the diagonal.

Noise with covariance L Lᵀ costs b numbers of L for each of b bins. Where modes are smooth away
from their own step, as those of a few exponentials between two diagonals are, the lower left
quarter of L is a matrix of small rank to many digits, and so is that of either half of L on the
diagonal: L̃ is L with those blocks replaced by products of two matrices of :data:`RANK` columns,
down to triangles of at most :data:`_LEAF` bins (Hackbusch 1999). A product with it takes at most
_LEAF + RANK·log2(b/_LEAF) numbers a bin: at 4,096 bins 384.

L̃ is exactly what is multiplied with; how far it is from L is measured (:func:`nested`), and whoever
needs a bound makes room for it (:func:`.dominating_pair.above`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
import scipy

from mfopt.strategies.fields import Array

LEAST = 512  # bins from which on it pays
WORK = 2**13  # what a sample counts as: 2^18 are taken at most, for any number of bins
RANK = 32  # with four buffers and 8 epochs ‖L̃ − L‖_F is 2e-13 at 4,096 bins
_LEAF = 256  # fewer, and products are too small to be fast


class HierarchicalLowRank(NamedTuple):
    """L̃, lower triangular, for bins in 2^levels runs of equally many, the last ones short or empty.

    Attributes:
      rows: for each run of bins the rows of its triangle, then those of every lower left block that
        it is in the lower half of, the largest first; (run, run + RANK·blocks) each.
      right: what takes the upper half's numbers to RANK for each block, by levels; (half, RANK).
    """

    rows: tuple[Array, ...]
    right: tuple[Array, ...]

    def dense(self, number: int) -> np.ndarray:
        """The rows of L̃ of a run of bins, (run, padded bins)."""
        rows, run = np.asarray(self.rows[number]), len(self.rows[0])
        result = np.zeros((run, run * len(self.rows)))
        result[:, run * number : run * (number + 1)] = rows[:, :run]
        used = run
        for block, right in zip(_blocks(len(self.rows)), self.right, strict=True):
            if block.middle <= number < block.end:
                low_rank = rows[:, used : used + RANK]
                result[:, run * block.begin : run * block.middle] = low_rank @ np.asarray(right).T
                used += RANK
        return result

    def square(self, bins: int) -> np.ndarray:
        """L̃ L̃ᵀ, (bins, bins)."""
        result = np.empty((bins, bins))
        for cut, rows in self.square_rows(bins):
            result[cut] = rows
        return result

    def square_rows(self, bins: int) -> Iterator[tuple[slice, np.ndarray]]:
        """L̃ L̃ᵀ by runs of bins: where they are, and their rows (run, bins)."""
        run = len(self.rows[0])
        for number in range(len(self.rows)):
            begin, end = (min(run * cut, bins) for cut in (number, number + 1))
            if begin < end:
                rows = self.colour(self.dense(number)[: end - begin], np)[:, :bins]
                yield slice(begin, end), rows

    def colour(self, normal: Any, numbers: ModuleType = jnp) -> Any:
        """``normal`` L̃ᵀ, shape (samples, bins); ``numbers`` is NumPy where nothing is traced."""
        bins, run = normal.shape[1], len(self.rows[0])
        short = len(self.rows) * run - bins
        normal = numbers.pad(normal, ((0, 0), (0, short))) if short else normal
        blocks = zip(_blocks(len(self.rows)), self.right, strict=True)
        products = {
            block: normal[:, run * block.begin : run * block.middle] @ right
            for block, right in blocks
        }
        parts = []
        for number, rows in enumerate(self.rows):
            draws = normal[:, run * number : run * (number + 1)]
            above = [products[block] for block in products if block.middle <= number < block.end]
            parts.append(numbers.concatenate([draws, *above], axis=1) @ rows.T)
        return numbers.concatenate(parts, axis=1)[:, :bins]

    def solve(self, vector: np.ndarray) -> np.ndarray:
        """L̃⁻¹ of one vector, (bins,)."""
        bins, run = len(vector), len(self.rows[0])
        blocks = _blocks(len(self.rows))
        solution = np.zeros(len(self.rows) * run)
        products = dict[_Block, np.ndarray]()
        for number, kept in enumerate(self.rows):
            begin, end = (min(run * cut, bins) for cut in (number, number + 1))
            rows, remaining = np.asarray(kept)[: end - begin], vector[begin:end]
            used = run
            for block, right in zip(blocks, self.right, strict=True):
                if block.middle <= number < block.end:
                    if block not in products:  # all that it takes is known by now
                        above = solution[run * block.begin : run * block.middle]
                        products[block] = np.asarray(right).T @ above
                    remaining = remaining - rows[:, used : used + RANK] @ products[block]
                    used += RANK
            triangle = rows[:, : end - begin]
            solution[begin:end] = scipy.linalg.solve_triangular(triangle, remaining, lower=True)
        return solution[:bins]


Factor: TypeAlias = Array | HierarchicalLowRank


class _Block(NamedTuple):
    """Rows ``middle`` to ``end``, columns ``begin`` to ``middle``, counted in runs of bins."""

    begin: int
    middle: int
    end: int


@functools.cache
def _blocks(runs: int) -> tuple[_Block, ...]:
    blocks: list[_Block] = []
    size = runs
    while size > 1:
        blocks += [_Block(cut, cut + size // 2, cut + size) for cut in range(0, runs, size)]
        size //= 2
    return tuple(blocks)


def per_row(bins: int) -> int:
    """Numbers that a product with L̃ takes for a bin, at most; ``bins`` where there is no L̃."""
    return bins if bins < LEAST else _LEAF + RANK * (_runs(bins).bit_length() - 1)


def _runs(bins: int) -> int:
    runs = 1
    while -(-bins // runs) > _LEAF:
        runs *= 2
    return runs


def nested(factor: np.ndarray) -> tuple[HierarchicalLowRank, float]:
    """(L̃, ‖L̃ − L‖_F) of a lower triangular L, (bins, bins).

    Blocks are projected on the range of a product with random columns, always the same ones, taken
    once more through the block (Halko, Martinsson, Tropp 2011, section 4.5).
    """
    bins = len(factor)
    runs = _runs(bins)
    run = -(-bins // runs)
    rng = np.random.default_rng(0)
    right, square = [], 0.0
    rows: list[list[np.ndarray]] = []
    for number in range(runs):
        diagonal = factor[run * number : run * (number + 1), run * number : run * (number + 1)]
        rows.append([np.pad(diagonal, [(0, run - size) for size in diagonal.shape])])
    for block in _blocks(runs):
        begin, middle, end = (run * cut for cut in block)
        part = factor[middle:end, begin:middle]
        width = min(RANK, len(part))
        columns, weights = np.zeros((end - middle, RANK)), np.zeros((middle - begin, RANK))
        if width:
            basis = np.linalg.qr(part @ rng.normal(size=(middle - begin, width)))[0]
            basis = np.linalg.qr(part @ (part.T @ basis))[0]
            columns[: len(part), :width], weights[:, :width] = basis, part.T @ basis
            for cut in range(0, len(part), run):  # the difference in pieces
                inside = slice(cut, cut + run)
                square += float(np.sum((part[inside] - basis[inside] @ weights[:, :width].T) ** 2))
        right.append(weights)
        for number in range(block.middle, block.end):
            cut = run * (number - block.middle)
            rows[number].append(columns[cut : cut + run])
    stacked = tuple(np.concatenate(parts, axis=1) for parts in rows)
    return HierarchicalLowRank(stacked, tuple(right)), float(np.sqrt(square))
