"""Sampling with independent rounds that do not overlap in C x, by privacy loss distributions.

Each has the bound that holds anyway: were the draws known, the release would be one Gaussian
mechanism, moved in every round by as much as the whole group can.
"""

from __future__ import annotations

from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis, DeterministicAnalysis, least
from mfopt.accounting.bound import DeterministicBound, RoundsBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.loss_distribution import poisson
from mfopt.mechanism import Mechanism
from mfopt.sampling import CyclicPoisson, FixedBatch, Poisson, Scheme, TruncatedPoisson

WITHOUT_AMPLIFICATION = "Gaussian mechanism, no amplification by sampling"


# what is composed, for the record
_SUBJECTS: dict[type[Scheme], str] = {
    Poisson: "Poisson-sampled rounds",
    CyclicPoisson: "cyclic Poisson sampling",
    FixedBatch: "fixed batches",
    TruncatedPoisson: "Poisson-sampled rounds with full batches cut",
}


def is_chained(mechanism: Mechanism) -> bool:
    """Return True if a group is accounted for by the whole profile of one unit.

    Units in different groups of a cyclic scheme's iterations overlap in C x.
    """
    return mechanism.group_size > 1 < getattr(mechanism.sampling, "bands", 1)


def composed(mechanism: Mechanism) -> poisson.Rounds:
    """The rounds that compose, of one unit where :func:`is_chained`; else raise UsageError."""
    size = 1 if is_chained(mechanism) else mechanism.group_size
    return poisson.independent(mechanism.strategy, mechanism.sampling, size, mechanism.adjacency)


class _IndependentRounds(Accountant):
    """Any group."""

    schemes = tuple(_SUBJECTS)

    def check(self, mechanism: Mechanism) -> None:
        composed(mechanism)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        rounds = composed(mechanism)
        mixture = rounds.mixture
        subject = _SUBJECTS[type(mechanism.sampling)]
        chained = is_chained(mechanism)
        # most that the group moves, what is drawn known: units of a chain one by one
        moved = mixture.largest * (mechanism.group_size if chained else 1)
        # the last term covers the rounding of the product
        moved *= rounds.length * (1 + 1e-14)
        if rounds.exact and mixture.components == 1 and not mixture.trivial and not chained:
            method = "Gaussian mechanism, every unit in every batch: closed form"
            return gaussian_release(mechanism, moved, method, exact=True)
        details = {"rounds": rounds.rounds, "column_norm": rounds.longest}
        method = f"privacy loss distribution of {subject}"
        bound: DeterministicBound = RoundsBound(rounds, method, rounds.exact)
        if mixture.trivial:
            return DeterministicAnalysis(mechanism, bound, details)
        if chained:
            bound = GroupBound(bound, mechanism.group_size, subject)
        # what no grid of losses covers still has the bound that holds anyway
        known = gaussian_release(mechanism, moved, WITHOUT_AMPLIFICATION)
        return least([known, DeterministicAnalysis(mechanism, bound, details)])
