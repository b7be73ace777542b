"""A banded C whose columns, or modes, have norms of their own, of free parameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class FixedBands:
    """Entries of a banded C from parameters: raw entries, scaled to the norms that are due.

    Where columns may differ, a unit's shares of its budget are a softmax of numbers of their own,
    which come first: half as many steps as with entries alone.

    Attributes:
      bands, n: shape of C.
      separation, participations: distance of a unit's iterations, and their number.
      equal: whether all columns have one norm.
    """

    bands: int
    n: int
    separation: int
    participations: int
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

    def build(self, x: jax.Array) -> jax.Array:
        """Entries of C, shape (bands, n); differentiable."""
        row = np.arange(self.bands)[:, None] + np.arange(self.n)
        raw = jnp.where(row < self.n, x[self.shares :].reshape(self.bands, self.n), 0)
        if self.overlapping:
            position = row * self.separation + np.arange(self.n) % self.separation
            modes = jnp.zeros(int(position.max()) + 1).at[position.ravel()].add(raw.ravel())
            modes = jnp.pad(modes, (0, -len(modes) % self.separation))
            squares = jnp.sum(modes.reshape(-1, self.separation) ** 2, axis=0)
            return raw / jnp.sqrt(jnp.tile(squares, self.participations))
        target = jnp.full(self.n, 1 / self.participations)
        if not self.equal:  # columns that do not overlap are orthogonal: squared norms add up
            logits = x[: self.n].reshape(self.participations, self.separation)
            target = jax.nn.softmax(logits, axis=0).reshape(-1)
        return raw * jnp.sqrt(target / jnp.sum(raw**2, axis=0))
