"""b-min-sep sampling: samples that are verified, for any C >= 0 within the separation.

The bound that holds anyway is that of the steps known: the Gaussian release of the largest pattern.
"""

from __future__ import annotations

from typing import Any

from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.independent_rounds import refuse_replacement
from mfopt.accounting.analyses import Analysis
from mfopt.accounting.monte_carlo import b_min_sep, separated
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.mechanism import Mechanism
from mfopt.sampling import BMinSep


class BMinSepAccountant(Accountant):
    """Any group, by its profile."""

    schemes = (BMinSep,)
    sampled = True

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        scheme: Any = mechanism.sampling
        separated.check(mechanism.strategy, scheme)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        effort.check_group(mechanism.group_size)
        model = b_min_sep.model(mechanism, effort.samples, effort.deterministic)
        return VerifiedAnalysis(mechanism, model, certify=effort.certify, seed=effort.seed)
