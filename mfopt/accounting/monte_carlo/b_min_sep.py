"""b-min-sep as a sampled privacy loss: patterns of steps, their recursion and tilts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mfopt._runtime import _check, _sizes
from mfopt._runtime._arrays import Array
from mfopt.accounting.monte_carlo import importance, separated_ceilings
from mfopt.accounting.monte_carlo.evidence import MAX_ORDER, Point, Tilt
from mfopt.accounting.monte_carlo.likelihood import Ceilings
from mfopt.accounting.monte_carlo.pattern_law import PatternLaw, PatternLoss
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.separated import Separated
from mfopt.sampling import BMinSep
from mfopt.strategies import Strategy

_LOWER = 7 / 8  # of an order, the next lower one that is tried
_LEAST_WAIT = -300.0  # log of the chance of no participation in a block: float64 ends beyond


class _BMinSepLoss(PatternLoss):
    """One unit, any C >= 0 with at most as many bands as the separation."""

    name = "b-min-sep"
    proven = staticmethod(separated_ceilings.ceilings)
    estimated = staticmethod(separated_ceilings.estimated)

    def remove_tilts(self, ceilings: Ceilings, point: Point) -> Sequence[Tilt]:
        scaled = self.likelihood.scaled(point.noise_multiplier)
        estimate = importance.least_chain("chain", MAX_ORDER, self.estimated(scaled), point)
        tilt = importance.tilt("chain", estimate.order, ceilings, point)
        # estimates say too little of high orders: lower ones, while the proven ceiling falls
        while tilt.order > 1:
            lower = importance.tilt("chain", tilt.order * _LOWER, ceilings, point)
            if not lower.log_ceiling <= tilt.log_ceiling:
                break
            tilt = lower
        # and too much of long columns: a shift is compared with what is proven
        return importance.remove_tilts(ceilings, point, tilt)


@dataclasses.dataclass(frozen=True)
class BMinSepLaw(PatternLaw):
    """δ̂ of b-min-sep."""

    scheme: BMinSep
    covers = BMinSep
    losses = _BMinSepLoss
    limit = (
        "b-min-sep supports at most as many bands as its separation",
        "columns of two participations of a unit overlap",
    )

    def of(self, columns: Array, gram: Array) -> Separated:
        return Separated(columns, gram, self.scheme.bins, self.scheme.separation)

    def _check_bands(self, bands: int) -> None:
        super()._check_bands(bands)
        if self.scheme.bins == 1:
            rule = "leaves nothing to draw: every unit takes part in every step"
            raise _check.reject("bins", 1, rule, "Use balls-in-bins.")

    def check(self, strategy: Strategy) -> int:
        bands, separation = super().check(strategy), self.scheme.separation
        if separation * math.log1p(-self.scheme.probability) < _LEAST_WAIT:
            near = f"is too near the number of bins ({self.scheme.bins})"
            rule = f"{near} for the likelihood in float64"
            way_out = "Use a smaller separation, or balls-in-bins."
            raise _check.reject("separation", separation, rule, way_out)
        return bands

    def require_memory(self) -> None:
        # tables of overlaps of one block
        n = self.scheme.iterations
        _sizes.require("separation", self.scheme.separation, lambda s: 8 * 3.0 * (n + s) * s)


law.register(BMinSep)(BMinSepLaw)
