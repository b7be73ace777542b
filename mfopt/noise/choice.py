"""Table of the recursion that streams the noise of each kind of strategy.

A third-party kind is added from anywhere::

    @choice.recursion.register
    def _(strategy: MyKind, n: int, past: str) -> Recursion: ...

The table is looked up by the exact class: a subclass has a C of its own, and its parent's recursion
would stream noise of another matrix. Nothing is inherited and nothing falls back: a kind without an
entry is streamed by its dense C⁻¹ if ``past="dense"`` asks for it.
"""

from __future__ import annotations

import functools
from typing import Literal, get_args

import numpy as np
import scipy.linalg

from mfopt import strategies
from mfopt._runtime import _check
from mfopt.noise.recursions import Modal, Recursion, Ring, Rows
from mfopt.strategies import Strategy, ToeplitzStrategy

Past = Literal["auto", "store", "regenerate", "dense"]
"""How strategies that need past *draws* get them, as for :class:`mfopt.noise.NoiseStream`."""


def choose(strategy: Strategy, n: int, past: Past = "auto") -> Recursion:
    """The recursion for ``n`` steps of C⁻¹z.

    Raises:
      UsageError: an unknown ``past``; a kind without a recursion, unless ``past`` is "dense".
    """
    n = strategy.check_size(n)
    _check.choice("past", past, get_args(Past))
    if past == "dense":
        return dense(strategy, n, past)
    if type(strategy) not in recursion.registry:
        kinds = sorted(cls.kind for cls in recursion.registry if issubclass(cls, Strategy))
        rule = "has no noise recursion"
        way_out = "Register one with mfopt.noise.choice.recursion, or ask for past='dense': n² "
        way_out += f"numbers and up to n draws a step. Registered: {', '.join(kinds)}."
        raise _check.reject("strategy", strategy.kind, rule, way_out)
    return recursion(strategy, n, past)


@functools.singledispatch
def recursion(strategy: Strategy, n: int, past: Past) -> Recursion:
    """The recursion of one kind; call :func:`choose`, which examines the exact class."""
    raise NotImplementedError(type(strategy))


def _of_draws(table: np.ndarray, past: Past) -> Recursion:
    """The recursion for C⁻¹ by lag, the ``table`` of a :class:`Rows`: from stored draws or not."""
    return Ring(table, feedback=False) if past == "store" else Rows(table)


def dense(strategy: Strategy, n: int, past: Past) -> Recursion:
    """Rows of the inverse of the dense C: right for every strategy, cheap for none.

    Not from ``solve``: a subclass with another C may have inherited it.
    """
    matrix = np.asarray(strategy.materialize(n), np.float64)
    inverse = scipy.linalg.solve_triangular(matrix, np.eye(n), lower=True)
    lag = np.arange(n)[:, None] - np.arange(n)[None, :]
    by_lag = np.where(lag >= 0, inverse[np.arange(n)[:, None], np.maximum(lag, 0)], 0.0)
    return _of_draws(by_lag, past)


recursion.register(strategies.Dense, dense)


@recursion.register(strategies.Toeplitz)
@recursion.register(strategies.SquareRoot)
def _toeplitz(strategy: ToeplitzStrategy, n: int, past: Past) -> Recursion:
    """The first column of C⁻¹ against past draws, for a Toeplitz C without more structure."""
    return _of_draws(np.asarray(strategy.inverse_coefs(n))[None], past)


@recursion.register(strategies.Identity)
def _identity(strategy: strategies.Identity, n: int, past: Past) -> Ring:
    return Ring(np.ones((1, 1)), feedback=True)


@recursion.register(strategies.BLT)
def _blt(strategy: strategies.BLT, n: int, past: Past) -> Modal:
    scale, decay = np.asarray(strategy.scale), np.asarray(strategy.decay)
    # the gain scales draw and noise alike: the buffers hold sums of what is put out
    gain = 1 / np.asarray(strategy.gain)
    return Modal(gain[None], scale[None], decay[None], np.ones((1, len(decay))))


