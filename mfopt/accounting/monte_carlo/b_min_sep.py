"""b-min-sep as a sampled privacy loss: patterns of steps, their recursion and tilts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from mfopt._runtime import _float64
from mfopt.accounting.chain import Chain
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import (
    importance,
    separated,
    separated_ceilings,
)
from mfopt.accounting.monte_carlo.evidence import Point, Tilt
from mfopt.accounting.monte_carlo.free import Unamplified, guess_noise_multiplier
from mfopt.accounting.monte_carlo.frozen import FrozenSamples
from mfopt.accounting.monte_carlo.likelihood import Ceilings, SharedGaussianComponent
from mfopt.accounting.monte_carlo.losses import LikelihoodLoss
from mfopt.accounting.monte_carlo.pattern_frozen import (
    FrozenPatterns,
)
from mfopt.accounting.monte_carlo.pattern_law import PatternLaw
from mfopt.accounting.monte_carlo.protocol import FreeBound, SampledDirection, law
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.monte_carlo.separated import Separated
from mfopt.sampling import BMinSep
from mfopt.strategies import Strategy

UNAMPLIFIED = "b-min-sep, bounded without amplification: Gaussian mechanism, largest pattern"


class BMinSepLoss(LikelihoodLoss):
    """One unit, any C >= 0 with at most as many bands as the separation.

    Args:
      likelihood: for σ = 1.
    """

    name = "b-min-sep"
    calibrate_samples, least_samples = 2**13, 2**15
    worth = 0.0025
    glance = 1024
    shared: SharedGaussianComponent | None = None  # a unit may not take part at all

    def __init__(self, likelihood: Separated) -> None:
        self._likelihood = likelihood

    @property
    def likelihood(self) -> Separated:
        return self._likelihood

    def ceilings(self, scaled: Separated, common: float) -> Ceilings:
        return separated_ceilings.ceilings(scaled)

    def _tilts(self, direction: SampledDirection, point: Point) -> Sequence[Tilt]:
        if direction == "add":
            return super()._tilts(direction, point)
        # a proven ceiling takes long: the order is found by estimates, and moved while it falls
        scaled, proven, _ = self._sampled(point)
        near = importance.remove_tilts(separated_ceilings.estimated(scaled), point)  # type: ignore[arg-type]
        found = [importance.tilt(one.kind, one.order, proven, point) for one in near]
        for place, one in enumerate(found):
            while one.kind == "chain" and one.order > 1:
                lower = importance.tilt(one.kind, one.order - 1, proven, point)
                if lower.log_ceiling >= one.log_ceiling:
                    break
                one = found[place] = lower
        return sorted(found, key=lambda one: one.log_ceiling)

    @property
    def work(self) -> int:
        return self.likelihood.dimension

    @functools.cached_property
    def sensitivity(self) -> float:
        """Largest norm of a pattern."""
        with _float64.scope():
            return math.sqrt(float(self.likelihood.largest_square()))

    def start(self, epsilon: float, delta: float) -> float:
        return guess_noise_multiplier(self.sensitivity, self.likelihood.bins, epsilon, delta)

    def frozen(
        self, noise_multiplier: float, epsilon: float, samples: int, key: jax.Array
    ) -> FrozenSamples:
        with _float64.scope():
            at = FrozenPatterns.at(
                self.likelihood, noise_multiplier, epsilon, separated_ceilings.estimated
            )
        return FrozenSamples(at, epsilon, samples, key)

    def free_bounds(self) -> Sequence[FreeBound]:
        return (Unamplified(self.sensitivity, UNAMPLIFIED),)


@dataclasses.dataclass(frozen=True)
class BMinSepLaw(PatternLaw):
    """δ̂ of b-min-sep."""

    scheme: BMinSep
    limit: ClassVar[tuple[str, str]] = separated.LIMIT

    def loss(self, strategy: Strategy) -> BMinSepLoss:
        return BMinSepLoss(separated.exact(strategy, self.scheme))

    def of(self, columns: jax.Array, gram: jax.Array) -> Separated:
        return Separated(columns, gram, self.scheme.bins, self.scheme.separation)

    def estimated(self, scaled: Separated) -> Ceilings:
        return separated_ceilings.estimated(scaled)


law.register(BMinSep)(BMinSepLaw)


def model(mechanism: Any, samples: int | None = None, deterministic: bool = False) -> LossModel:
    """The model of a mechanism that is verified: one unit, or a group of them.

    Raises:
      UsageError: C has negative entries, or more bands than the separation.
    """
    loss = law(mechanism.sampling).loss(mechanism.strategy)
    one = OneUnit(loss, samples, deterministic=deterministic)
    if mechanism.group_size == 1:
        return one
    return Chain(one, mechanism.group_size, "sampled b-min-sep", samples)
