"""Schemes by name, with sizes in epochs and iterations, as the front door is asked for them."""

from __future__ import annotations

from mfopt._runtime import _check
from mfopt.sampling.b_min_sep import BMinSep
from mfopt.sampling.balls_in_bins import BallsInBins
from mfopt.sampling.base import Scheme
from mfopt.sampling.cyclic_poisson import CyclicPoisson
from mfopt.sampling.fixed_order import FixedOrder
from mfopt.sampling.fresh_bins import FreshBins
from mfopt.sampling.min_separation import MinSeparation
from mfopt.sampling.poisson import Poisson
from mfopt.sampling.random_partition import RandomPartition

NAMES = tuple(
    scheme.kind
    for scheme in (
        BallsInBins,
        FreshBins,
        BMinSep,
        Poisson,
        CyclicPoisson,
        RandomPartition,
        FixedOrder,
        MinSeparation,
    )
)
# options that some schemes have, and theirs alone
OWNERS = {
    "reassign_every": (FreshBins.kind,),
    "separation": (BMinSep.kind, RandomPartition.kind, MinSeparation.kind),
    "max_participations": (MinSeparation.kind,),
}

# schemes with a separation, and the part of an epoch that it is by default
_PART_OF_EPOCH = {BMinSep: 2, RandomPartition: 8}


def named_scheme(
    name: str, epochs: int, bins: int, *, bands: int = 1, **options: int | None
) -> Scheme:
    """Return the scheme of that name, with an expected batch of one in ``bins`` units.

    Args:
      name: one of :data:`NAMES`.
      epochs: passes over the data.
      bins: iterations of an epoch.
      bands: of the C to be used; cyclic Poisson sampling has as many groups.
      options: ``reassign_every``, epochs between two assignments of fresh bins, 1 by default;
        ``separation`` of b-min-sep and of a random partition, where it is the number of groups, by
        default half and an eighth of ``bins`` or as many as ``bands``, and of min-separation, by
        default ``bins``; ``max_participations`` of min-separation, by default ``epochs``. None
        stands for the default.

    Raises:
      UsageError: an unknown name, an option of another scheme, or a number out of range.

    >>> named_scheme("cyclic-poisson", 16, 128, bands=4)
    CyclicPoisson(probability=0.03125, bands=4, iterations=2048)
    """
    _check.choice("sampling", name, NAMES)
    chosen = {option: value for option, value in options.items() if value is not None}
    for option, value in chosen.items():
        owners = OWNERS[option]
        if name not in owners:
            way_out = f'Leave it out, or use sampling="{owners[0]}".'
            raise _check.reject(option, value, f"has no effect under {name}", way_out)
    with _check.renamed_arguments({"rethrow": "reassign_every"}):
        if name == FreshBins.kind:
            return FreshBins(bins, epochs, chosen.get("reassign_every", 1))
    for separated, part in _PART_OF_EPOCH.items():
        if name == separated.kind:
            default_separation = max(1, min(max(bins // part, bands), bins - 1))
            return separated(bins, epochs, chosen.get("separation", default_separation))
    if name == BallsInBins.kind:
        return BallsInBins(bins, epochs)
    in_order = FixedOrder(bins, epochs)  # checks both numbers
    if name == FixedOrder.kind:
        return in_order
    n = in_order.iterations
    if name == MinSeparation.kind:
        participations = chosen.get("max_participations", epochs)
        scheme = MinSeparation(n, chosen.get("separation", bins), participations)
        # a default that another number contradicts would protect less than was meant
        if "separation" not in chosen and scheme.participations < participations:
            rule = f"only {scheme.participations} fit in {n} iterations at separation {bins}"
            way_out = "Give `separation`, the least number of iterations between two of them."
            raise _check.reject("max_participations", participations, rule, way_out)
        if "max_participations" not in chosen and participations == 1 and scheme.separation < n:
            rule = "has no effect on a single participation"
            way_out = "Give `max_participations`, the most of one unit (default: epochs)."
            raise _check.reject("separation", scheme.separation, rule, way_out)
        return scheme
    if name == Poisson.kind:
        return Poisson(1 / bins, n)
    if _check.integer("bands", bands) > bins:
        rule = f"must be at most {bins}, the iterations of an epoch: a group is drawn whole then"
        raise _check.reject("bands", bands, rule)
    return CyclicPoisson(bands / bins, bands, n)


def groups(epochs: int, bins: int) -> tuple[Scheme, ...]:
    """Cyclic Poisson sampling of 1, 2, 4, … groups, as many as an epoch has iterations at most."""
    widths = [2**k for k in range(bins.bit_length())]
    return tuple(named_scheme(CyclicPoisson.kind, epochs, bins, bands=width) for width in widths)
