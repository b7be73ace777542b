"""Balls-in-bins: exact for orthogonal modes, sampled and verified for any other C >= 0."""

from __future__ import annotations

import math
from typing import Any

from mfopt.accounting import unamplified
from mfopt.accounting.account import Effort
from mfopt.accounting.accountants.sampled import KnownPattern, SampledAccountant
from mfopt.accounting.analyses import Analysis, DeterministicAnalysis, least
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import balls_in_bins
from mfopt.accounting.monte_carlo.free import Orthogonal
from mfopt.mechanism import Mechanism
from mfopt.sampling import BallsInBins, FixedOrder


class BallsInBinsAccountant(SampledAccountant):
    """Any C >= 0 and any group."""

    schemes = (BallsInBins,)

    def model(self, mechanism: Mechanism, effort: Effort) -> LossModel | DeterministicBound:
        return balls_in_bins.model(mechanism, effort.samples, effort.deterministic)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        is_sampled_question = effort.samples or not effort.certify or effort.deterministic
        if not is_sampled_question and balls_in_bins.is_costly(mechanism):
            return _KnownBins().analysis(mechanism, effort)  # without samples, as _WholeProfile
        is_single = mechanism.group_size == 1
        squared = balls_in_bins.orthogonal_norm(mechanism) if is_single else None
        if squared is None:
            return super().analysis(mechanism, effort)
        scheme: Any = mechanism.sampling
        exact = DeterministicAnalysis(
            mechanism, Orthogonal(scheme.bins, squared), {"mode_norm": math.sqrt(squared)}
        )
        # what no grid of losses covers still has the bound that holds anyway
        return least([_KnownBins().analysis(mechanism, effort), exact])


class _KnownBins(KnownPattern):
    """The bins known: K units move C x by at most K times the largest mode."""

    schemes = (BallsInBins,)

    def longest(self, mechanism: Mechanism) -> float:
        scheme: Any = mechanism.sampling
        order = FixedOrder(scheme.bins, scheme.epochs)
        return unamplified.sensitivity(mechanism.strategy, order).value


class _WholeProfile(_KnownBins):
    """Groups from the one-unit profile of orthogonal modes above those of C, without samples."""

    schemes = (BallsInBins,)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        return DeterministicAnalysis(mechanism, balls_in_bins.whole_profile(mechanism))
