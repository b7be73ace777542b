"""Lower ends: what explicit data sets attain, beside an answer that is an upper bound.

Rounds that do not overlap: one mixture of Gaussians a round, or a pair of them, composed from below
(:func:`.poisson.attack`). Bins: some ways of a group to fall, of chance w_k and modes m_k, μ_k =
|m_k|/σ, and the sets A_k = {<m_k, X> > t_k} give

    (1) H(P, Q) >= P(∪ A_k) − e^ε Q(∪ A_k) >= Σ_k w_k δ_G(ε − log w_k; μ_k),

since P(∪ A_k) >= Σ_k w_k Φ(μ_k − s_k) and Q(∪ A_k) <= Σ_k Φ(−s_k), s_k = t_k/(σ |m_k|). Any part
of the patterns serves: with N equally likely patterns of a unit, the longest ones of all shares are
tried. K units fall in N^K ways, of √K μ at least as overlaps are not negative, or into one pattern
together, K μ. Bins and separated steps: the statistic <X, u> along the mean mode u, whose shift has
a law of one dimension (:mod:`.projection`); of a random partition also along one group's mode. δ_G
is that of a Gaussian release. C >= 0 is attained by contributions of one vector, so all of this is.
Without sampling: the norm of C x in one explicit pattern.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from mfopt._runtime._float64 import float64
from mfopt.accounting import bracket, projection
from mfopt.accounting.closed_form.gaussian import GaussianProfile
from mfopt.accounting.loss_distribution import poisson
from mfopt.accounting.monte_carlo import (
    balls_in_bins,
    dominating_pair,
    pattern_frozen,
    patterns,
    protocol,
)
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.accounting.profile import LowerProfile
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import BallsInBins, BMinSep, FreshBins, RandomPartition

_GRAM = 1 - 1e-5  # of norms: Gram matrices are rounded up, at most by so much
_MOST_BINS, _ROUNDING = 1024, 1e-9  # of a refutation: overlaps of more take long; of log δ
_PLANNED = 0.97  # of an ε, below which a lower end is computed again, on grids planned for it


@dataclasses.dataclass(frozen=True)
class _Separate(LowerProfile):
    """e^``log_chance`` δ_G(ε + ``above``; ``mu``): (1) of the module's text."""

    mu: float
    above: float
    log_chance: float

    def log_delta_below(self, epsilon: float) -> float:
        return GaussianProfile(self.mu).log_delta_below(epsilon + self.above) + self.log_chance

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        log_delta = math.log(delta) - self.log_chance
        if log_delta >= 0:
            return 0.0
        above = GaussianProfile(self.mu).epsilon_below(math.exp(log_delta))
        return max(above - self.above, 0.0) * (1 - 1e-12)


@dataclasses.dataclass(frozen=True)
class _Best(LowerProfile):
    """The larger of several lower bounds: profiles that some data sets attain, at one σ."""

    parts: tuple[LowerProfile, ...]

    def log_delta_below(self, epsilon: float) -> float:
        questions = (part.log_delta_below for part in self.parts)
        return max(bracket.known(ask, epsilon, nothing=-math.inf) for ask in questions)

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        questions = (part.epsilon_below for part in self.parts)
        return max(bracket.known(ask, delta, estimate, nothing=0.0) for ask in questions)


class _Bins:
    """Norms of the modes of bins, and the law of a unit's shift, for σ = 1.

    Attributes:
      squares: |m_k|² of each bin in each assignment but for overlaps, shape (assignments, bins).
      law: of the shift along the mean mode.
    """

    @float64
    def __init__(self, mechanism: Mechanism) -> None:
        scheme: Any = mechanism.sampling
        rounds = 1
        if isinstance(scheme, FreshBins):
            assignments = FreshBinsLaw(scheme).exact(mechanism.strategy)
            rounds = assignments.throws
            squares = np.asarray(patterns.squared_norms(assignments))
            *_, square, products = map(np.asarray, pattern_frozen.squares(assignments))
        elif (orthogonal := balls_in_bins.orthogonal_norm(mechanism)) is None:
            gram, _ = dominating_pair.overlaps(mechanism.strategy, scheme)
            squares, products, square = np.diagonal(gram), np.mean(gram, axis=0), np.mean(gram)
        else:
            squares = np.full(scheme.bins, orthogonal)
            products, square = squares / scheme.bins, orthogonal / scheme.bins
        self.squares = -np.sort(-squares.reshape(rounds, -1), axis=1)
        along = products.reshape(rounds, -1) / math.sqrt(float(square))
        self.law = projection.of_sum([*along * _GRAM])

    def attack(self, sigma: float, group_size: int, law: projection.ShiftLaw) -> _Best:
        """Lower bounds by all attacks at one σ, by one unit of the group or by all."""
        rounds, bins = self.squares.shape
        k, log_n = group_size, rounds * math.log(bins)
        parts: list[LowerProfile] = [law.profile(sigma)]
        for count in {max(bins >> halvings, 1) for halvings in range(bins.bit_length())}:
            # overlaps of assignments, which are not negative, only lengthen a pattern
            mu = math.sqrt(float(np.sum(self.squares[:, count - 1]))) / sigma * _GRAM
            log_share = rounds * math.log(count / bins)
            parts += [_Separate(math.sqrt(j) * mu, j * log_n, j * log_share) for j in {1, k}]
            parts.append(_Separate(k * mu, k * log_n, log_share + (1 - k) * log_n))
        return _Best(tuple(parts))


