"""Records of sampled privacy losses, and the acceptance rule that all of them share.

A loss is sampled by a *tilt*: a proposal whose values lie in [0, B] with a proven ceiling B and
have mean H, at a *point* (σ, ε and payoff). A *pilot* only chooses and plans; it proves nothing. A
*trial* of fresh samples gives the :class:`UpperBound`. The scheme makes the values
(:mod:`.importance`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from mfopt.accounting.monte_carlo import betting, clusters, convex
from mfopt.accounting.monte_carlo.betting import COARSE, ROUNDING
from mfopt.accounting.monte_carlo.dominating_pair import log_hinge
from mfopt.strategies.fields import Array

MAX_ORDER = 256  # of a chain
# whole orders
_MOST = {"chain": MAX_ORDER, "powers": MAX_ORDER, "clusters": clusters.MOST - 1}
_GROWTH = 1.15  # from one order to the next that is tried
_BELOW = 1e-8  # relative slack from below: rounding, with what payoffs are rounded up by
_TAIL = 1 / 32  # of β, that the shares are wrong with which what is cut off is bounded by
_ABOVE = 1e-6  # a value of f/B this far above 1 is no rounding: the ceiling does not hold


class Payoff(Protocol):
    """δ₂(t), decreasing, with 0 <= δ₂ <= 1: a JAX pytree."""

    def log_value(self, t: Array) -> Array:
        """log δ₂(t), or an upper bound of it; NaN where t is NaN."""

    def log_peak(self, order: float) -> float:
        """log sup_t e^(order·t) δ₂(t) of what :meth:`log_value` gives, order >= 0."""


class HockeyStickPayoff(NamedTuple):
    """δ₂(t) = (1 − e^t)₊: the mechanism alone."""

    def log_value(self, t: Array) -> Array:
        return log_hinge(-jnp.asarray(t))

    def log_peak(self, order: float) -> float:
        # at e^t = s/(1+s)
        return order * math.log(order / (1 + order)) - math.log1p(order) if order > 0 else 0.0


HINGE = HockeyStickPayoff()


class Point(NamedTuple):
    """Point at which a divergence is evaluated.

    Attributes:
      noise_multiplier, epsilon: σ, for C as stored, and ε.
      payoff: δ₂, what is paid for a loss: by the mechanism alone, or by what it is composed with.
    """

    noise_multiplier: float
    epsilon: float
    payoff: Payoff = HINGE


class Trial(NamedTuple):
    """Sampling budget of a bound.

    Attributes:
      samples: iid samples, for each direction.
      beta: largest probability that the bound is below the truth.
      key: randomness. Nothing that is fixed before the trial may depend on it.
    """

    samples: int
    beta: float
    key: jax.Array


class Tilt(NamedTuple):
    """A proposal at one σ and ε.

    Attributes:
      kind: "chain", "clusters", "powers" or "shift" (remove direction) or "mean" (add direction).
      order: s of the remove direction, t of the add direction.
      log_ceiling: log B.
      detail: what else it is placed by, where there is more: of "mean", what is cut off.
    """

    kind: str
    order: float
    log_ceiling: float
    detail: Any = None

    @property
    def cut(self) -> convex.Cut:
        """What is cut off above B."""
        return self.detail if isinstance(self.detail, convex.Cut) else convex.WHOLE

    @property
    def proven(self) -> Tilt:
        """The same with nothing cut off, at its proven ceiling."""
        return self.lowered(-self.cut.below) if self.cut.below else self

    def lowered(self, below: float) -> Tilt:
        """The same with values cut off, e^``below`` lower."""
        cut = convex.Cut(self.cut.below + below)
        return self._replace(log_ceiling=self.log_ceiling - below, detail=cut)

    @property
    def next_order(self) -> float | None:
        """Next larger order to try with a pilot; None at the end of the kind."""
        if self.kind not in _MOST:
            return self.order * _GROWTH if self.order > 0 else None
        larger = max(round(self.order * _GROWTH), self.order + 1)
        return larger if larger <= _MOST[self.kind] else None


class Sums(NamedTuple):
    """Over iid samples: Σ f/B, Σ (f/B)², and Σ log(1 − λ f/B) for each bet λ.

    Attributes:
      shares: sums of shares of points at levels or above, see :mod:`.convex`; shape (LEVELS,).
      loss: Σ Y of the points.
    """

    total: jax.Array
    square: jax.Array
    log_wealth: jax.Array
    shares: Any = None
    loss: Any = None


def sums(value: jax.Array) -> Sums:
    """:class:`Sums` of iid values f/B, shape (samples,); NaN if one exceeds its ceiling."""
    # a value above the proven ceiling leaves no proof: no number, so that nothing is accepted
    value = jnp.where(value <= 1 + _ABOVE, value, jnp.nan)
    return Sums(jnp.sum(value), jnp.sum(value**2), betting.log_wealth(value))


class UpperBound(NamedTuple):
    """H <= ``value`` except with probability ``beta`` over the samples drawn here.

    Attributes:
      value: the bound on the hockey-stick divergence.
      mean: the point estimate.
      ceiling: the proven range bound B; the divergence never exceeds it.
      samples: 0 where the ceiling alone was small enough.
      order: s for "remove", t for "add".
    """

    value: float
    mean: float
    ceiling: float
    samples: int
    order: float


class Pilot(NamedTuple):
    """Statistics of a preliminary sample, to predict the bound from fresh samples."""

    tilt: Tilt
    sums: Sums
    samples: int

    @property
    def means(self) -> tuple[float, float]:
        """Averages of f/B and of its square."""
        return float(self.sums.total) / self.samples, float(self.sums.square) / self.samples

    @property
    def log_mean(self) -> float:
        """log of the estimate of H; −inf where no sample was above 0."""
        mean, _ = self.means
        return math.log(mean) + self.tilt.log_ceiling if mean > 0 else -math.inf

    @property
    def deviation(self) -> float:
        """Relative standard deviation of one sample; infinite where none was above 0."""
        mean, square = self.means
        return math.sqrt(max(square - mean**2, 0.0)) / mean if mean > 0 else math.inf

    def expected(self, samples: int, beta: float) -> tuple[int, float]:
        """The bet to use with ``samples`` samples, and log of the expected bound over H.

        Infinite where no sample was above 0: that is no evidence.
        """
        bet, log_bound = self.log_bound(samples, beta)
        seen = float(self.sums.total) > 0
        return bet, max(log_bound - self.log_mean, 0.0) if seen else math.inf

    def log_bound(self, samples: int, beta: float) -> tuple[int, float]:
        """The bet, and log of the bound that these samples would make."""
        above, beta = _above(self.tilt, self.sums, self.samples, samples, beta)
        bet, scaled = betting.choose(np.asarray(self.sums.log_wealth), self.samples, samples, beta)
        return bet, math.log(scaled + above) + self.tilt.log_ceiling

    def log_below(self, other: Pilot, samples: int, beta: float) -> float:
        """log of a lower bound of H except with probability ``beta``; −∞ where nothing is shown.

        Args:
          other: a pilot of the same proposal on other samples, which the bet is chosen by.
          samples: so many as these; others where only what they would show is asked for.
          beta: failure probability.
        """
        mean, mean_square = other.means
        if not (mean > COARSE and mean_square < math.inf):
            return -math.inf
        # below the mean by about λv/2 + λ²m³/3 + log(1/β)/(nλ), v the variance
        reach = -math.log(beta) / samples
        spread = max(other.deviation, 1e-15)
        bet = min(math.sqrt(2 * reach) / spread, (1.5 * reach) ** (1 / 3)) / mean
        total, square = (samples * average for average in self.means)
        scaled = betting.lower_bound(total, square, bet, samples, beta) * (1 - _BELOW) - COARSE
        return math.log(scaled) + self.tilt.log_ceiling if scaled > 0 else -math.inf

    def agrees(self, log_mean: float) -> bool:
        """True if H = e^``log_mean`` is within five standard errors (and 5%) of the pilot's."""
        error = self.deviation / math.sqrt(self.samples)
        return abs(math.expm1(min(log_mean - self.log_mean, 50.0))) <= 5 * error + 0.05


