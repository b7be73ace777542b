"""Privacy profile of repeated mixture-of-Gaussians rounds, to a stated accuracy.

The grid is planned from the answer's own sensitivity to it (:mod:`.grid`). Upper bounds come from
a discrete pair that dominates a round, lower bounds from one that a round dominates: together they
say how exact an answer is, whatever the plan aimed at.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.linear import RESOLVED, NearlyLinear
from mfopt.accounting.loss_distribution.convolution import ComposedLosses, Composition
from mfopt.accounting.loss_distribution.grid import Grid, Law, RepeatedRound
from mfopt.accounting.loss_distribution.mixture import Resolution, Round
from mfopt.accounting.loss_distribution.tilting import log_sum_exp
from mfopt.accounting.profile import Direction, Profile
from mfopt.errors import FailureError

COARSE, FINE = 1e-3, 2e-5  # relative accuracy aimed at for ε: in searches, and for reported numbers
# Truncated probability relative to the δ in question: e^-16 = 1e-7.
_TRUNCATED = 16.0
_LAST_PLACES = 1e-14  # of δ near 1: what sums of masses do not resolve
_FAINTEST = -690.0  # log of the smallest δ that floats resolve
_PLANS = 6
_NOTHING = 1e-3  # ε: of estimates below, 0 is tried
_DIRECTIONS: tuple[Direction, ...] = ("remove", "add")


@dataclasses.dataclass(frozen=True)
class RoundsProfile(Profile):
    """δ(ε) and ε(δ) of ``rounds`` compositions of one mixture-of-Gaussians round.

    Both directions are covered: "remove" compares the mixture with the plain Gaussian, "add"
    the other way round. Values are upper bounds unless they are called below; ``accuracy`` is the
    aimed-at relative error of ε. With the accuracy of searches, :data:`COARSE`, only the direction
    that estimates say decides is computed.

    Attributes:
      mixture, rounds: sensitivities of one round, and number of compositions.
      noise_multiplier: σ, relative to the clip norm.
      accuracy: relative error of ε that the grid is chosen for.
      other_kinds: rounds of other kinds that these are composed with.
    """

    mixture: Round
    rounds: int
    noise_multiplier: float
    accuracy: float = FINE
    other_kinds: tuple[RepeatedRound, ...] = ()

    @classmethod
    def of(cls, kinds: Sequence[RepeatedRound], accuracy: float = FINE) -> RoundsProfile:
        """The profile of rounds of at least one kind."""
        return cls(*kinds[0], accuracy, tuple(kinds[1:]))

    @property
    def _kinds(self) -> tuple[RepeatedRound, ...]:
        return RepeatedRound(self.mixture, self.rounds, self.noise_multiplier), *self.other_kinds

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε) for ε >= 0, the larger of both directions unless one is named."""
        epsilon = _check.non_negative("epsilon", epsilon)
        ceiling = self._log_ceiling(epsilon)
        if self.mixture.trivial or self._one_gaussian is not None or ceiling < _FAINTEST:
            return ceiling
        if self._linear.tight(epsilon) or not self._resolved:
            return ceiling
        # the largest loss of the direction that adds: nobody takes part, log Q/P = -log w_0
        log_none = sum(kind.rounds * kind.mixture.log_none for kind in self._kinds)
        if epsilon >= -log_none * (1 + 1e-12):
            if direction == "add":
                return -math.inf
            direction = "remove"
        if direction is None and self.accuracy >= COARSE:
            # searching: the direction that the estimates say decides
            laws = self._deciding(epsilon)
            return min(max(self._log_delta(epsilon, law.direction)[0] for law in laws), ceiling)
        value, composition = self._log_delta(epsilon, direction or "remove")
        if direction is None and not _no_larger(composition.reverse(), epsilon, value):
            value = max(value, self._log_delta(epsilon, "add")[0])
        # so close to 1 sums of masses may have rounded the difference away
        return min(value, ceiling) if value < -_LAST_PLACES else ceiling

    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0 whose δ, as :meth:`log_delta` computes it, is at most ``delta``."""
        target = math.log(_check.probability("delta", delta))
        if self._log_ceiling(0.0) <= target:
            return 0.0
        ceiling = gaussian.epsilon(self._largest_mu, delta)
        if self._one_gaussian is not None:
            return ceiling
        ceiling = min(ceiling, self._linear.epsilon(target))
        if ceiling <= 1 and self._linear.epsilon_below(target) >= ceiling * (1 - 1e-4):
            return ceiling
        if not self._resolved:
            return ceiling
        estimate = max(self._law(direction, target).epsilon(target) for direction in _DIRECTIONS)
        if estimate < _NOTHING and self.log_delta(0.0) <= target:
            return 0.0
        return solve.smallest(
            lambda epsilon: self.log_delta(epsilon) - target,
            estimate,
            name="epsilon",
            relative=self.accuracy / 16,  # as many evaluations as half of it takes
            growth=1.02,
            largest=ceiling,
        )

    def log_delta_below(self, epsilon: float) -> float:
        """Lower bound of log δ(ε), ε >= 0, in the direction estimated to be the larger."""
        epsilon = _check.non_negative("epsilon", epsilon)
        if self.mixture.trivial or self._one_gaussian is not None:
            return self._log_ceiling(epsilon)
        linear = self._linear.log_delta_below(epsilon)
        if self._linear.tight(epsilon) or not self._resolved:
            return linear
        for law in self._deciding(epsilon):
            expected = self._estimate(law, epsilon)
            linear = max(linear, self._below(epsilon, law, expected).log_delta_below(epsilon))
        return linear

    def epsilon_below(self, delta: float, estimate: float | None = None) -> float:
        """Lower bound of the smallest ε >= 0 with δ(ε) <= ``delta``.

        ``estimate`` is about where it is: the upper bound, say, where that was computed.
        """
        target = math.log(_check.probability("delta", delta))
        if self._log_ceiling(0.0) <= target:
            return 0.0
        if self._one_gaussian is not None:
            return gaussian.epsilon(self._one_gaussian, delta) * (1 - 1e-12)
        linear = self._linear.epsilon_below(target)
        if not self._resolved:
            return linear
        upper = self.epsilon(delta) if estimate is None else estimate
        if linear >= upper * (1 - 1e-4):
            return min(linear, upper)
        for law in self._deciding(upper):
            linear = max(linear, _largest_epsilon(self._below(upper, law, target), target, upper))
        return linear

    @functools.cached_property
    def _largest_mu(self) -> float:
        """μ of the Gaussian mechanism if units always take part with the largest sensitivity."""
        return math.hypot(
            *(mixture.largest * math.sqrt(rounds) / sigma for mixture, rounds, sigma in self._kinds)
        )

    @property
    def _one_gaussian(self) -> float | None:
        is_gaussian = all(kind.mixture.components == 1 for kind in self._kinds)
        return self._largest_mu if is_gaussian else None

    @property
    def log_chance(self) -> float:
        """log of the chance that a sensitivity is not 0 in some round: δ is never above it."""
        return min(log_sum_exp(np.array([_log_chance(*kind[:2]) for kind in self._kinds])), 0.0)

    def _log_ceiling(self, epsilon: float) -> float:
        """The least of the bounds in closed form."""
        if self.mixture.trivial:
            return -math.inf
        plain = gaussian.log_delta(self._largest_mu, epsilon)
        return min(plain, self.log_chance, self._linear.log_delta(epsilon))

    @property
    def _linear(self) -> NearlyLinear:
        unknown = math.inf, math.inf
        parts = [
            (rounds, *(mixture.linear(sigma) or unknown)) for mixture, rounds, sigma in self._kinds
        ]
        return NearlyLinear.of_rounds(parts)

    @property
    def _resolved(self) -> bool:
        # where the linear part is not known, it is at most what moves if draws are known
        size = min(self._linear.deviation, self._largest_mu)
        return size >= RESOLVED * sum(kind.rounds for kind in self._kinds)

    def _law(self, direction: str, log_delta: float) -> Law:
        return _law(self._kinds, self._log_tail(log_delta), direction == "add")

    def _log_tail(self, log_delta: float) -> float:
        rounds = sum(kind.rounds for kind in self._kinds)
        return max(log_delta, _FAINTEST) - math.log(rounds) - _TRUNCATED

    def _deciding(self, epsilon: float) -> list[Law]:
        """The laws whose estimated δ is the larger, or both where they are close."""
        laws = [self._law(direction, _FAINTEST) for direction in _DIRECTIONS]
        values = [law.at(epsilon).log_delta(epsilon) for law in laws]
        return [law for law, value in zip(laws, values, strict=True) if value >= max(values) - 0.3]

    def _estimate(self, law: Law, epsilon: float) -> float:
        return min(max(law.at(epsilon).log_delta(epsilon), _FAINTEST), -1e-3)

    def _log_delta(self, epsilon: float, direction: Direction) -> tuple[float, Composition]:
        log_delta = self._estimate(self._law(direction, _FAINTEST), epsilon)
        for _ in range(_PLANS):
            composition, composed = self._compose(direction, epsilon, log_delta)
            value = composed.log_delta(epsilon)
            del composed  # millions of points: not beside the next
            # what was truncated must be small against the δ that was found, or it is repeated
            if value > log_delta - 6 or log_delta <= _FAINTEST:
                break
            log_delta = max(min(value, log_delta - 6) - 4, _FAINTEST)
        return value, composition

    def _compose(
        self, direction: Direction, epsilon: float, log_delta: float
    ) -> tuple[Composition, ComposedLosses]:
        """Rounds on a grid that is fine enough at ε, and their sum."""
        law = self._law(direction, log_delta).at(epsilon)
        grid = self._grid(law, epsilon)
        for coarser in (1, 8, 64, 512):
            try:
                composition = self._on(grid, coarser * grid.step, log_delta)
                composition = composition.reverse() if law.add else composition
                mean, variance = composition.tilted_moments(grid.tilt)
                # a grid that is coarse against the losses may have another saddle point
                close = abs(mean - epsilon) <= 2 * math.sqrt(variance)
                tilt = grid.tilt if close else composition.tilt_for_epsilon(epsilon)
                return composition, composition.convolve(tilt)
            except FailureError:  # too wide a window after all: the grid adds to it
                continue
        raise FailureError(
            f"no grid that is affordable covers the losses at σ = {self.noise_multiplier:g}; "
            "use more noise or a smaller ε"
        )

    def _grid(self, law: Law, epsilon: float) -> Grid:
        components = max(kind.mixture.components for kind in self._kinds)
        return Grid.plan(law, epsilon, self.accuracy, components)

    def _on(
        self, grid: Grid, step: float, log_delta: float, below: Law | None = None
    ) -> Composition:
        """All rounds on a grid, in the remove direction; dominated, in that of a law ``below``."""
        cut = Resolution(grid.spacing, self._log_tail(log_delta), (grid.least, grid.largest))
        parts = []
        for mixture, rounds, sigma in self._kinds:
            if below is None:
                part = mixture.discretize(sigma, step, cut)
            else:
                part = mixture.discretize_below(sigma, step, cut, add=below.add, rounds=rounds)
            parts.append((part, rounds))
        return Composition(tuple(parts))

    def _below(self, epsilon: float, law: Law, log_delta: float) -> ComposedLosses:
        """Composed losses that the rounds dominate, in the direction of ``law``."""
        grid = self._grid(law.at(epsilon), epsilon)
        return self._on(grid, grid.step, log_delta, law).convolve(grid.tilt)

    def composition(self, log_delta: float) -> Composition:
        """The rounds on a grid for their own ε at δ, with all losses, in both directions."""
        law = self._law("remove", log_delta)
        grid = self._grid(law, max(law.epsilon(log_delta), 1e-4))
        grid = dataclasses.replace(grid, least=-math.inf, largest=math.inf)
        return self._on(grid, grid.step, log_delta)


def _log_chance(mixture: Round, rounds: int) -> float:
    """log of the chance that the sensitivity is not 0 in some round."""
    log_chance = mixture.log_chance
    if log_chance == 0 or mixture.trivial:
        return log_chance
    # log(1 - e^x), also where e^x is 1 or 1 - e^x is to rounding
    likely = log_chance > -math.log(2)
    none = math.log(-math.expm1(log_chance)) if likely else math.log1p(-math.exp(log_chance))
    none *= rounds
    # rounded up; expm1 would lose what log_chance keeps far below the smallest float
    some = math.log(-math.expm1(none)) if none < -1e-300 else log_chance + math.log(rounds)
    return min(some + 1e-13, log_chance + math.log(rounds), 0.0)


_law = functools.lru_cache(maxsize=16)(Law.of)


def smallest_sigma(
    excess: Callable[[float, float], float], guess: float, *, relative: float
) -> float:
    """The smallest σ without excess: a coarse grid finds the neighbourhood, the fine one decides.

    Args:
      excess: of σ and the accuracy of the grid.
      guess, relative: as of :func:`.solve.smallest`.
    """
    search = functools.partial(solve.smallest, name="noise multiplier")
    start = search(lambda sigma: excess(sigma, COARSE), guess, relative=1e-3) * 0.9999
    return search(lambda sigma: excess(sigma, FINE), start, relative=relative, growth=1.001)


def guess(mixture: Round, rounds: int, epsilon: float, delta: float) -> float:
    """Initial σ for (ε, δ), by the saddle-point estimate of the larger direction.

    Args:
      mixture, rounds: sensitivities of one round, and compositions.
      epsilon, delta: the target.
    """
    target = math.log(delta)

    def excess(sigma: float) -> float:
        profile = RoundsProfile(mixture, rounds, sigma)
        tail = profile._log_tail(target)
        laws = [Law.of(profile._kinds, tail, add) for add in (False, True)]
        value = max(law.at(epsilon).log_delta(epsilon) for law in laws)
        return min(max(value, -1e4), profile._log_ceiling(epsilon)) - target

    mu, largest = gaussian.largest_mu(epsilon, delta), mixture.largest
    moved = math.sqrt(rounds) * mixture.mean / mu
    start = min(max(moved, largest / 4), largest * math.sqrt(rounds) / mu)
    value = solve.about(excess, start, fall=1 - 2 * target, relative=1e-2)
    if value is not None:
        return value[0]
    return solve.smallest(excess, start, name="noise multiplier", relative=3e-2, growth=1.5)


def _no_larger(composition: Composition, epsilon: float, log_delta: float) -> bool:
    """True if Chernoff's bound alone proves that log δ(ε) is at most ``log_delta``."""
    tilt = composition.tilt_for_epsilon(epsilon)
    return composition.log_delta_bound(epsilon, tilt) <= log_delta


def _largest_epsilon(composed: ComposedLosses, log_delta: float, guess: float) -> float:
    """An ε <= ``guess`` that is too small: its δ is proven to be above ``log_delta``; or 0."""
    high, share = guess, 1e-5
    while composed.log_delta_below(guess * (1 - share)) <= log_delta:
        high = guess * (1 - share)
        share *= 4
        if share >= 1:
            return 0.0
    low = guess * (1 - share)
    while high - low > 1e-9 * guess:
        middle = 0.5 * (low + high)
        if composed.log_delta_below(middle) > log_delta:
            low = middle
        else:
            high = middle
    return low
