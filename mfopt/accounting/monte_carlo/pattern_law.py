"""Sampled losses and laws of schemes with patterns, from overlaps of C's columns within its bands.

Fresh bins and b-min-sep know their likelihood for a C of limited bands. Each gives its recursion
(:class:`.pattern_frozen.PatternLikelihood`) and ceilings; all else is here.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _float64, _quick
from mfopt._runtime._arrays import Array, Scalar
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import PyTree
from mfopt.accounting import unamplified
from mfopt.accounting.monte_carlo import band, pattern_frozen
from mfopt.accounting.monte_carlo.likelihood import Ceilings
from mfopt.accounting.monte_carlo.losses import LikelihoodLoss
from mfopt.accounting.monte_carlo.pattern_frozen import (
    PatternDraws,
    PatternProposal,
    PatternTerms,
)
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.sampling import BinScheme
from mfopt.strategies import Strategy

# Of a search: numbers in the frozen samples for each parameter of C, in all (long runs would fill
# the memory), and samples at least. At 16 × 128, ε = 16 a C of many parameters ended 0.6% above the
# optimum on a quarter of the samples; one of four ends within 0.1% on them.
_NUMBERS, _MOST_NUMBERS, _FEWEST = 2.0**20, 2.0**24, 2**11


class PatternLoss(LikelihoodLoss):
    """One unit, any C >= 0 within the scheme's bands, by its likelihood for σ = 1."""

    longest = "pattern"
    # a sample costs several times what it does where bins are assigned once, and says more
    calibrate_samples, least_samples = 2**11, 2**15
    worth = 0.0025
    glance = 1024

    def __init__(self, likelihood: pattern_frozen.PatternLikelihood) -> None:
        self.likelihood = likelihood

    @staticmethod
    @abc.abstractmethod
    def proven(scaled: PyTree, /) -> Ceilings:
        """Ceilings in noise units."""

    @classmethod
    def estimated(cls, scaled: PyTree, /) -> Ceilings:
        """Estimates of them, to choose by, where proofs take long: the proven ones by default."""
        return cls.proven(scaled)

    def ceilings(self, scaled: PyTree, common: float) -> Ceilings:
        return self.proven(scaled)

    @functools.cached_property
    def sensitivity(self) -> float:
        """Largest norm of a pattern."""
        with _float64.scope():
            return math.sqrt(float(pattern_frozen.squares(self.likelihood)[0]))


@dataclasses.dataclass(frozen=True)
class PatternLaw(SampledLaw):
    """δ̂ from the overlaps of C's columns within its bands.

    Attributes:
      scheme: with a number of bands that C may have.
      covers: its class; a subclass may let units take part otherwise.
      losses: class of its losses.
      limit: what that number is, in words, and what happens beyond it.
    """

    scheme: BinScheme
    covers: ClassVar[type[BinScheme]]
    losses: ClassVar[type[PatternLoss]]
    limit: ClassVar[tuple[str, str]]
    divisible: ClassVar[bool] = True
    disagreement: ClassVar[float] = 0.01

    @abc.abstractmethod
    def of(self, columns: Array, gram: Array) -> Any:
        """The likelihood of a C by its columns and their overlaps."""

    @abc.abstractmethod
    def require_memory(self) -> None:
        """Refuse a scheme whose tables do not fit."""

    def loss(self, strategy: Strategy) -> PatternLoss:
        return self.losses(self.exact(strategy))

    def check(self, strategy: Strategy) -> int:
        """The number of bands of C, where the dominating pair is known.

        Raises:
          UsageError: another scheme, negative or non-finite entries, or too many bands.
        """
        if type(self.scheme) is not self.covers:
            rule = f"this accountant covers {self.covers.__name__} only"
            raise _check.reject("sampling", self.scheme, rule)
        strategy.check_entries(self.scheme.iterations)
        bands = unamplified.bands(strategy, self.scheme.iterations)
        self._check_bands(bands)
        return bands

    def _check_bands(self, bands: int) -> None:
        most, (words, beyond) = self.scheme.most_bands, self.limit
        if most is not None and bands > most:
            rule = f"{words} ({most}): with more, {beyond}"
            raise _check.reject("bands", bands, rule, "Use a banded C, or balls-in-bins.")

    @float64
    def exact(self, strategy: Strategy) -> Any:
        """The likelihood of C for accounting, numpy float64.

        Raises:
          UsageError: as :meth:`check`; entries so large or small that overlaps would leave float64,
            or parameters narrower than float32.
        """
        strategy = strategy.widened()
        bands = self.check(strategy)
        self.require_memory()
        columns = np.asarray(strategy.banded_columns(self.scheme.iterations, bands))
        return self.of(columns, np.asarray(_gram(columns)))

    def enough_samples(self, parameters: float) -> float:
        numbers = min(_NUMBERS * parameters, _MOST_NUMBERS)
        return max(2 * int(numbers / self.scheme.iterations / 2), _FEWEST)

    def check_shape(self, strategy: Strategy) -> None:
        n, most = self.scheme.iterations, self.scheme.most_bands
        bands = strategy.most_bands(n)
        if most is not None and bands == n > most:  # no number of bands was asked for
            rule = f"its C is not banded, and {self.limit[0]}"
            way_out = "Use a banded C (banded-toeplitz), or balls-in-bins."
            kind = getattr(strategy, "base", strategy).kind
            raise _check.reject("strategy", kind, rule, way_out)
        self._check_bands(bands)

    def draws(self, key: jax.Array, samples: int) -> PatternDraws:
        blank = jnp.zeros((1, self.scheme.iterations))
        return pattern_frozen.draw(key, samples, self.of(blank, blank))

    def _columns(self, strategy: Strategy) -> jax.Array:
        n = self.scheme.iterations
        return jnp.asarray(strategy.banded_columns(n, strategy.most_bands(n)))

    def quadratic(self, strategy: Strategy) -> jax.Array:
        """Overlaps of columns, shape (bands, n)."""
        return band.gram(self._columns(strategy))

    def product(self, slope: jax.Array, strategy: Strategy) -> jax.Array:
        return band.gram_product(slope, self._columns(strategy))

    def prepared(self, quadratic: jax.Array) -> PyTree:
        # C follows from its overlaps
        return self.of(band.factor(quadratic), quadratic)

    def log_scale(self, reduced: PyTree) -> jax.Array:
        """log of the root mean square norm of the columns."""
        return jnp.log(jnp.mean(jnp.asarray(reduced.gram)[0])) / 2

    def norm(self, reduced: PyTree) -> jax.Array:
        """Largest norm of a pattern."""
        return jnp.sqrt(reduced.largest_square())

    def proposal(
        self, reduced: PyTree, noise_multiplier: Scalar, epsilon: Scalar
    ) -> PatternProposal:
        at = float(noise_multiplier), float(epsilon)
        return pattern_frozen.placed(reduced, *at, self.losses.estimated)

    def frozen(
        self, reduced: PyTree, proposal: PatternProposal, draws: PatternDraws
    ) -> PatternTerms:
        return pattern_frozen.all_terms(reduced, proposal, draws)

    def log_delta(self, terms: PatternTerms, log_sigma: Scalar, epsilon: Scalar) -> jax.Array:
        return pattern_frozen.log_delta(terms, log_sigma, epsilon)


_gram = _quick.jit(band.gram)
