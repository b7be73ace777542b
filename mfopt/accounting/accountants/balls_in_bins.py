"""Balls-in-bins: exact for orthogonal modes, sampled and verified for any other C >= 0."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from mfopt._runtime import _check
from mfopt.accounting import bracket, unamplified
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.independent_rounds import WITHOUT_AMPLIFICATION
from mfopt.accounting.accountants.sampled import KnownParticipations, SampledAccountant
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis, ProfileAnalysis, least
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import balls_in_bins
from mfopt.accounting.monte_carlo.free import Orthogonal
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.accounting.verify import ROUNDING
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import BallsInBins, FixedOrder


class BallsInBinsAccountant(SampledAccountant):
    """Any C >= 0 and any group."""

    schemes = (BallsInBins,)

    def model(self, mechanism: Mechanism, effort: Effort) -> LossModel:
        return balls_in_bins.model(mechanism, effort.samples, effort.deterministic)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        squared_norm = None
        if mechanism.group_size == 1:
            squared_norm = balls_in_bins.orthogonal_norm(mechanism)
        if squared_norm is None:
            return super().analysis(mechanism, effort)
        scheme: Any = mechanism.sampling
        exact = OrthogonalAnalysis(
            mechanism,
            "balls-in-bins with orthogonal modes, sum of lognormals",
            "exact",
            {"mode_norm": math.sqrt(squared_norm)},
            balls_in_bins.allocation(scheme.bins, squared_norm),
            Orthogonal(scheme.bins, squared_norm),
        )
        # what no grid of losses covers still has the bound that holds anyway
        norm = largest_mode(mechanism)
        return least([gaussian_release(mechanism, norm, WITHOUT_AMPLIFICATION), exact])


@dataclasses.dataclass(frozen=True)
class OrthogonalAnalysis(ProfileAnalysis):
    """Orthogonal modes, with the σ that the release engine gives for them."""

    exact: Orthogonal

    def noise_multiplier(self, epsilon: float, delta: float) -> Guarantee:
        epsilon, delta = _check.epsilon("epsilon", epsilon), _check.probability("delta", delta)
        sigma = self.exact.noise_multiplier(epsilon, delta) * (1 + ROUNDING)
        return self._guarantee(
            sigma, epsilon, delta, lambda: bracket.of_sigma(self.profile, sigma, epsilon, delta)
        )


class KnownBins(KnownParticipations):
    """The bins known: K units move C x by at most K times the largest mode."""

    schemes = (BallsInBins,)

    def longest(self, mechanism: Mechanism) -> float:
        return largest_mode(mechanism)


class WholeProfile(Accountant):
    """Groups with independent noise from the one-unit profile, which takes no samples."""

    schemes = (BallsInBins,)
    free = True

    def check(self, mechanism: Mechanism) -> None:
        KnownBins().check(mechanism)
        if balls_in_bins.orthogonal_norm(mechanism) is None:
            rule = "the one-unit profile of this C is sampled itself"
            raise _check.reject("strategy", mechanism.strategy, rule)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        return VerifiedAnalysis(mechanism, balls_in_bins.whole_profile(mechanism))


def largest_mode(mechanism: Mechanism) -> float:
    """The largest norm of a mode of C, rounded up."""
    scheme: Any = mechanism.sampling
    order = FixedOrder(scheme.bins, scheme.epochs)
    return unamplified.sensitivity(mechanism.strategy, order).value
