"""What (ε, δ) a mechanism has: every accountant behind :func:`account`.

Adjacency, privacy unit and the units of σ are part of each :class:`mfopt.guarantee.Guarantee`;
nothing is rounded towards less privacy.
"""

from mfopt.accounting.closed_form.group import GroupProfile, black_box_epsilon
from mfopt.accounting.mechanism import Analysis, Mechanism, account, analysis
from mfopt.accounting.unamplified import Sensitivity, sensitivity

__all__ = [
    "Analysis",
    "GroupProfile",
    "Mechanism",
    "Sensitivity",
    "account",
    "analysis",
    "black_box_epsilon",
    "sensitivity",
]
