"""Fresh bins as a sampled privacy loss: patterns of bins, their chain and tilts."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from mfopt import _check, _float64
from mfopt.accounting.chain import Chain
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import band, pattern_ceilings, pattern_frozen
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
    PatternDraws,
    PatternProposal,
    PatternTerms,
)
from mfopt.accounting.monte_carlo.patterns import Patterns
from mfopt.accounting.monte_carlo.protocol import (
    FreeBound,
    SampledLaw,
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
            return math.sqrt(float(pattern.largest_square(self.patterns)))

    def start(self, epsilon: float, delta: float) -> float:
        patterns = self.patterns
        return guess_noise_multiplier(self.sensitivity, patterns.bins, epsilon, delta)

    def frozen(
        self, noise_multiplier: float, epsilon: float, samples: int, key: jax.Array
    ) -> FrozenSamples:
        with _float64.scope():
            at = FrozenPatterns.at(self.patterns, noise_multiplier, epsilon)
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


_SHORT_RUN = 512  # iterations


@dataclasses.dataclass(frozen=True)
class FreshBinsLaw(SampledLaw):
    """δ̂ from the overlaps of C's columns within its bands.

    Attributes:
      scheme: fresh bins.
    """

    scheme: FreshBins
    divisible: ClassVar[bool] = True
    disagreement: ClassVar[float] = 0.01

    @property
    def frugal(self) -> int:  # type: ignore[override]
        # at 4 × 16, ε = 8 searches with a quarter of the samples end up to 1% high
        return 4 if self.scheme.iterations > _SHORT_RUN else 1

    def loss(self, strategy: Strategy) -> FreshBinsLoss:
        return FreshBinsLoss(pattern.exact(strategy, self.scheme))

    def check_shape(self, strategy: Strategy) -> None:
        n = self.scheme.iterations
        bands = strategy.most_bands(n)
        if bands == n > self.scheme.bins:  # no number of bands was asked for
            raise _check.reject(
                "strategy",
                getattr(strategy, "base", strategy).kind,
                "its C is not banded, and fresh bins support a C with at most "
                f"as many bands as there are bins ({self.scheme.bins})",
                "Use a banded C (banded-toeplitz), or balls-in-bins.",
            )
        pattern.check_bands(bands, self.scheme)

    def draws(self, key: jax.Array, samples: int) -> PatternDraws:
        at = self.scheme
        result: PatternDraws = pattern_frozen.draw(
            key, samples, (at.throws, at.bins, at.iterations)
        )
        return result

    def _columns(self, strategy: Strategy) -> jax.Array:
        n = self.scheme.iterations
        return jnp.asarray(strategy.banded_columns(n, strategy.most_bands(n)))

    def quadratic(self, strategy: Strategy) -> jax.Array:
        """Overlaps of columns, shape (bands, n)."""
        return band.gram(self._columns(strategy))

    def product(self, slope: jax.Array, strategy: Strategy) -> jax.Array:
        return band.gram_product(slope, self._columns(strategy))

    def prepared(self, quadratic: jax.Array) -> Patterns:
        return pattern.from_gram(quadratic, self.scheme.bins, self.scheme.rethrow)

    def log_scale(self, reduced: Patterns) -> jax.Array:
        """log of the root mean square norm of the columns."""
        return jnp.log(jnp.mean(jnp.asarray(reduced.gram)[0])) / 2

    def norm(self, reduced: Patterns) -> jax.Array:
        """Largest norm of a pattern."""
        return jnp.sqrt(pattern.largest_square(reduced))

    def proposal(self, reduced: Patterns, noise_multiplier: Any, epsilon: Any) -> PatternProposal:
        return pattern_frozen.fit(reduced, float(noise_multiplier), float(epsilon))

    def frozen(
        self, reduced: Patterns, proposal: PatternProposal, draws: PatternDraws
    ) -> PatternTerms:
        return pattern_frozen.all_terms(reduced, proposal, draws)

    def log_delta(self, terms: PatternTerms, log_sigma: Any, epsilon: Any) -> jax.Array:
        return pattern_frozen.log_delta(terms, log_sigma, epsilon)


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
