"""Schemes with bins by name, as commands and the front door are asked for them."""

from __future__ import annotations

from mfopt._runtime import _check
from mfopt.sampling._bins import BinScheme
from mfopt.sampling.b_min_sep import BMinSep
from mfopt.sampling.balls_in_bins import BallsInBins
from mfopt.sampling.fresh_bins import FreshBins

NAMES = (BallsInBins.kind, FreshBins.kind, BMinSep.kind)


def bin_scheme(
    name: str,
    epochs: int,
    bins: int,
    *,
    reassign_every: int | None = None,
    separation: int | None = None,
    bands: int = 1,
) -> BinScheme:
    """Return the scheme of that name.

    Args:
      name: "balls-in-bins", "fresh-bins" or "b-min-sep".
      epochs: passes over the data.
      bins: iterations of an epoch.
      reassign_every: epochs between two assignments of fresh bins; 1 by default.
      separation: of b-min-sep; half of ``bins``, or as many as ``bands``, by default.
      bands: of the C to be used.

    Raises:
      UsageError: an unknown name, or an option of another scheme.
    """
    _check.choice("sampling", name, NAMES)
    for option, value, owner in (
        ("reassign_every", reassign_every, FreshBins.kind),
        ("separation", separation, BMinSep.kind),
    ):
        if value is not None and name != owner:
            rule = f"has no effect under {name}"
            raise _check.reject(option, value, rule, f'Leave it out, or use sampling="{owner}".')
    if name == FreshBins.kind:
        return FreshBins(bins, epochs, 1 if reassign_every is None else reassign_every)
    if name == BMinSep.kind:
        if separation is None:
            separation = max(1, min(max(bins // 2, bands), bins - 1))
        return BMinSep(bins, epochs, separation)
    return BallsInBins(bins, epochs)