@recursion.register(strategies.ClearedBLT)
@recursion.register(strategies.WaveBLT)
def _buffered(strategy: strategies.Buffered | strategies.WaveBLT, n: int, past: Past) -> Modal:
    read, decay, feed = (np.array(table) for table in strategy.tables(n))
    return Modal(1 / np.asarray(strategy.gain)[None], read, decay, feed)


@recursion.register(strategies.BandedToeplitz)
@recursion.register(strategies.BandedSquareRoot)
def _banded_toeplitz(strategy: ToeplitzStrategy, n: int, past: Past) -> Ring:
    """The last outputs, for a Toeplitz C with few bands."""
    coefs = np.asarray(strategy.toeplitz_coefs(n))[: strategy.column_bands(n)]
    return Ring(np.append(1.0, -coefs[1:])[None] / coefs[0], feedback=True)


@recursion.register(strategies.BandedInverseRoot)
@recursion.register(strategies.BandedInverseSquareRoot)
def _banded_inverse(
    strategy: strategies.BandedInverseRoot | strategies.BandedInverseSquareRoot, n: int, past: Past
) -> Recursion:
    coefs = np.asarray(strategy.inverse_coefs(n))[: strategy.bands]
    return _of_draws(coefs[None], "store" if past == "auto" else past)


@recursion.register(strategies.Banded)
def _banded(strategy: strategies.Banded, n: int, past: Past) -> Ring:
    """``columns[k, j] = C[j + k, j]``: row t of C by lag is ``columns[k, t - k]``."""
    columns = np.asarray(strategy.columns)
    bands = min(strategy.bands, n)
    step, lag = np.arange(n)[:, None], np.arange(bands)[None, :]
    entries = np.where(step >= lag, columns[lag, np.maximum(step - lag, 0)], 0.0)
    return Ring(np.append(np.ones((n, 1)), -entries[:, 1:], axis=1) / entries[:, :1], feedback=True)


@recursion.register(strategies.Tree)
def _tree(strategy: strategies.Tree, n: int, past: Past) -> Modal:
    """The tree's C from ⌈log₂ n⌉ running sums of its outputs.

    CᵀC = HᵀH counts the nodes that hold two steps, so C[t, j] depends on j only through the
    smallest dyadic block that holds both t and j. With A_l the sum of the outputs so far inside
    the current block of 2^l steps, Σ_{j<t} C[t, j] w_j = Σ_l c_{t,l} (A_l - A_{l-1}); A_l restarts
    where its block ends.
    """
    matrix = np.asarray(strategy.materialize(n))
    levels = max(0, (n - 1).bit_length())
    step = np.arange(n)
    read = np.zeros((n, levels + 1))
    for level in range(1, levels + 1):
        start = step >> level << level
        in_left_half = start < (
            step >> (level - 1) << (level - 1)
        )  # the left half of the block is past
        entry = np.where(in_left_half, matrix[step, start], 0.0)
        read[:, level] += entry
        read[:, level - 1] -= entry
    # A_0 is always empty
    diagonal = np.diagonal(matrix)[:, None]
    width = 1 << np.arange(1, levels + 1)[None, :]
    goes_on = ((step[:, None] + 1) % width != 0).astype(np.float64)
    return Modal(1 / diagonal[:, 0], read[:, 1:] / diagonal, goes_on, goes_on)


@recursion.register(strategies.TimeScaled)
def _time_scaled(strategy: strategies.TimeScaled, n: int, past: Past) -> Recursion:
    """C⁻¹ = diag(1/d) B⁻¹ diag(1/r): the recursion of B in the same memory."""
    rows, columns = strategy.diagonals(n)
    return choose(strategy.base, n, past).scaled(1 / np.asarray(rows), 1 / np.asarray(columns))
