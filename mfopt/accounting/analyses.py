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
from typing import Any, Protocol

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.accounting import bracket
from mfopt.accounting.bound import DeterministicBound
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee, Status, reported_delta
from mfopt.mechanism import Mechanism

BETA_SHARE = 1 / 1000  # β of one test, over δ
TESTS = 3  # of one question, at most
_LOOSEST = 0.05  # of σ: a wider bracket is not looked for


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


@dataclasses.dataclass
class Budget:
    """δ of a question to a sampled analysis, and what its tests have spent of it.

    Attributes:
      delta: δ of the question.
      proved: σ or ε that is proved otherwise: nothing larger is of use.
      spent: share of δ that tests have spent, whatever came of them. An analysis that says nothing
        is charged as if it had made all tests.
    """

    delta: float
    proved: float = math.inf
    spent: float = TESTS * BETA_SHARE


class SampledAnalysis(abc.ABC):
    """Bounds for one mechanism that hold with a probability over the accountant's own samples.

    The analysis of an accountant that is ``sampled``. Whoever refuses a question has used his
    samples all the same: tests are charged to the budget that a question comes with.
    """

    mechanism: Mechanism

    @abc.abstractmethod
    def epsilon(
        self, noise_multiplier: float, delta: float, budget: Budget | None = None
    ) -> Guarantee:
        """The smallest ε at this σ and δ; ``budget.spent`` is set, also where it raises."""

    @abc.abstractmethod
    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """The smallest δ at this σ and ε, all failure probabilities included."""

    @abc.abstractmethod
    def noise_multiplier(
        self, epsilon: float, delta: float, budget: Budget | None = None
    ) -> Guarantee:
        """The smallest σ for (ε, δ); ``budget.spent`` is set, also where it raises."""


@dataclasses.dataclass(frozen=True)
class DeterministicAnalysis:
    """A deterministic bound of one mechanism, as guarantees.

    Attributes:
      mechanism: what is analysed.
      bound: its privacy profile at every σ.
      details: public numbers of the analysis.
    """

    mechanism: Mechanism
    bound: DeterministicBound
    details: JsonObject = dataclasses.field(default_factory=dict)

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        delta = _check.probability("delta", delta)
        profile = self.bound.profile(sigma)
        epsilon = self.bound.epsilon(sigma, delta)
        between = functools.partial(bracket.of_epsilon, profile, epsilon, delta)
        return self._guarantee(sigma, epsilon, delta, between)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        sigma = _check.positive("noise_multiplier", noise_multiplier)
        epsilon = _check.non_negative("epsilon", epsilon)
        profile = self.bound.profile(sigma)
        delta = reported_delta(math.exp(profile.log_delta(epsilon)))
        between = functools.partial(bracket.of_delta, profile, delta, epsilon)
        return self._guarantee(sigma, epsilon, delta, between)

    def certified(self, noise_multiplier: float, epsilon: float, delta: float) -> Guarantee:
        """The statement itself, as a search for σ has verified it: not by way of a smallest ε.

        Raises:
          FailureError: δ is larger at this σ and ε.
        """
        attained = self.delta(noise_multiplier, epsilon)
        if not self.bound.profile(noise_multiplier).log_delta(epsilon) <= math.log(delta):
            rule = f"not certified: at noise multiplier {noise_multiplier:.6g} and ε = {epsilon:g} "
            rule += f"δ is up to {attained.delta:.4g}, above {delta:g}"
            raise FailureError(f"{rule}. Ask for a larger δ or ε.")
        return _for_larger(attained, delta)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
        if (reason := self.bound.without_noise(delta)) is not None:
            numbers = 0.0, epsilon, delta
            return self._guarantee(*numbers, lambda: bracket.Bracket(0.0, 0.0), reason)
        sigma = self.bound.noise_multiplier(epsilon, delta) * (1 + self.bound.margin)
        # a looser lower end is that of an attack
        search = self.bound.profile, sigma, epsilon, delta, self.bound.tolerance, _LOOSEST
        return self._guarantee(sigma, epsilon, delta, functools.partial(bracket.of_sigma, *search))

    def _guarantee(
        self,
        sigma: float,
        epsilon: float,
        delta: float,
        between: Callable[[], bracket.Bracket],
        method: str | None = None,
    ) -> Guarantee:
        numbers = sigma, epsilon, delta
        status: Status = "exact" if self.bound.exact else "bound"
        method = method or self.bound.method
        guarantee = stated(self.mechanism, numbers, method, status, self.details)
        if status == "bound":
            return guarantee
        ends = between()
        guarantee = guarantee.with_lower_end(ends.below, ends.above)
        return guarantee if ends.narrow else dataclasses.replace(guarantee, status="bound")


