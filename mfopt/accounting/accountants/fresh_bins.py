"""Fresh bins: composed assignments for C = I, samples that are verified for any other C >= 0."""

from __future__ import annotations

from mfopt.accounting.accountants.sampled import KnownParticipations, SampledAccountant
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.mechanism import Mechanism

_ROUNDING = 1 + 1e-12  # of the largest norm


class FreshBinsAccountant(SampledAccountant):
    """Any C >= 0 with at most as many bands as bins, and any group."""

    schemes = (FreshBinsLaw.covers,)


class KnownPattern(KnownParticipations):
    """The bins known: K units move C x by at most K times the largest pattern."""

    schemes = (FreshBinsLaw.covers,)

    def longest(self, mechanism: Mechanism) -> float:
        return law(mechanism.sampling).loss(mechanism.strategy).sensitivity * _ROUNDING
