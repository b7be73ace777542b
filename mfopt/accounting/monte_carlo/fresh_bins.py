"""Fresh bins as a sampled privacy loss: patterns of bins, their chain and tilts."""

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
from mfopt.accounting.monte_carlo import pattern_ceilings
from mfopt.accounting.monte_carlo import patterns as pattern
from mfopt.accounting.monte_carlo.free import (
    Orthogonal,
    ReassignedBins,
    Unamplified,
    guess_noise_multiplier,
)
from mfopt.accounting.monte_carlo.frozen import FrozenSamples
from mfopt.accounting.monte_carlo.group import GroupUnits
from mfopt.accounting.monte_carlo.likelihood import Ceilings, SharedGaussianComponent
from mfopt.accounting.monte_carlo.losses import LikelihoodLoss
from mfopt.accounting.monte_carlo.multisets import MultisetLoss
from mfopt.accounting.monte_carlo.pattern_frozen import (
    FrozenPatterns,
)
from mfopt.accounting.monte_carlo.pattern_law import PatternLaw
from mfopt.accounting.monte_carlo.patterns import Patterns
from mfopt.accounting.monte_carlo.protocol import (
    FreeBound,
    SampledLoss,
    law,
    loss_of,
)
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.sampling import FreshBins
from mfopt.strategies import Strategy

ONE_BIN = "fresh bins, one bin for all: Gaussian mechanism, the one pattern"
UNAMPLIFIED = "fresh bins, bounded without amplification: Gaussian mechanism, largest pattern"


class FreshBinsLoss(LikelihoodLoss):
    """One unit, any C >= 0 with at most as many bands as bins.

    Args:
      patterns: C, for σ = 1.
    """

    name = "fresh-bins"
    # a sample costs several times what it does where bins are assigned once, and says more
    calibrate_samples, least_samples = 2**13, 2**15
    worth = 0.0025
    glance = 1024

    def __init__(self, patterns: Patterns) -> None:
        self.patterns = patterns

    @property
    def likelihood(self) -> Patterns:
        return self.patterns

    @functools.cached_property
    def shared(self) -> SharedGaussianComponent | None:
        return pattern.shared(self.patterns)

    def ceilings(self, scaled: Patterns, common: float) -> Ceilings:
        return pattern_ceilings.ceilings(scaled)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a search asks for many ε at few σ
    def tuples(self, noise_multiplier: float, common: float) -> tuple[float, ...]:
        scaled = self.patterns.scaled(noise_multiplier)
        return (pattern_ceilings.second_moment(scaled, common),)

    @property
    def work(self) -> int:
        return self.patterns.iterations

    @functools.cached_property
    def sensitivity(self) -> float:
        """Largest norm of a pattern."""
        with _float64.scope():
            return math.sqrt(float(self.patterns.largest_square()))

    def start(self, epsilon: float, delta: float) -> float:
        patterns = self.patterns
        return guess_noise_multiplier(self.sensitivity, patterns.bins, epsilon, delta)

    def frozen(
        self, noise_multiplier: float, epsilon: float, samples: int, key: jax.Array
    ) -> FrozenSamples:
        with _float64.scope():
            at = FrozenPatterns.at(
                self.patterns, noise_multiplier, epsilon, pattern_ceilings.ceilings
            )
        return FrozenSamples(at, epsilon, samples, key)

    def free_bounds(self) -> Sequence[FreeBound]:
        if self.patterns.bins == 1:  # nothing is drawn
            return (Unamplified(self.sensitivity, ONE_BIN, exact=True),)
        anyway = Unamplified(self.sensitivity, UNAMPLIFIED)
        squared = pattern.orthogonal_norm(self.patterns)
        if squared is None:
            return (anyway,)
        bins, throws = self.patterns.bins, self.patterns.throws
        exact = Orthogonal(bins, squared) if throws == 1 else ReassignedBins(bins, throws, squared)
        return exact, anyway


@loss_of.register
def _of_patterns(given: Patterns) -> SampledLoss:
    return FreshBinsLoss(given)


@dataclasses.dataclass(frozen=True)
class FreshBinsLaw(PatternLaw):
    """δ̂ of fresh bins."""

    scheme: FreshBins
    limit: ClassVar[tuple[str, str]] = pattern.LIMIT

    def loss(self, strategy: Strategy) -> FreshBinsLoss:
        return FreshBinsLoss(pattern.exact(strategy, self.scheme))

    def of(self, columns: jax.Array, gram: jax.Array) -> Patterns:
        return Patterns(columns, gram, self.scheme.bins, self.scheme.rethrow)

    def estimated(self, scaled: Patterns) -> Ceilings:
        return pattern_ceilings.ceilings(scaled)


law.register(FreshBins)(FreshBinsLaw)


def model(mechanism: Any, samples: int | None = None, deterministic: bool = False) -> LossModel:
    """The model of a mechanism that is verified: one unit, or a group of them.

    Raises:
      UsageError: C has negative entries, or more bands than bins.
    """
    loss = FreshBinsLaw(mechanism.sampling).loss(mechanism.strategy)
    one = OneUnit(loss, samples, deterministic=deterministic)
    if mechanism.group_size == 1:
        return one
    direct = MultisetLoss.of(loss.patterns, mechanism.group_size, loss.name)
    if direct is not None:
        return GroupUnits(direct, samples)
    return Chain(one, mechanism.group_size, "sampled fresh bins", samples)
