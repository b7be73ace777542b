"""ε, δ or σ of a model that is verified rather than computed, as a guarantee."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

from mfopt._runtime import _check
from mfopt._runtime._float64 import float64
from mfopt._runtime._types import JsonObject
from mfopt.accounting.analyses import BETA_SHARE, Budget, SampledAnalysis, stated
from mfopt.accounting.model import LossModel
from mfopt.accounting.verify import Engine, Unknown, Verified, check_delta
from mfopt.guarantee import Guarantee, reported_delta
from mfopt.mechanism import Mechanism

__all__ = ["LossModel", "VerifiedAnalysis"]

_LEAST_EPSILON = 1e-9


class VerifiedAnalysis(SampledAnalysis):
    """ε, δ or σ of a :class:`LossModel`, as a :class:`Guarantee`.

    Args:
      mechanism, model: what is analysed, and its estimate and bound.
      certify: verify what is reported; otherwise it is the model's estimate, which proves nothing.
      seed: of all samples; the operating system's entropy unless pinned.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        model: LossModel,
        *,
        certify: bool = True,
        seed: int | None = None,
    ) -> None:
        self.mechanism, self.model, self.certify, self.seed = mechanism, model, certify, seed

    @contextlib.contextmanager
    def _engine(self, budget: Budget | None) -> Iterator[Engine]:
        """The engine of one question, whose tests are charged to the budget."""
        engine = Engine(self.model, self.seed, known=math.inf if budget is None else budget.proved)
        try:
            yield engine
        finally:
            if budget is not None:
                budget.spent = engine.tests * BETA_SHARE

    @float64
    def epsilon(
        self, noise_multiplier: float, delta: float, budget: Budget | None = None
    ) -> Guarantee:
        """The smallest ε that is verified at this σ and δ."""
        with self._engine(budget) as engine:
            if self.certify:
                return self._searched(engine, "epsilon", engine.epsilon(noise_multiplier, delta))
        sigma, delta = _check.positive("noise_multiplier", noise_multiplier), check_delta(delta)
        return self._estimate(sigma, self.model.sought_epsilon(sigma, delta).value, delta)

    @float64
    def noise_multiplier(
        self, epsilon: float, delta: float, budget: Budget | None = None
    ) -> Guarantee:
        """The smallest σ that is verified for (ε, δ)."""
        with self._engine(budget) as engine:
            if self.certify:
                found = engine.noise_multiplier(epsilon, delta)
                return self._searched(engine, "noise_multiplier", found)
        epsilon, delta = _check.epsilon("epsilon", epsilon), check_delta(delta)
        estimate = self.model.sought_noise_multiplier(epsilon, delta)
        return self._estimate(estimate.value, epsilon, delta)

    @float64
    def delta(self, noise_multiplier: float, epsilon: float) -> Guarantee:
        """A verified δ at this σ and ε >= 0, its failure probability included.

        Sampled accounts need ε > 0. For smaller ones P(A) - e^ε Q(A) is at most
        P(A) - e^t Q(A) + (e^t - e^ε), with t the least that they take. For larger ones than they
        take δ is at most what it is there.
        """
        epsilon = _check.non_negative("epsilon", epsilon)
        asked_epsilon = min(max(epsilon, _LEAST_EPSILON), _check.LARGEST_EPSILON)
        excess = (
            math.exp(epsilon) * math.expm1(asked_epsilon - epsilon)
            if asked_epsilon > epsilon
            else 0.0
        )
        below = 0.0
        if self.certify:
            engine = Engine(self.model, self.seed)
            verified = engine.delta(noise_multiplier, asked_epsilon)
            answer = self._verified(verified)
            below = engine.delta_below(verified) if asked_epsilon >= epsilon else 0.0
        else:
            sigma = _check.positive("noise_multiplier", noise_multiplier)
            log_delta = min(
                self.model.log_estimate(sigma, _check.epsilon("epsilon", asked_epsilon)), 0.0
            )
            answer = self._estimate(sigma, asked_epsilon, math.exp(log_delta))
        reported = reported_delta(answer.delta + excess)
        answer = dataclasses.replace(answer, epsilon=epsilon, delta=reported)
        return answer.with_lower_end(below, reported) if below > 0 else answer

    @float64
    def certified(self, noise_multiplier: float, epsilon: float, delta: float) -> Guarantee:
        """The statement itself. Raises as :meth:`.verify.Engine.certify`."""
        engine = Engine(self.model, self.seed)
        return self._verified(engine.certify(noise_multiplier, epsilon, delta))

    def _details(self) -> JsonObject:
        model = self.model
        if model.deterministic:
            return {**model.details, "certificate": "deterministic"}
        return {**model.details, "seed": self.seed}

    def _searched(self, engine: Engine, name: Unknown, verified: Verified) -> Guarantee:
        """The guarantee, with a lower end from samples of its own where there is one."""
        below, answer = engine.smallest_below(name, verified), self._verified(verified)
        return answer.with_lower_end(below, getattr(answer, name)) if below > 0 else answer

    def _verified(self, verified: Verified) -> Guarantee:
        details, bounds, status = self._details(), verified.bounds, self.model.status
        if verified.method == self.model.method:
            sides = {"remove": bounds.remove, "add": bounds.add}
            details |= {**sides, **bounds.numbers, "tests": verified.tests}
        else:
            status = "bound"
        statement = verified.noise_multiplier, verified.epsilon, min(verified.delta, 1.0)
        return stated(self.mechanism, statement, verified.method, status, details, verified.beta)

    def _estimate(self, sigma: float, epsilon: float, delta: float) -> Guarantee:
        numbers, method = (sigma, epsilon, delta), self.model.estimator
        return stated(self.mechanism, numbers, method, "estimate", self._details())