def upper_bound(
    tilt: Tilt,
    sums: Sums,
    samples: int,
    *,
    bet: int,
    beta: float,
    uniforms: int = 1,
) -> UpperBound:
    """Upper confidence bound on H from the samples of a trial.

    Args:
      tilt: the proposal, its ceiling proven at the point that was sampled.
      sums: over the samples. A value above the ceiling must have made them NaN: there is no bound
        then.
      samples: how many.
      bet: index of λ in :data:`~mfopt.accounting.monte_carlo.betting.BETS`, chosen without them.
      beta: failure probability.
      uniforms: how many a sample rests on whose tails matter.
    """
    ceiling, proven = _ceiling(tilt), _ceiling(tilt.proven)
    above, beta = _above(tilt, sums, samples, samples, beta)
    scaled = betting.upper_bound(float(sums.log_wealth[bet]), bet, samples, beta)
    scaled += uniforms * COARSE
    value = min((min(scaled, 1.0) * (1 + ROUNDING) + above) * ceiling, proven * (1 + ROUNDING))
    if not (math.isfinite(float(sums.total)) and math.isfinite(scaled)):
        value = math.nan  # a sample was no number: there is no bound
    mean = float(sums.total) / samples * ceiling
    return UpperBound(value, mean, proven, samples, tilt.order)


def ceiling_alone(tilt: Tilt) -> UpperBound:
    """The bound by the ceiling alone, without samples."""
    ceiling = _ceiling(tilt.proven)
    return UpperBound(ceiling, 0.0, ceiling, 0, tilt.order)


def _above(tilt: Tilt, sums: Sums, drawn: int, samples: int, beta: float) -> tuple[float, float]:
    """E (f − B)₊/B at most, and what is left of β for the rest.

    Args:
      tilt: the proposal.
      sums, drawn: over so many samples.
      samples, beta: of the bound, whose samples may be others, and its β.
    """
    if not tilt.cut.below > 0:
        return 0.0, beta
    shares = np.asarray(sums.shares) / drawn
    return tilt.cut.above(shares, samples, _TAIL * beta), (1 - _TAIL) * beta


def _ceiling(tilt: Tilt) -> float:
    return math.exp(min(tilt.log_ceiling, 700.0)) * (1 + ROUNDING)
