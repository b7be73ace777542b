"""Samples that are verified, for a scheme with a law, and the bound that holds anyway.

Were participations known, a unit would be one Gaussian release with the norm of its columns, and
hockey-stick divergence is convex, so the largest norm bounds the mixture.
"""

from __future__ import annotations

from typing import ClassVar

from mfopt._runtime import _check
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.accountants.independent_rounds import WITHOUT_AMPLIFICATION
from mfopt.accounting.accountants.unamplified import gaussian_release
from mfopt.accounting.analyses import Analysis, DeterministicAnalysis
from mfopt.accounting.bound import DeterministicBound
from mfopt.accounting.model import LossModel
from mfopt.accounting.monte_carlo import group
from mfopt.accounting.monte_carlo.b_min_sep import BMinSepLaw
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.random_partition import RandomPartitionLaw
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.mechanism import Mechanism
from mfopt.sampling import Scheme

_ROUNDING = 1 + 1e-12  # of the largest norm


def refuse_replacement(mechanism: Mechanism) -> None:
    """Raise :class:`UsageError` for "replace", which no amplified account covers."""
    if mechanism.adjacency == "replace":
        rule = f"not analysed under {mechanism.sampling.kind} sampling"
        way_out = (
            "Use 'add-remove' (a replacement is a removal, then an addition), or "
            "sampling.FixedOrder, whose account covers 'replace'."
        )
        raise _check.reject("adjacency", mechanism.adjacency, rule, way_out)


class SampledAccountant(Accountant):
    """Any C that the scheme's law covers, and any group."""

    # a law is registered where it is defined
    schemes: ClassVar[tuple[type[Scheme], ...]] = (
        FreshBinsLaw.covers,
        BMinSepLaw.covers,
        RandomPartitionLaw.covers,
    )
    sampled = True

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        law(mechanism.sampling).check(mechanism.strategy)

    def model(self, mechanism: Mechanism, effort: Effort) -> LossModel | DeterministicBound:
        """The loss model that is verified, or a bound that needs no samples."""
        return group.model(mechanism, effort.samples, effort.deterministic)

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        if effort.deterministic and mechanism.group_size > 1:
            rule = "has no deterministic account under this sampling"
            way_out = "Use certificate='monte-carlo'."
            raise _check.reject("group_size", mechanism.group_size, rule, way_out)
        model = self.model(mechanism, effort)
        if isinstance(model, DeterministicBound):
            return DeterministicAnalysis(mechanism, model)
        # an exact bound leaves no samples to spare
        certify = effort.certify or any(bound.exact for bound in model.free_bounds())
        return VerifiedAnalysis(mechanism, model, certify=certify, seed=effort.seed)


class KnownPattern(Accountant):
    """Participations known: K units move C x by at most K times the longest that one adds."""

    schemes: ClassVar[tuple[type[Scheme], ...]] = (FreshBinsLaw.covers,)
    free = True

    def check(self, mechanism: Mechanism) -> None:
        refuse_replacement(mechanism)
        law(mechanism.sampling).check(mechanism.strategy)
        if mechanism.group_size == 1:
            rule = "the release engine has this bound among its own"
            way_out = "One question has one answer, whoever asks."
            raise _check.reject("group_size", 1, rule, way_out)

    def longest(self, mechanism: Mechanism) -> float:
        """Largest norm that one unit adds to C x, rounded up."""
        return law(mechanism.sampling).loss(mechanism.strategy).sensitivity * _ROUNDING

    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        norm = mechanism.group_size * self.longest(mechanism)
        return gaussian_release(mechanism, norm, WITHOUT_AMPLIFICATION)


class _KnownSeparatedPattern(KnownPattern):
    """The steps known: asked last, since samples so far above the answer take minutes to plan."""

    schemes = (BMinSepLaw.covers, RandomPartitionLaw.covers)
    free = False
