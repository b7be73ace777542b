"""Analyses: the third of (σ, ε, δ) from the other two, as a :class:`Guarantee`.

A deterministic analysis has a privacy profile at every σ, which answers all three questions.
:class:`Least` combines several analyses and reports the smallest valid bound.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from mfopt._runtime import _check
from mfopt.accounting import bracket
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.group import Profile
from mfopt.accounting.loss_distribution import poisson, rounds
from mfopt.accounting.loss_distribution.rounds import Direction, RoundsProfile
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee, Status, reported_delta
from mfopt.mechanism import Mechanism

# Relative width of σ: what a search returns is at most this much above the smallest σ.
SIGMA_TOLERANCE = 1e-5


class Analysis(Protocol):
    """Bounds for one mechanism. All numbers are per group of ``group_size`` units."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism analysed."""

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        """The smallest ε at this σ and δ."""

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """The smallest δ at this σ and ε."""

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        """The smallest σ for (ε, δ), rounded up."""


@dataclasses.dataclass(frozen=True)
class DeterministicAnalysis(abc.ABC):
    """A deterministic analysis.

    Attributes:
      mechanism: what is analysed.
      method: in words short enough for a table.
      status: "exact" up to discretization, or "bound".
      details: public numbers of the analysis.
    """

    mechanism: Mechanism
    method: str
    status: Status
    details: dict[str, Any]

    @abc.abstractmethod
    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> Profile:
        """The privacy profile at this σ, to a relative accuracy of ε."""

    @abc.abstractmethod
    def guess(self, epsilon: float, delta: float) -> float:
        """Initial σ of a search."""

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        delta = _check.probability("delta", delta)
        profile = self.profile(sigma)
        found = profile.epsilon(delta)
        between = functools.partial(bracket.of_epsilon, profile, found, delta)
        return self._guarantee(sigma, found, delta, between)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.non_negative("epsilon", epsilon)
        profile = self.profile(sigma)
        found = reported_delta(math.exp(profile.log_delta(epsilon)))
        between = functools.partial(bracket.of_delta, profile, found, epsilon)
        return self._guarantee(sigma, epsilon, found, between)

    def certified(self, noise_multiplier: float, epsilon: float, delta: float) -> Guarantee:
        """The statement itself, as a search for σ has verified it: not by way of a smallest ε.

        Raises:
          FailureError: δ is larger at this σ and ε.
        """
        attained = self.delta(noise_multiplier, epsilon)
        if not self.profile(noise_multiplier).log_delta(epsilon) <= math.log(delta):
            rule = f"not certified: at noise multiplier {noise_multiplier:.6g} and ε = {epsilon:g} "
            rule += f"δ is up to {attained.delta:.4g}, above {delta:g}"
            raise FailureError(f"{rule}. Ask for a larger δ or ε.")
        details = {name: value for name, value in attained.details.items() if name != "bracket"}
        return dataclasses.replace(attained, delta=delta, details=details)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
        target = math.log(delta)

        def excess(sigma: float, accuracy: float) -> float:
            return self.profile(sigma, accuracy).log_delta(epsilon) - target

        guess = self.guess(epsilon, delta)
        sigma = rounds.smallest_sigma(excess, guess, relative=SIGMA_TOLERANCE)
        between = functools.partial(bracket.of_sigma, self.profile, sigma, epsilon, delta)
        return self._guarantee(sigma, epsilon, delta, between)

    def _guarantee(
        self, sigma: float, epsilon: float, delta: float, between: Callable[[], bracket.Bracket]
    ) -> Guarantee:
        numbers = sigma, epsilon, delta
        made = stated(self.mechanism, numbers, self.method, self.status, self.details)
        if self.status != "exact":
            return made
        found = between()
        made = made.with_lower_end(found.below, found.above)
        return made if found.narrow else dataclasses.replace(made, status="bound")


def stated(
    mechanism: Mechanism,
    numbers: tuple[float, float, float],
    method: str,
    status: Status,
    details: dict[str, Any],
    beta: float = 0.0,
) -> Guarantee:
    """A guarantee, with the mechanism on record.

    Args:
      mechanism: what it is about.
      numbers: (σ, ε, δ).
      method, status, details: as of the guarantee.
      beta: failure probability, counted in δ.
    """
    described = {
        "sampling": mechanism.sampling.describe(),
        "strategy": mechanism.strategy.describe(),
    }
    sigma, epsilon, delta = numbers
    return Guarantee(
        epsilon=epsilon,
        delta=delta,
        noise_multiplier=sigma,
        privacy_unit=mechanism.privacy_unit,
        group_size=mechanism.group_size,
        adjacency=mechanism.adjacency,
        method=method,
        status=status,
        failure_probability=beta,
        details={**described, **details},
    )


@dataclasses.dataclass(frozen=True)
class GaussianAnalysis(DeterministicAnalysis):
    """One Gaussian release: closed form."""

    sensitivity: float = 1.0

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> Profile:
        return gaussian.GaussianProfile(self.sensitivity / noise_multiplier)

    def guess(self, epsilon: float, delta: float) -> float:
        return self.sensitivity / gaussian.largest_mu(epsilon, delta)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
        sigma = self.guess(epsilon, delta)
        step = 1e-15
        while self.profile(sigma).log_delta(epsilon) > math.log(delta):
            sigma, step = sigma * (1 + step), 2 * step
        below = sigma * (1 - 1e-12)
        return self._guarantee(sigma, epsilon, delta, lambda: bracket.Bracket(below, sigma))


