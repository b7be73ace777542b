"""Schemes whose participations are not random: one Gaussian release, in closed form."""

from __future__ import annotations

from mfopt.accounting import unamplified
from mfopt.accounting.account import Accountant, Effort
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.bound import GaussianBound
from mfopt.mechanism import Mechanism
from mfopt.sampling import FixedOrder, MinSeparation


class _PublicParticipation(Accountant):
    """Sensitivity of C over the scheme's participations, under every adjacency."""

    schemes = (FixedOrder, MinSeparation)

    def check(self, mechanism: Mechanism) -> None:
        """Accept every C: each has a sensitivity, which refuses an n that needs too much memory."""

    def analysis(self, mechanism: Mechanism, effort: Effort) -> DeterministicAnalysis:
        largest = unamplified.sensitivity(mechanism.strategy, mechanism.sampling)
        # units of a group may share their iterations; a replaced unit moves by twice the norm
        factor = mechanism.group_size * (2 if mechanism.adjacency == "replace" else 1)
        return gaussian_release(
            mechanism,
            largest.value * factor,
            f"Gaussian mechanism, {largest.method}",
            exact=largest.exact,
        )


def gaussian_release(
    mechanism: Mechanism, sensitivity: float, method: str, *, exact: bool = False
) -> DeterministicAnalysis:
    """One Gaussian release that moves by at most ``sensitivity``, in clip norms.

    Args:
      mechanism: what the statement is about.
      sensitivity: most that C x moves, for the whole group and its adjacency.
      method: for the record.
      exact: whether some pair of data sets attains the sensitivity, so that the answer is no mere
        bound.
    """
    bound = GaussianBound(sensitivity, method, exact)
    return DeterministicAnalysis(mechanism, bound, {"sensitivity": sensitivity})
