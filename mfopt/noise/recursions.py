"""How C⁻¹z is computed one row at a time: numbers only, no framework.

A recursion is chosen once from the strategy and then run by JAX, PyTorch or numpy. With z_t the
white draw of step t and w_t the noise, row t of C w = z or of w = C⁻¹ z becomes one of

- :class:`Ring`: ``w_t = a_0 z_t + Σ_k a_k w_{t-k}`` (banded C) or ``a_0 z_t + Σ_k a_k z_{t-k}``
  (banded C⁻¹), from the last few outputs or draws;
- :class:`Modal`: ``w_t = a z_t - r·s_t``, ``s_{t+1} = λ s_t + μ w_t``, from d buffers (BLT, tree);
- :class:`Rows`: ``w_t = Σ_{τ<=t} C⁻¹[t, τ] z_τ``, from all past draws.

Coefficients may depend on the step; ``at(step)`` gives those of one step. They are float64 here
and cut to the type of the noise where they are used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mfopt import strategies
from mfopt.strategies import Strategy, ToeplitzStrategy


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """Banded C (``feedback``) or banded C⁻¹, with b̂ bands.

    Attributes:
      table: shape (1, b̂) for constant coefficients, (n, b̂) otherwise. ``table[t, 0]`` is the
        weight of z_t, ``table[t, k]`` that of the value of step t-k.
      feedback: whether the last b̂ - 1 outputs are kept (banded C), or the last b̂ draws, the one
        of this step among them (banded C⁻¹).
    """

    table: np.ndarray
    feedback: bool

    @property
    def slots(self) -> int:
        """Buffers, each of the size of the parameters."""
        bands = self.table.shape[1]
        return bands - 1 if self.feedback or bands == 1 else bands

    def at(self, step: Any) -> tuple[Any]:
        """(coefficients of step,), shape (b̂,)."""
        return (_row(self.table, step),)


@dataclasses.dataclass(frozen=True, eq=False)
class Modal:
    """d buffers, each with its own decay.

    Attributes:
      gain: a, shape (1,) or (n,).
      read: r, shape (1, d) or (n, d).
      decay: λ, shape (1, d) or (n, d).
      feed: μ, shape (1, d) or (n, d).
    """

    gain: np.ndarray
    read: np.ndarray
    decay: np.ndarray
    feed: np.ndarray

    @property
    def slots(self) -> int:
        """Buffers, each of the size of the parameters."""
        return self.read.shape[1]

    def at(self, step: Any) -> tuple[Any, ...]:
        """(a, r, λ, μ) of step: shapes (), (d,), (d,), (d,)."""
        return tuple(_row(x, step) for x in (self.gain, self.read, self.decay, self.feed))


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Rows of C⁻¹ against all past draws, which are stored or made again from their counters.

    Attributes:
      inverse: first column of C⁻¹, shape (n,) (Toeplitz), or C⁻¹, shape (n, n).
      window: entries of C⁻¹ are 0 from this lag on.
      store: whether draws are stored.
    """

    inverse: np.ndarray
    window: int
    store: bool

    @property
    def slots(self) -> int:
        """Buffers, each of the size of the parameters."""
        return self.window if self.store else 0

    def at(self, step: Any) -> tuple[Any]:
        """(weights,) of step by lag: ``weights[k]`` belongs to z_{step-k}; shape (window,).

        For a matrix the weights of lags beyond step are not 0 and must not be used.
        """
        if self.inverse.ndim == 1:
            return (self.inverse[: self.window],)
        return (_row(self.inverse, step),)


Recursion = Ring | Modal | Rows


def _row(table: np.ndarray, step: Any) -> Any:
    """``table[step]``, or the only row; a traced step past the end reads the last row."""
    if len(table) == 1:
        return table[0]
    if isinstance(step, int | np.integer):
        return table[int(step)]
    import jax.numpy as jnp

    return jnp.asarray(table)[step]