@dataclasses.dataclass(frozen=True)
class RoundsAnalysis(DeterministicAnalysis):
    """Independent rounds with a random sensitivity: privacy loss distributions."""

    composed: poisson.Rounds

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> RoundsProfile:
        sigma = noise_multiplier / self.composed.scale
        return RoundsProfile(self.composed.mixture, self.composed.rounds, sigma, accuracy)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        _check.epsilon("epsilon", epsilon)
        chance = self.profile(1.0).log_chance
        if chance > math.log(_check.probability("delta", delta)):
            return super().noise_multiplier(epsilon, delta)
        method = "no noise is needed: δ is above the chance of taking part at all"
        free = dataclasses.replace(self, method=f"{method}, {math.exp(chance):.3g}")
        return free._guarantee(0.0, epsilon, delta, lambda: bracket.Bracket(0.0, 0.0))

    def guess(self, epsilon: float, delta: float) -> float:
        mixture, count = self.composed.mixture, self.composed.rounds
        return self.composed.scale * max(rounds.guess(mixture, count, epsilon, delta), 1e-3)


def least(parts: Sequence[Analysis]) -> Analysis:
    """Combine analyses into one that reports the smallest of their valid bounds.

    What one of them fails to answer, the others do.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, DeterministicAnalysis) for part in parts):
        last = cast(DeterministicAnalysis, parts[-1])
        about = last.mechanism, last.method, last.status, last.details
        return LeastDeterministic(*about, tuple(parts))
    return Least(parts[0].mechanism, tuple(parts))


@dataclasses.dataclass(frozen=True)
class Least:
    """Smallest bound of several analyses of one mechanism, at most one of which is sampled."""

    mechanism: Mechanism
    parts: tuple[Any, ...]

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        return _least(self.parts, "epsilon", noise_multiplier, delta)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        return _least(self.parts, "delta", noise_multiplier, epsilon)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        return _least(self.parts, "noise_multiplier", epsilon, delta)


@dataclasses.dataclass(frozen=True)
class LeastDeterministic(Least, DeterministicAnalysis):
    """Smallest bound of several deterministic analyses; its profile is their pointwise minimum."""

    def profile(self, noise_multiplier: float, accuracy: float = rounds.FINE) -> LeastProfile:
        return LeastProfile(tuple(one.profile(noise_multiplier, accuracy) for one in self.parts))

    def guess(self, epsilon: float, delta: float) -> float:
        return float(self.parts[-1].guess(epsilon, delta))


@dataclasses.dataclass(frozen=True)
class LeastProfile:
    """Pointwise minimum of several profiles: each bounds δ from above, so the minimum does."""

    parts: tuple[Any, ...]

    def log_delta(self, epsilon: float, direction: Direction | None = None) -> float:
        """Upper bound of log δ(ε), the larger of both directions unless one is named."""
        return min(float(one.log_delta(epsilon, direction)) for one in self.parts)

    def epsilon(self, delta: float) -> float:
        """Smallest ε >= 0 for which any of the profiles proves δ(ε) <= ``delta``."""
        return min(float(one.epsilon(delta)) for one in self.parts)


def _least(parts: Sequence[Analysis], asked: str, *given: float) -> Guarantee:
    """Smallest of the bounds; an analysis that fails is skipped, unless all fail.

    Tests have their share of δ whatever is reported in the end (:mod:`.verify`): beside them the
    others have to hold at δ less that.
    """
    answers: list[Guarantee] = []
    failures: list[str] = []
    size = operator.attrgetter(asked)

    def ask(part: Any, *given: float) -> list[Guarantee]:
        try:
            return [getattr(part, asked)(*given)]
        except FailureError as failure:
            failures.append(str(failure))
            return []

    spent, others = 0.0, [*parts]
    tested: list[Guarantee] = []
    for one in parts:
        known = min(map(size, answers), default=math.inf)
        part = one.below(known) if asked != "delta" and hasattr(one, "below") else one
        found = ask(part, *given)
        answers += found
        share: float = getattr(part, "spent", 0.0)
        if share:
            spent, tested = share, found
            others.remove(one)
    if spent:
        *first, delta = given
        again = [answer for one in others for answer in ask(one, *first, delta * (1 - spent))]
        answers = [*tested, *(dataclasses.replace(answer, delta=delta) for answer in again)]
    if not answers:
        raise FailureError(failures[-1])
    smallest = min(size(answer) for answer in answers)
    # of answers that are the same but for rounding, the one that is known to be exact
    same = [answer for answer in answers if size(answer) <= smallest * (1 + 1e-9)]
    best = min(same, key=lambda answer: (answer.status != "exact", size(answer)))
    details = {**best.details, "least_of": [answer.method for answer in answers]}
    if failures:
        details["without_answer"] = failures
    best = dataclasses.replace(best, details=details)
    known = [low for answer in answers if (low := answer.lower_bound) is not None]
    # whichever of them proved it, less than this it cannot be
    return best.with_lower_end(max(known), size(best)) if known else best
