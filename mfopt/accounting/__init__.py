"""Accounting of (ε, δ) for a mechanism: every accountant behind :func:`account`.

Adjacency, privacy unit and the units of σ are part of each :class:`mfopt.guarantee.Guarantee`;
nothing is rounded towards less privacy.
"""

from mfopt.accounting import accountants
from mfopt.accounting.account import Accountant, Effort, account, analysis
from mfopt.accounting.analyses import Analysis, Budget, DeterministicAnalysis, SampledAnalysis
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.monte_carlo.processes import over_processes
from mfopt.accounting.profile import Profile
from mfopt.accounting.tradeoff import Tradeoff, tradeoff
from mfopt.accounting.unamplified import Sensitivity, sensitivity
from mfopt.mechanism import Mechanism

__all__ = [
    "Accountant",
    "Analysis",
    "Budget",
    "DeterministicAnalysis",
    "DeterministicBound",
    "Effort",
    "Mechanism",
    "Profile",
    "SampledAnalysis",
    "Sensitivity",
    "Tradeoff",
    "account",
    "accountants",
    "analysis",
    "over_processes",
    "sensitivity",
    "tradeoff",
]
