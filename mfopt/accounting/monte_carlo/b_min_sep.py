"""b-min-sep as a sampled privacy loss: patterns of steps, their recursion and tilts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from mfopt._runtime import _check, _sizes
from mfopt._runtime._arrays import Array
from mfopt.accounting.monte_carlo import importance, separated_ceilings
from mfopt.accounting.monte_carlo.evidence import Point, Tilt
from mfopt.accounting.monte_carlo.likelihood import Ceilings, SharedGaussianComponent
from mfopt.accounting.monte_carlo.pattern_law import PatternLaw, PatternLoss
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.separated import Separated
from mfopt.sampling import BMinSep
from mfopt.strategies import Strategy

_LEAST_WAIT = -300.0  # log of the chance of no participation in a block: float64 ends beyond


class BMinSepLoss(PatternLoss):
    """One unit, any C >= 0 with at most as many bands as the separation."""

    name = "b-min-sep"
    shared: SharedGaussianComponent | None = None  # a unit may not take part at all
    proven = staticmethod(separated_ceilings.ceilings)

    def __init__(self, likelihood: Separated, estimates: bool = False) -> None:
        super().__init__(likelihood)
        self._estimates = estimates

    @classmethod
    def estimated(cls, scaled: Separated, /) -> Ceilings:
        return separated_ceilings.estimated(scaled)

    def estimating(self) -> BMinSepLoss:
        return BMinSepLoss(self.likelihood, estimates=True)

    def ceilings(self, scaled: Separated, common: float) -> Ceilings:
        return self.estimated(scaled) if self._estimates else super().ceilings(scaled, common)

    def remove_tilts(self, ceilings: Ceilings, point: Point) -> Sequence[Tilt]:
        if self._estimates:
            return super().remove_tilts(ceilings, point)
        # a proven ceiling takes long: the order is found by estimates
        scaled = self.likelihood.scaled(point.noise_multiplier)
        near = importance.remove_tilts(self.estimated(scaled).without(ceilings.common), point)
        found = [importance.tilt(one.kind, one.order, ceilings, point) for one in near]
        return sorted(found, key=lambda one: one.log_ceiling)


@dataclasses.dataclass(frozen=True)
class BMinSepLaw(PatternLaw):
    """δ̂ of b-min-sep."""

    scheme: BMinSep
    covers = BMinSep
    losses = BMinSepLoss
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
