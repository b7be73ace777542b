"""Sampling with independent rounds that do not overlap in C x, by privacy loss distributions.

Each has the bound that holds anyway: were the draws known, the release would be one Gaussian
mechanism, moved in every round by as much as the whole group can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from mfopt._runtime import _check
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis, DeterministicAnalysis
from mfopt.accounting.bound import DeterministicBound, RoundsBound
from mfopt.accounting.chain import GroupBound
from mfopt.accounting.loss_distribution import poisson
from mfopt.mechanism import Mechanism
from mfopt.sampling import CyclicPoisson, FixedBatch, Poisson, Scheme, TruncatedPoisson

WITHOUT_AMPLIFICATION = "Gaussian mechanism, no amplification by sampling"


class _RoundsAccountant(Accountant):
    """Independent rounds.

    Groups whose number of units stays ("replace", or zeroed in fixed batches) go through the
    whole profile of one unit.
    """

    subject: ClassVar[str]  # what is composed, for the record
    exchanges: ClassVar[bool] = False  # whether an added unit also takes the place of another
    composed: ClassVar[Callable[..., poisson.Rounds]]  # of C, scheme, group size and adjacency

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        """The rounds that compose, of one unit where :meth:`chained`; else raise UsageError."""
        scheme, size = mechanism.sampling, mechanism.group_size
        return type(self).composed(mechanism.strategy, scheme, size, mechanism.adjacency)

    def chained(self, mechanism: Mechanism) -> bool:
        """Return True if the account of a group goes through the whole profile of one unit."""
        return mechanism.group_size > 1 and mechanism.adjacency == "replace"

    def check(self, mechanism: Mechanism) -> None:
        self.rounds(mechanism)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        rounds = self.rounds(mechanism)
        chained = self.chained(mechanism)
        certain = rounds.mixture.components == 1 and not rounds.mixture.trivial
        if rounds.exact and certain and not chained:
            moved = rounds.scale * rounds.mixture.largest * math.sqrt(rounds.rounds)
            method = "Gaussian mechanism, every unit in every batch: closed form"
            return gaussian_release(mechanism, moved * (1 + 1e-14), method, exact=True)
        details = {"rounds": rounds.rounds, "column_norm": rounds.scale}
        method = f"privacy loss distribution of {self.subject}"
        bound: DeterministicBound = RoundsBound(rounds, method, rounds.exact)
        if chained and not rounds.mixture.trivial:
            bound = GroupBound(bound, mechanism.group_size, self.subject)
        return DeterministicAnalysis(mechanism, bound, details)


class _PoissonRounds(_RoundsAccountant):
    """C = I and any group."""

    schemes = (Poisson,)
    subject = "Poisson-sampled rounds"
    composed = staticmethod(poisson.poisson)


class _CyclicRounds(_RoundsAccountant):
    """A banded C. One band is plain Poisson sampling, with its exact account of any group."""

    schemes = (CyclicPoisson,)
    subject = "cyclic Poisson sampling"

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        scheme: Any = mechanism.sampling
        # names the bands that are needed
        cyclic = poisson.cyclic_poisson(mechanism.strategy, scheme, mechanism.adjacency)
        if scheme.bands > 1:
            return cyclic
        plain = Poisson(scheme.probability, scheme.iterations)
        return poisson.poisson(mechanism.strategy, plain, mechanism.group_size, mechanism.adjacency)

    def chained(self, mechanism: Mechanism) -> bool:
        scheme: Any = mechanism.sampling
        return super().chained(mechanism) or (mechanism.group_size > 1 and scheme.bands > 1)


class _FixedBatchRounds(_RoundsAccountant):
    """C = I and any group that leaves a whole batch."""

    schemes = (FixedBatch,)
    subject = "fixed batches"
    exchanges = True
    composed = staticmethod(poisson.fixed_batch)

    def chained(self, mechanism: Mechanism) -> bool:
        return mechanism.group_size > 1 and mechanism.adjacency != "add-remove"


class _TruncatedPoissonRounds(_RoundsAccountant):
    """C = I and one unit."""

    schemes = (TruncatedPoisson,)
    subject = "Poisson-sampled rounds with full batches cut"
    exchanges = True

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        if mechanism.group_size > 1:
            rule = "batches that are cut are accounted for one unit"
            way_out = "Use Poisson sampling, whose account covers groups."
            raise _check.reject("group_size", mechanism.group_size, rule, way_out)
        scheme: Any = mechanism.sampling
        return poisson.truncated_poisson(mechanism.strategy, scheme, mechanism.adjacency)


# by exact class: a subclass may let units take part otherwise
ROUNDS: dict[type[Scheme], _RoundsAccountant] = {
    scheme: one()
    for one in (_PoissonRounds, _CyclicRounds, _FixedBatchRounds, _TruncatedPoissonRounds)
    for scheme in one.schemes
}


class _FreeRounds(Accountant):
    """Participations at every opportunity: K units move each round by K columns."""

    schemes = tuple(ROUNDS)
    free = True

    def check(self, mechanism: Mechanism) -> None:
        if ROUNDS[type(mechanism.sampling)].rounds(mechanism).mixture.trivial:
            raise _check.reject("sampling", mechanism.sampling, "releases nothing of a unit")

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        one = ROUNDS[type(mechanism.sampling)]
        rounds = one.rounds(mechanism)
        # most that one unit moves a round, in column norms, what is drawn known
        exchanged = ("replace", "add-remove") if one.exchanges else ("replace",)
        moved = (2.0 if mechanism.adjacency in exchanged else 1.0) * mechanism.group_size
        # the last term covers the rounding of the product
        moved *= rounds.scale * math.sqrt(rounds.rounds) * (1 + 1e-14)
        return gaussian_release(mechanism, moved, WITHOUT_AMPLIFICATION)
