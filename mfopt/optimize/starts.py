"""Starting points of optimizations. The landscape is not convex: a bad start ends in a worse
optimum."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import scipy

from mfopt._runtime import _check
from mfopt.strategies import (
    BLT,
    BandedToeplitz,
    ClearedBLT,
    Strategy,
    Toeplitz,
    WaveBLT,
)

# 1 - λ of the slowest buffer, in units of 1/bins. Amplified optima were found between 1/bins and
# 6/bins (the slower, the larger ε).
_SLOWEST = (3.0, 0.5)
_FLOOR = 1e-12
FEWEST_WAVE = 4  # arrays of a BLT with one: an exponential, and three for the wave
_CLEARED = (4, 12)  # arrays from which a cleared BLT has two exponentials, and three
CLEARED_WEIGHTS = 1.0, 0.1  # of the starts of a cleared BLT
_SHARE = 0.2  # of its neighbours' weight that a new buffer gets


class Size(NamedTuple):
    """Size of a C.

    Attributes:
      n, bins: iterations, and iterations an epoch.
      bands, buffers: as the caller chose them, for kinds that have such a number.
    """

    n: int
    bins: int
    bands: int
    buffers: int


def spread_blts(buffers: int, bins: int) -> list[BLT]:
    """A few BLTs whose decays are spread geometrically, slow to fast."""
    starts = []
    for slowest in _SLOWEST:
        slowest_gap = min(max(slowest / bins, 1e-4), 0.4)
        gaps = np.geomspace(0.6, slowest_gap, buffers) if buffers > 1 else np.array([slowest_gap])
        starts.append(BLT(np.full(buffers, 0.4 / buffers), 1 - gaps))
    return starts


def as_blt(strategy: Strategy, size: Size) -> BLT | None:
    """``strategy`` if it is a BLT of at most that size, else None."""
    if not isinstance(strategy, BLT) or strategy.buffers > size.buffers:
        return None
    while strategy.buffers < size.buffers:
        strategy = _one_more(strategy)
    return strategy


def stretched(blt: BLT, shorter: int, n: int) -> BLT:
    """A start for as many epochs of more bins, from an optimum.

    Optima for few and for many bins have coefficients alike at a few steps, and alike at parts of
    an epoch up to a root of the factor: in between they fall like a root of the lag. The BLT with
    these coefficients, by least squares over lags evenly spread in their logarithm.

    Args:
      blt: the optimum.
      shorter, n: iterations that it is for, and that the start is for.
    """
    factor = n / shorter
    lag = np.unique(np.rint(np.geomspace(1, max(n / 2, 2), 80)).astype(int)).astype(float)
    scale, decay = np.asarray(blt.scale), np.clip(np.asarray(blt.decay), _FLOOR, 1 - _FLOOR)
    far = scale @ decay[:, None] ** (np.maximum(lag / factor, 1) - 1)
    target = far / np.sqrt(np.minimum(lag, factor))
    # gaps 1 - λ spread further, from the fastest buffer, which stays, to the slowest
    rate = -np.log(decay)
    room = np.log(rate.max() / rate.min())
    wider = 1 + np.log(factor) / room if room > 0 else 1.0
    rate = rate.max() * (rate / rate.max()) ** wider if room > 0 else rate / factor
    begin = np.log(np.concatenate([np.maximum(scale, _FLOOR) / np.sqrt(factor), rate]))

    def missed(x: np.ndarray) -> np.ndarray:
        scale, rate = np.split(np.exp(np.clip(x, -60.0, 5.0)), 2)
        return np.sqrt(lag) * (scale @ np.exp(-rate[:, None] * (lag - 1)) - target)

    logs = scipy.optimize.least_squares(missed, begin).x
    scale, rate = np.split(np.exp(np.clip(logs, -60.0, 5.0)), 2)
    return BLT(scale, np.exp(-rate), blt.gain)


def fewer(buffers: int) -> int:
    """Buffers of the BLT that one with so many begins from."""
    return buffers - max(1, buffers // 5)


def _one_more(blt: BLT) -> BLT:
    """Nearly the same C with a buffer more: in the widest gap between two λ, from their weight."""
    order = np.argsort(np.asarray(blt.decay))
    decay, scale = np.asarray(blt.decay)[order], np.asarray(blt.scale)[order]
    # a λ faster than all has no weight yet, so that a single buffer has a neighbour too
    gaps = np.log1p(-np.clip(np.append(decay[0] / 4, decay), 0, 1 - 1e-9))
    position = int(np.argmax(gaps[:-1] - gaps[1:]))
    between = -np.expm1((gaps[position] + gaps[position + 1]) / 2)
    neighbours = [k for k in (position - 1, position) if k >= 0]
    shares = _SHARE * scale[neighbours]
    scale = scale.copy()
    scale[neighbours] -= shares
    return BLT(
        np.insert(scale, position, np.sum(shares)), np.insert(decay, position, between), blt.gain
    )


def cleared(size: Size, weight: float = 1.0) -> ClearedBLT:
    """Fast exponentials with short periods and few blocks; one that lasts has the other arrays.

    Near the optima of a C of 128 bands. With 8 arrays an exponential in six blocks of an epoch and
    one in two blocks of a sixteenth come nearer to all bands than two in four blocks each. At a
    small ε the best ω are less: ``weight`` multiplies them.
    """
    buffers, bins = size.buffers, size.bins
    two_from, three_from = _CLEARED
    share, blocks, steps = [1], [buffers], [0.3 * bins]
    if buffers >= two_from:
        share, blocks, steps = [8, 1], [2, buffers - 2], [2.2, 0.35 * bins]
    if buffers >= three_from:
        share, blocks, steps = [16, 4, 1], [2, 4, buffers - 6], [1.6, 5.0, 0.4 * bins]
    periods = [max(bins // part, min(4, bins)) for part in share]
    scale = np.full(len(share), 0.25)
    scale[-1] = min(0.25, 2.4 / np.sqrt(bins))
    return ClearedBLT(
        weight * scale,
        1 - 1 / np.maximum(steps, 1.5),
        tuple(periods),
        tuple(min(count, period) for count, period in zip(blocks, periods, strict=True)),
    )


def same_cleared(strategy: Strategy, size: Size) -> ClearedBLT | None:
    """The ω and λ of ``strategy`` in arrays of this size, where it has as many exponentials."""
    if not isinstance(strategy, ClearedBLT):
        return None
    target = cleared(size)
    if len(target.periods) != len(strategy.periods):
        return None
    return dataclasses.replace(target, scale=strategy.scale, decay=strategy.decay)


def wave(bins: int) -> WaveBLT:
    """An exponential that lasts a part of an epoch, and a wave that ends with the epoch.

    Near the optima found at 8 × 32 and 16 × 128, ε from 1 to 16: the wave rises from a trough at
    lag 0 to its crest in the middle of the epoch.
    """
    size = np.sqrt(32 / max(bins, 4))
    wave = (0.22 * size, 1 - min(2.5 / bins, 0.4), 0.9, 1.85 * np.pi / bins, -3.4)
    decay = np.array([1 - min(4 / bins, 0.4)])
    return WaveBLT(np.array([0.4 * size]), decay, *map(np.asarray, wave))


def waves(size: Size) -> list[Strategy]:
    """:func:`wave` where it has as many buffers as are wanted; more begin from its optimum.

    Raises:
      UsageError: fewer are wanted.
    """
    if size.buffers < FEWEST_WAVE:
        rule = f"must be at least {FEWEST_WAVE} for a BLT with a wave"
        raise _check.reject("buffers", size.buffers, rule, "blt takes fewer.")
    return [wave(size.bins)] if size.buffers == FEWEST_WAVE else []


def as_wave(strategy: Strategy, size: Size) -> WaveBLT | None:
    """``strategy`` where it is a BLT with a wave of at most that size."""
    if not isinstance(strategy, WaveBLT):
        return None
    arrays_beside = size.buffers - (strategy.buffers - len(strategy.scale))
    beside = as_blt(BLT(strategy.scale, strategy.decay), size._replace(buffers=arrays_beside))
    if beside is None:
        return None
    return dataclasses.replace(strategy, scale=beside.scale, decay=beside.decay)


def tilted_blt(strategy: BLT, ratio: float) -> BLT:
    """C with entry (t, s) times ratio^(t-s): all λ and ω, as far as λ < 1 allows."""
    decay, scale = np.asarray(strategy.decay), np.asarray(strategy.scale)
    ratio = min(ratio, float((1 - 1e-9) / np.max(decay)))
    return BLT(scale * ratio, decay * ratio, strategy.gain)


def tilted_toeplitz(strategy: Toeplitz | BandedToeplitz, ratio: float) -> Toeplitz | BandedToeplitz:
    """C with entry (t, s) times ratio^(t-s): the coefficients lag by lag."""
    coefs = np.asarray(strategy.coefs)
    return type(strategy)(coefs * ratio ** np.arange(len(coefs)))


def of_coefficients(
    form: type[Toeplitz | BandedToeplitz], strategy: Strategy, count: int
) -> Toeplitz | BandedToeplitz | None:
    """The first ``count`` coefficients of a Toeplitz strategy, free."""
    column = strategy.toeplitz_column(count)
    return None if column is None else form(np.asarray(column))
