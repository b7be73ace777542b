"""Fresh bins: composed assignments for C = I, samples that are verified for any other C >= 0.

The bound that holds anyway: were the bins known, a unit would be one Gaussian release with the norm
of its pattern, and hockey-stick divergence is convex, so the largest norm bounds the mixture.
"""

from __future__ import annotations

from typing import Any

from mfopt._runtime import _check
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.independent_rounds import (
    WITHOUT_AMPLIFICATION,
    refuse_replacement,
)
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis
from mfopt.accounting.monte_carlo import fresh_bins, patterns
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.mechanism import Mechanism
from mfopt.sampling import FreshBins

_ROUNDING = 1 + 1e-12  # of the largest norm


class FreshBinsAccountant(Accountant):
    """Any group, by its profile."""

    schemes = (FreshBins,)
    sampled = True

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        scheme: Any = mechanism.sampling
        patterns.check(mechanism.strategy, scheme)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        effort.check_group(mechanism.group_size)
        model = fresh_bins.model(mechanism, effort.samples, effort.deterministic)
        known = any(bound.exact for bound in model.free_bounds())  # C = I: no samples to spare
        return VerifiedAnalysis(mechanism, model, certify=effort.certify or known, seed=effort.seed)


class KnownPattern(Accountant):
    """The bins known: K units move C x by at most K times the largest pattern."""

    schemes = (FreshBins,)
    free = True

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        scheme: Any = mechanism.sampling
        patterns.check(mechanism.strategy, scheme)
        if mechanism.group_size == 1:
            raise _check.reject(
                "group_size",
                1,
                "the release engine has this bound among its own",
                "One question has one answer, whoever asks.",
            )

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        scheme: Any = mechanism.sampling
        loss = fresh_bins.FreshBinsLoss(patterns.exact(mechanism.strategy, scheme))
        norm = mechanism.group_size * loss.sensitivity * _ROUNDING
        return gaussian_release(mechanism, norm, WITHOUT_AMPLIFICATION)
