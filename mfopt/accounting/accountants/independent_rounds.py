"""Schemes that draw afresh: rounds that do not overlap in C x, by privacy loss distributions.

Each has the bound that holds anyway: were the draws known, the release would be one Gaussian
mechanism, moved in every round by as much as the whole group can.
"""

from __future__ import annotations

import abc
import math
from typing import Any, ClassVar

from mfopt import _check
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis, RoundsAnalysis
from mfopt.accounting.chain import Chain, DeterministicUnit
from mfopt.accounting.loss_distribution import poisson
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.mechanism import Mechanism
from mfopt.sampling import CyclicPoisson, FixedBatch, Poisson, Scheme

WITHOUT_AMPLIFICATION = "Gaussian mechanism, no amplification by sampling"


def refuse_replacement(mechanism: Mechanism) -> None:
    """Raise :class:`UsageError` for "replace", which no amplified account covers."""
    if mechanism.adjacency == "replace":
        raise _check.reject(
            "adjacency",
            mechanism.adjacency,
            f"not analysed under {mechanism.sampling.kind} sampling",
            "Use 'add-remove' (a replacement is a removal, then an addition), or "
            "sampling.FixedOrder, whose account covers 'replace'.",
        )


def rounds_analysis(mechanism: Mechanism, found: poisson.Rounds, of: str) -> RoundsAnalysis:
    """The analysis of composed rounds, exact where some data attains it."""
    details = {"rounds": found.rounds, "column_norm": found.scale}
    return RoundsAnalysis(
        mechanism,
        f"privacy loss distribution{of}",
        "exact" if found.exact else "bound",
        details,
        found,
    )


class RoundsAccountant(Accountant):
    """Independent rounds of one mixture of Gaussians."""

    @abc.abstractmethod
    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        """What composes, or :class:`UsageError`."""

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        self.rounds(mechanism)


class PoissonRounds(RoundsAccountant):
    """C = I and any group."""

    schemes = (Poisson,)

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        scheme: Any = mechanism.sampling
        return poisson.poisson(mechanism.strategy, scheme, mechanism.group_size)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        return rounds_analysis(mechanism, self.rounds(mechanism), " of Poisson-sampled rounds")


class CyclicRounds(RoundsAccountant):
    """A banded C. One band is plain Poisson sampling, with its exact account of any group."""

    schemes = (CyclicPoisson,)

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        scheme: Any = mechanism.sampling
        if scheme.bands == 1:
            plain = Poisson(scheme.probability, scheme.iterations)
            return poisson.poisson(mechanism.strategy, plain, mechanism.group_size)
        return poisson.cyclic_poisson(mechanism.strategy, scheme)

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        scheme: Any = mechanism.sampling
        poisson.cyclic_poisson(mechanism.strategy, scheme)  # names the bands that are needed

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        scheme: Any = mechanism.sampling
        one = rounds_analysis(mechanism, self.rounds(mechanism), " of cyclic Poisson rounds")
        if scheme.bands == 1 or mechanism.group_size == 1:
            return one
        unit = DeterministicUnit(one.profile, one.guess)
        chain = Chain(unit, mechanism.group_size, "cyclic Poisson sampling")
        return VerifiedAnalysis(mechanism, chain, certify=effort.certify, seed=effort.seed)


class FixedBatchRounds(RoundsAccountant):
    """C = I and any group that leaves a whole batch."""

    schemes = (FixedBatch,)

    def rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        scheme: Any = mechanism.sampling
        return poisson.fixed_batch(mechanism.strategy, scheme, mechanism.group_size)

    def check(self, mechanism: Mechanism) -> None:
        if mechanism.adjacency == "zero-out":
            raise _check.reject(
                "adjacency",
                mechanism.adjacency,
                "not analysed for fixed batches",
                "Use 'add-remove'.",
            )
        super().check(mechanism)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        return rounds_analysis(
            mechanism, self.rounds(mechanism), ", hypergeometric mixture of Gaussians"
        )


class FreeRounds(Accountant):
    """Participations at every opportunity: K units move each round by K columns."""

    schemes: ClassVar[tuple[type[Scheme], ...]] = (Poisson, CyclicPoisson)
    free = True
    _accountants: tuple[type[RoundsAccountant], ...] = (PoissonRounds, CyclicRounds)
    _moved_by = 1.0

    def check(self, mechanism: Mechanism) -> None:
        self._one(mechanism).check(mechanism)
        if self._rounds(mechanism).mixture.trivial:
            raise _check.reject("sampling", mechanism.sampling, "releases nothing of a unit")

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        found = self._rounds(mechanism)
        # the last term covers the rounding of the product
        moved = self._moved_by * mechanism.group_size * found.scale * math.sqrt(found.rounds)
        return gaussian_release(mechanism, moved * (1 + 1e-14), WITHOUT_AMPLIFICATION)

    def _one(self, mechanism: Mechanism) -> RoundsAccountant:
        kind = mechanism.sampling.kind
        return next(a() for a in self._accountants if any(s.kind == kind for s in a.schemes))

    def _rounds(self, mechanism: Mechanism) -> poisson.Rounds:
        return self._one(mechanism).rounds(mechanism)


class FreeFixedBatch(FreeRounds):
    """As above, where each unit of the group also takes the place of another: twice the norm."""

    schemes = (FixedBatch,)
    _accountants = (FixedBatchRounds,)
    _moved_by = 2.0
