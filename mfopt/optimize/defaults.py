"""Defaults: the kinds of C that are searched if none is asked for.

Under balls-in-bins that is a BLT. From :data:`WAVE_FROM` on one with a wave, which keeps as many
arrays, is below it: at four arrays, between diagonals that vary with time, by 0.6 to 0.9% of the
error at ε = 4, 1.2 to 2.2% at 8 and 1.6 to 2.5% at 16 (8 × 32, 32 × 32 and 16 × 128; at ε = 2 by
0.04 to 0.5%). There both are searched, and the better on fresh samples is kept. Fresh bins and
b-min-sep have an account for banded C only: under fresh bins that is a cleared BLT where it keeps
fewer arrays than a band of an epoch would.
"""

from __future__ import annotations

from mfopt.accounting.monte_carlo.protocol import is_sampled
from mfopt.optimize import starts
from mfopt.sampling import BinScheme, CyclicPoisson, FixedOrder, FreshBins, MinSeparation, Scheme
from mfopt.strategies import time_scaled

BUFFERS = 4  # of a BLT and of one with a wave: more gain next to nothing
BANDS = 16  # at most, where a scheme has an account for so many
WAVE_FROM = 4.0  # ε; below it a second search gains less than it costs

BANDED = ("banded-toeplitz", "banded")
# kinds that are optimized where no samples are drawn, the default first; under other such schemes
# C = I alone has an account
OPTIMIZED: dict[type[Scheme], tuple[str, ...]] = {
    CyclicPoisson: BANDED,
    FixedOrder: ("blt", "toeplitz", *BANDED, "dense"),
    MinSeparation: ("blt", "toeplitz", *BANDED),
}
# banded kinds that keep few arrays, by scheme
_BUFFERED = {FreshBins.kind: "cleared-blt"}


def buffers(scheme: BinScheme) -> int:
    """Default number of buffers of a BLT, at most the number of iterations.

    >>> from mfopt.sampling import BallsInBins
    >>> buffers(BallsInBins(bins=3, epochs=1)), buffers(BallsInBins(bins=32, epochs=8))
    (3, 4)
    """
    return min(BUFFERS, scheme.iterations)


def kinds(scheme: Scheme, epsilon: float, arrays: int | None = None) -> tuple[str, ...]:
    """Kinds of C that are searched if none is named, the best of which is kept.

    Args:
      scheme: sampling.
      epsilon: of the target.
      arrays: that each may keep; by default as many as :func:`buffers`.

    >>> from mfopt.sampling import BallsInBins, FreshBins, Poisson
    >>> kinds(BallsInBins(bins=32, epochs=8), 2.0), kinds(BallsInBins(bins=32, epochs=8), 8.0)
    (('blt',), ('wave-blt', 'blt'))
    >>> kinds(FreshBins(bins=32, epochs=8), 8.0), kinds(Poisson(0.1, 20), 8.0)
    (('cleared-blt',), ('identity',))
    """
    if not is_sampled(scheme):
        return OPTIMIZED.get(type(scheme), ("identity",))[:1]
    assert isinstance(scheme, BinScheme)
    arrays = buffers(scheme) if arrays is None else arrays
    if scheme.most_bands is not None:
        buffered = _BUFFERED.get(scheme.kind) if scheme.bins > arrays + 1 else None
        return (buffered or "banded-toeplitz",)
    # of many, only a BLT without a wave has a G from its buffers
    has_few_modes = not time_scaled.has_many_modes(scheme)
    waves = has_few_modes and arrays >= starts.FEWEST_WAVE
    # the one that will most likely be kept first: what comes after the search is compiled for it
    return ("wave-blt", "blt") if waves and epsilon >= WAVE_FROM else ("blt",)
