"""What the sampled laws of schemes with patterns share: overlaps of C's columns within its bands.

Fresh bins and b-min-sep know their likelihood for a C of limited bands. Each gives its recursion
(:class:`.pattern_frozen.PatternLikelihood`); bands, draws, proposals and estimates are these.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from mfopt._runtime import _check, _quick
from mfopt.accounting.monte_carlo import band, pattern_frozen
from mfopt.accounting.monte_carlo.likelihood import Ceilings
from mfopt.accounting.monte_carlo.pattern_frozen import (
    PatternDraws,
    PatternProposal,
    PatternTerms,
)
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.sampling import BinScheme
from mfopt.strategies import Strategy

_SHORT_RUN = 512  # iterations
_RANGE = 1e100  # of the largest entry of C: squares within float64, with room to spare


@dataclasses.dataclass(frozen=True)
class PatternLaw(SampledLaw):
    """δ̂ from the overlaps of C's columns within its bands.

    Attributes:
      scheme: with a number of bands that C may have.
      limit: what that number is, in words, and what happens beyond it.
    """

    scheme: BinScheme
    divisible: ClassVar[bool] = True
    disagreement: ClassVar[float] = 0.01
    limit: ClassVar[tuple[str, str]]

    @abc.abstractmethod
    def of(self, columns: jax.Array, gram: jax.Array) -> Any:
        """The likelihood of a C by its columns and their overlaps."""

    @abc.abstractmethod
    def estimated(self, scaled: Any) -> Ceilings:
        """Ceilings in noise units, or estimates of them."""

    @property
    def frugal(self) -> int:  # type: ignore[override]
        # at 4 × 16, ε = 8 searches with a quarter of the samples end up to 1% high
        return 4 if self.scheme.iterations > _SHORT_RUN else 1

    def check_shape(self, strategy: Strategy) -> None:
        n, most = self.scheme.iterations, self.scheme.most_bands
        bands = strategy.most_bands(n)
        if most is not None and bands == n > most:  # no number of bands was asked for
            raise _check.reject(
                "strategy",
                getattr(strategy, "base", strategy).kind,
                f"its C is not banded, and {self.limit[0]} ({most})",
                "Use a banded C (banded-toeplitz), or balls-in-bins.",
            )
        check_bands(bands, self.scheme, self.limit)

    def draws(self, key: jax.Array, samples: int) -> PatternDraws:
        blank = jnp.zeros((1, self.scheme.iterations))
        result: PatternDraws = pattern_frozen.draw(key, samples, self.of(blank, blank))
        return result

    def _columns(self, strategy: Strategy) -> jax.Array:
        n = self.scheme.iterations
        return jnp.asarray(strategy.banded_columns(n, strategy.most_bands(n)))

    def quadratic(self, strategy: Strategy) -> jax.Array:
        """Overlaps of columns, shape (bands, n)."""
        return band.gram(self._columns(strategy))

    def product(self, slope: jax.Array, strategy: Strategy) -> jax.Array:
        return band.gram_product(slope, self._columns(strategy))

    def prepared(self, quadratic: jax.Array) -> Any:
        # C follows from its overlaps
        return self.of(band.factor(quadratic), quadratic)

    def log_scale(self, reduced: Any) -> jax.Array:
        """log of the root mean square norm of the columns."""
        return jnp.log(jnp.mean(jnp.asarray(reduced.gram)[0])) / 2

    def norm(self, reduced: Any) -> jax.Array:
        """Largest norm of a pattern."""
        return jnp.sqrt(reduced.largest_square())

    def proposal(self, reduced: Any, noise_multiplier: Any, epsilon: Any) -> PatternProposal:
        at = float(noise_multiplier), float(epsilon)
        return pattern_frozen.fit(reduced, *at, self.estimated)

    def frozen(self, reduced: Any, proposal: PatternProposal, draws: PatternDraws) -> PatternTerms:
        return pattern_frozen.all_terms(reduced, proposal, draws)

    def log_delta(self, terms: PatternTerms, log_sigma: Any, epsilon: Any) -> jax.Array:
        return pattern_frozen.log_delta(terms, log_sigma, epsilon)


def check_bands(bands: int, scheme: BinScheme, limit: tuple[str, str]) -> None:
    """Refuse a C with more bands than are accounted for; ``limit`` as of :class:`PatternLaw`.

    Raises:
      UsageError: there are more.
    """
    most, (words, beyond) = scheme.most_bands, limit
    if most is not None and bands > most:
        raise _check.reject(
            "bands",
            bands,
            f"{words} ({most}): with more, {beyond}",
            "Use a banded C, or balls-in-bins.",
        )


def exact_columns(strategy: Strategy, n: int, bands: int) -> tuple[np.ndarray, np.ndarray]:
    """C by its columns and their overlaps, both of shape (bands, n), numpy float64.

    Raises:
      UsageError: entries so large or small that overlaps would leave float64.
    """
    columns = np.asarray(strategy.banded_columns(n, bands))
    largest = float(np.max(columns))
    if not 1 / _RANGE <= largest <= _RANGE:
        raise _check.reject(
            "C",
            largest,
            f"its largest entry must lie in [{1 / _RANGE:g}, {_RANGE:g}]",
            "Multiply C by a constant: σ scales with it, and the mechanism stays the same.",
        )
    return columns, np.asarray(_gram(columns))


_gram = _quick.jit(band.gram)
