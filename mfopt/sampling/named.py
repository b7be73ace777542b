"""Schemes with bins by name, as commands and the front door are asked for them."""

from __future__ import annotations

from mfopt._runtime import _check
from mfopt.sampling._bins import BinScheme
from mfopt.sampling.b_min_sep import BMinSep
from mfopt.sampling.balls_in_bins import BallsInBins
from mfopt.sampling.fresh_bins import FreshBins
from mfopt.sampling.k_of_n import KOfN

_SEPARATED = {scheme.kind: scheme for scheme in (BMinSep, KOfN)}
NAMES = (BallsInBins.kind, FreshBins.kind, *_SEPARATED)


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
      name: "balls-in-bins", "fresh-bins", "b-min-sep" or "k-of-n".
      epochs: passes over the data.
      bins: iterations of an epoch.
      reassign_every: epochs between two assignments of fresh bins; 1 by default.
      separation: of the last two; half of ``bins``, or as many as ``bands``, by default.
      bands: of the C to be used.

    Raises:
      UsageError: an unknown name, or an option of another scheme.
    """
    _check.choice("sampling", name, NAMES)
    for option, value, owners in (
        ("reassign_every", reassign_every, (FreshBins.kind,)),
        ("separation", separation, tuple(_SEPARATED)),
    ):
        if value is not None and name not in owners:
            rule = f"has no effect under {name}"
            where = " or ".join(f'"{owner}"' for owner in owners)
            raise _check.reject(option, value, rule, f"Leave it out, or use sampling={where}.")
    if name == FreshBins.kind:
        return FreshBins(bins, epochs, 1 if reassign_every is None else reassign_every)
    if name in _SEPARATED:
        scheme = _SEPARATED[name]
        if separation is None:
            most = scheme.largest_separation(bins, epochs)
            separation = max(1, min(max(bins // 2, bands), most))
        return scheme(bins, epochs, separation)
    return BallsInBins(bins, epochs)