def with_lower_end(mechanism: Mechanism, answer: Guarantee, question: str) -> Guarantee:
    """``answer`` with a lower bound of what ``question`` asks for in ``details["bracket"]``.

    For bounds and certified answers; as found where nothing is known.
    """
    value = getattr(answer, question)
    if answer.status not in ("bound", "certified") or not 0 < value < math.inf:
        return answer
    try:
        below = _below(mechanism, answer, question)
    except (FailureError, UsageError):  # the answer holds without
        return answer
    return answer.with_lower_end(below, value) if below > 0 else answer


def _below(mechanism: Mechanism, answer: Guarantee, question: str) -> float:
    make = attacks(mechanism)
    sigma, epsilon, delta = answer.noise_multiplier, answer.epsilon, answer.delta
    if make is None or not sigma > 0:
        return 0.0
    if question == "epsilon":
        below = make(sigma).epsilon_below(delta, epsilon)
        # its grids are planned for where the answer is taken to be
        is_loose = 0 < below < _PLANNED * epsilon
        return max(below, make(sigma).epsilon_below(delta, below / _PLANNED) if is_loose else 0.0)
    if question == "delta":
        return math.exp(make(sigma).log_delta_below(epsilon))
    return bracket.of_sigma(make, sigma, epsilon, delta).below


def refute(mechanism: Mechanism, stated: Guarantee) -> None:
    """Raise where some data sets attain a larger δ than is stated. That nothing is raised proves
    nothing.

    Args:
      mechanism: C, sampling, unit, group size and adjacency.
      stated: of it; estimates claim nothing and are not examined.

    Raises:
      FailureError: the guarantee is false.
    """
    sigma, epsilon, delta = stated.noise_multiplier, stated.epsilon, stated.delta
    claims = stated.status != "estimate" and sigma > 0 and math.isfinite(epsilon)
    if not claims or getattr(mechanism.sampling, "bins", 0) > _MOST_BINS:
        return
    try:
        make = attacks(mechanism)
        log_delta = -math.inf if make is None else float(make(sigma).log_delta_below(epsilon))
    except (FailureError, UsageError):  # nothing is known
        return
    if log_delta > (math.log(delta) if delta > 0 else -math.inf) + _ROUNDING:
        raise FailureError(
            f"({epsilon:g}, {delta:g})-DP at σ = {sigma:.6g} is FALSE: at this ε some data sets "
            f"show δ >= {math.exp(log_delta):.3g}"
        )


def attacks(mechanism: Mechanism) -> Callable[[float], LowerProfile] | None:
    """σ -> what some data sets attain there; None where nothing is known."""
    size = mechanism.group_size
    if isinstance(mechanism.sampling, BMinSep | RandomPartition):
        laws = [law.of_group(size) for law in _separated(mechanism)]
        return lambda sigma: _Best(tuple(law.profile(sigma) for law in laws))
    if isinstance(mechanism.sampling, BallsInBins | FreshBins):
        bins = _Bins(mechanism)
        law = bins.law.of_group(size)
        return lambda sigma: bins.attack(sigma, size, law)
    rounds = poisson.attack(mechanism.strategy, mechanism.sampling, size, mechanism.adjacency)
    if rounds is None or rounds.mixture.trivial:
        return None
    return rounds.profile


@float64
def _separated(mechanism: Mechanism) -> list[projection.ShiftLaw]:
    """Laws of a unit's shift, of steps that are separated: along the mean mode, or one group's."""
    scheme: Any = mechanism.sampling
    likelihood = protocol.law(scheme).exact(mechanism.strategy)  # type: ignore[attr-defined]
    *_, square, products = map(np.asarray, pattern_frozen.squares(likelihood))
    along = products / math.sqrt(float(square)) * _GRAM
    if isinstance(scheme, BMinSep):
        return [projection.of_separated(along, scheme.separation, scheme.probability)]
    groups = np.arange(scheme.iterations) % scheme.separation
    steps = groups == np.argmax(np.bincount(groups, np.asarray(likelihood.gram)[0]))
    products = np.asarray(likelihood.products(steps[None]))[0]
    of_group = products / math.sqrt(float(products[steps].sum())) * _GRAM
    return [
        projection.of_partition(shifts, scheme.separation, likelihood.probability)
        for shifts in (along, of_group)
    ]