def choose(strategy: Strategy, n: int, past: str = "auto") -> Recursion:
    """The cheapest recursion for ``n`` steps of C⁻¹z.

    ``past`` decides for strategies that need past *draws*: "store" keeps them in memory,
    "regenerate" makes them again; "auto" stores where C⁻¹ is banded and regenerates otherwise.
    """
    n = strategy.check_size(n)
    if isinstance(strategy, strategies.Identity):
        return Ring(np.ones((1, 1)), feedback=True)
    if isinstance(strategy, strategies.BLT):
        scale, decay = strategy.arrays()["scale"], strategy.arrays()["decay"]
        return Modal(np.ones(1), scale[None], decay[None], np.ones((1, len(decay))))
    if isinstance(strategy, strategies.Tree):
        return _tree(np.asarray(strategy.materialize(n)))
    if isinstance(strategy, strategies.BandedToeplitz | strategies.BandedSquareRoot):
        coefs = np.asarray(strategy.toeplitz_coefs(n))[: strategy.bands]
        return Ring(np.append(1.0, -coefs[1:])[None] / coefs[0], feedback=True)
    if isinstance(strategy, strategies.Banded):
        return _banded(np.asarray(strategy.arrays()["columns"]), n)
    if isinstance(strategy, strategies.BandedInverseSquareRoot):
        coefs = np.asarray(strategy.inverse_coefs(n))[: strategy.bands]
        if past == "regenerate":
            return Rows(coefs, len(coefs), store=False)
        return Ring(coefs[None], feedback=False)
    store = past == "store"
    if isinstance(strategy, ToeplitzStrategy):
        return Rows(np.asarray(strategy.inverse_coefs(n)), n, store)
    # by lag, so that both forms are read alike: entry [t, k] is C⁻¹[t, t-k]
    inverse = np.asarray(strategy.solve(np.eye(n)))
    lag = np.arange(n)[:, None] - np.arange(n)[None, :]
    return Rows(np.where(lag >= 0, inverse[np.arange(n)[:, None], lag], 0.0), n, store)


def _banded(columns: np.ndarray, n: int) -> Ring:
    """``columns[k, j] = C[j + k, j]``: row t of C by lag is ``columns[k, t - k]``."""
    bands = min(columns.shape[0], n)
    step, lag = np.arange(n)[:, None], np.arange(bands)[None, :]
    entries = np.where(step >= lag, columns[lag, np.maximum(step - lag, 0)], 0.0)
    return Ring(np.append(np.ones((n, 1)), -entries[:, 1:], axis=1) / entries[:, :1], feedback=True)


def _tree(matrix: np.ndarray) -> Modal:
    """The tree's C from ⌈log₂ n⌉ running sums of its outputs.

    CᵀC = HᵀH counts the nodes that hold two steps, so C[t, j] depends on j only through the
    smallest dyadic block that holds both t and j. With A_l the sum of the outputs so far inside
    the current block of 2^l steps, Σ_{j<t} C[t, j] w_j = Σ_l c_{t,l} (A_l - A_{l-1}); A_l restarts
    where its block ends.
    """
    n = matrix.shape[0]
    levels = max(0, (n - 1).bit_length())
    step = np.arange(n)
    read = np.zeros((n, levels + 1))
    for level in range(1, levels + 1):
        start = step >> level << level
        left = start < (step >> (level - 1) << (level - 1))  # the left half of the block is past
        entry = np.where(left, matrix[step, start], 0.0)
        read[:, level] += entry
        read[:, level - 1] -= entry
    # A_0 is always empty
    diagonal = np.diagonal(matrix)[:, None]
    width = 1 << np.arange(1, levels + 1)[None, :]
    goes_on = ((step[:, None] + 1) % width != 0).astype(np.float64)
    return Modal(1 / diagonal[:, 0], read[:, 1:] / diagonal, goes_on, goes_on)
