"""A banded C whose columns, or modes, have norms of their own: its error and slope, by hand.

A search of a new size compiles nothing (:mod:`mfopt.strategies.prefix_numbers`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from mfopt.optimize.objective import Evaluation
from mfopt.strategies import prefix_numbers


@dataclasses.dataclass(frozen=True)
class FixedBands:
    """log of ‖A C⁻¹‖_F/√n of prefix sums for the banded C of parameters: entries, but for norms.

    Where columns may differ, a unit's shares of its budget are a softmax of numbers of their own,
    which come first: half as many steps as with entries alone.

    Attributes:
      bands, n: shape of C.
      separation, most: distance of a unit's iterations, and their number.
      equal: whether all columns have one norm.
    """

    bands: int
    n: int
    separation: int
    most: int
    equal: bool

    @property
    def overlapping(self) -> bool:
        """True if columns of one unit overlap; its modes are then normalized to norm 1."""
        return self.bands > self.separation

    @property
    def shares(self) -> int:
        """Number of parameters that are shares of a unit's budget."""
        return 0 if self.equal or self.overlapping else self.n

    def parameters(self, entries: np.ndarray) -> np.ndarray:
        """Parameters of the C with these entries, of shape (bands, n)."""
        norms = np.linalg.norm(entries, axis=0)
        return np.concatenate([2 * np.log(norms[: self.shares]), (entries / norms).ravel()])

    def build(self, x: np.ndarray) -> np.ndarray:
        """Entries of C, shape (bands, n)."""
        raw = self._raw(x)
        return raw * self._scale(x, self._norms(raw)[0])

    def traced(self, x: jax.Array) -> jax.Array:
        """:meth:`build` for compiled code, differentiable."""
        row = np.arange(self.bands)[:, None] + np.arange(self.n)
        raw = jnp.where(row < self.n, x[self.shares :].reshape(self.bands, self.n), 0)
        target: Any = self._columns(np.zeros(0)) if self.equal or self.overlapping else None
        if target is None:
            logits = x[: self.n].reshape(self.most, self.separation)
            target = jax.nn.softmax(logits, axis=0).reshape(-1)
        squares = jnp.sum(raw**2, axis=0)
        if self.overlapping:
            place = row * self.separation + np.arange(self.n) % self.separation
            modes = jnp.zeros(int(place.max()) + 1).at[place.ravel()].add(raw.ravel())
            modes = jnp.pad(modes, (0, -len(modes) % self.separation))
            squares = jnp.sum(modes.reshape(-1, self.separation) ** 2, axis=0)
            squares = jnp.tile(squares, self.most)
        return raw * jnp.sqrt(target / squares)

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def __call__(self, x: np.ndarray) -> Evaluation:
        """Value and gradient at x; not finite where C cannot be inverted in double precision."""
        raw = self._raw(x)
        squares, reach = self._norms(raw)
        scale = self._scale(x, squares)
        total, slope = prefix_numbers.total(raw * scale)
        felt = np.einsum("kj,kj->j", slope, raw) * scale  # along the logarithm of scale
        whole = self._of_unit(felt) if self.overlapping else felt
        along = slope * scale - reach * (whole / squares)
        budget = np.zeros(0)
        if self.shares:
            column = self._columns(x)
            budget = (felt - column * self._of_unit(felt)) / 2
        gradient = np.concatenate([budget, along.ravel()]) / (2 * total)
        return Evaluation(float(np.log(total / self.n)) / 2, gradient, math.nan)

    def _raw(self, x: np.ndarray) -> np.ndarray:
        raw = x[self.shares :].reshape(self.bands, self.n).copy()
        for k in range(1, self.bands):
            raw[k, self.n - k :] = 0
        return raw

    def _norms(self, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Squared norm of each column, or of its mode, and half its slope along each entry."""
        if not self.overlapping:
            return np.einsum("kj,kj->j", raw, raw), raw
        row = np.arange(self.bands)[:, None] + np.arange(self.n)
        place = row * self.separation + np.arange(self.n) % self.separation
        modes = np.bincount(place.ravel(), raw.ravel())
        squares = np.sum(modes.reshape(-1, self.separation) ** 2, axis=0)
        return np.tile(squares, self.most), modes[place]

    def _scale(self, x: np.ndarray, squares: np.ndarray) -> np.ndarray:
        return np.sqrt(self._columns(x) / squares)

    def _columns(self, x: np.ndarray) -> np.ndarray | float:
        """Target squared norms of columns, or modes."""
        if self.overlapping:
            return 1.0
        if not self.shares:
            return 1 / self.most
        # columns that do not overlap are orthogonal: their squared norms add up
        logits = x[: self.n].reshape(self.most, self.separation)
        return scipy.special.softmax(logits, axis=0).reshape(-1)

    def _of_unit(self, felt: np.ndarray) -> np.ndarray:
        """Sums over each unit's columns, (n,)."""
        return np.tile(felt.reshape(self.most, self.separation).sum(axis=0), self.most)