def stated(
    mechanism: Mechanism,
    numbers: tuple[float, float, float],
    method: str,
    status: Status,
    details: JsonObject,
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


def least(parts: Sequence[Analysis]) -> Analysis:
    """Combine analyses into one that reports the smallest of their valid bounds.

    What one of them fails to answer, the others do.

    Raises:
      TypeError: more than one of them is sampled: each has its tests counted in the whole δ.
    """
    flat = [x for part in parts for x in (part.parts if isinstance(part, Least) else (part,))]
    if sum(isinstance(part, SampledAnalysis) for part in flat) > 1:
        classes = ", ".join(type(part).__qualname__ for part in flat)
        raise TypeError(
            f"{classes}: at most one of them can be an mfopt.accounting.SampledAnalysis"
        )
    return flat[0] if len(flat) == 1 else Least(flat[0].mechanism, tuple(flat))


@dataclasses.dataclass(frozen=True)
class Least:
    """Smallest bound of several analyses of one mechanism, at most one of which is sampled."""

    mechanism: Mechanism
    parts: tuple[Analysis, ...]

    def epsilon(self, noise_multiplier: float, delta: float) -> Guarantee:
        return _least(self.parts, "epsilon", noise_multiplier, delta)

    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        return _least(self.parts, "delta", noise_multiplier, epsilon)

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        return _least(self.parts, "noise_multiplier", epsilon, delta)


def _least(parts: Sequence[Analysis], question: str, *arguments: float) -> Guarantee:
    """Smallest of the bounds; an analysis that fails is skipped, unless all fail.

    Tests have their share of δ whatever is reported in the end (:mod:`.verify`): beside them the
    others have to hold at δ less that.

    Args:
      parts: the analyses.
      question: name of the method that is asked.
      arguments: its arguments, δ the last where it is one.
    """
    failures: list[str] = []
    size = operator.attrgetter(question)

    def ask(part: Analysis, *arguments: Any) -> list[Guarantee]:
        try:
            return [getattr(part, question)(*arguments)]
        except FailureError as failure:
            failures.append(str(failure))
            return []

    answers: list[Guarantee] = []
    tested: list[Guarantee] = []
    spent = 0.0
    for part in parts:
        # a δ includes the failure probability of its tests, and is charged with no more
        if isinstance(part, SampledAnalysis) and question != "delta":
            budget = Budget(arguments[-1], min(map(size, answers), default=math.inf))
            tested += ask(part, *arguments, budget)
            spent = budget.spent
        else:
            answers += ask(part, *arguments)
    at_delta = [*answers, *tested]
    if spent:
        *leading, delta = arguments
        deterministic = [part for part in parts if not isinstance(part, SampledAnalysis)]
        charged = [
            answer for part in deterministic for answer in ask(part, *leading, delta * (1 - spent))
        ]
        answers = [_for_larger(answer, delta) for answer in charged]
    answers += tested
    if not answers:
        raise FailureError(failures[-1])
    smallest = min(size(answer) for answer in answers)
    # of answers that are the same but for rounding, the one that is known to be exact
    ties = [answer for answer in answers if size(answer) <= smallest * (1 + 1e-9)]
    best = min(ties, key=lambda answer: (answer.status != "exact", size(answer)))
    details = {**best.details, "least_of": [answer.method for answer in answers]}
    if failures:
        details["without_answer"] = failures
    best = dataclasses.replace(best, details=details)
    lower = [low for answer in at_delta if (low := answer.lower_bound) is not None]
    # whichever of them proved it, less than this it cannot be
    return best.with_lower_end(max(lower), size(best)) if lower else best


def _for_larger(guarantee: Guarantee, delta: float) -> Guarantee:
    """The guarantee for a larger δ, where its lower end need not hold."""
    details = {name: value for name, value in guarantee.details.items() if name != "bracket"}
    return dataclasses.replace(guarantee, delta=delta, details=details)
