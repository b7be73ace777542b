"""Cells of accountants: one (σ, ε, δ) question each."""

from __future__ import annotations

import dataclasses
import math

from mfopt.accounting import Mechanism, account, analysis, black_box_epsilon
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.closed_form import moments
from mfopt.experiments.cache import Cell, Result
from mfopt.experiments.group_methods import lower_line
from mfopt.sampling import Poisson, Scheme

# Below this one-unit δ the accountants that Ganesh and Charles et al. plot have lost all digits.
BLACK_BOX_FLOOR = 1e-15


@dataclasses.dataclass(frozen=True)
class AccountCell(Cell):
    """The third of (σ, ε, δ) for independent noise and ``group_size`` units changing together."""

    name = "account"
    scheme: Scheme
    group_size: int = 1
    noise_multiplier: float | None = None
    epsilon: float | None = None
    delta: float | None = None

    def run(self, *needed: Result) -> Result:
        found = account(
            Mechanism(self.scheme, group_size=self.group_size),
            noise_multiplier=self.noise_multiplier,
            epsilon=self.epsilon,
            delta=self.delta,
        )
        names = ("noise_multiplier", "epsilon", "delta", "status", "method")
        return Result({name: getattr(found, name) for name in names})


@dataclasses.dataclass(frozen=True)
class GroupBaselineCell(Cell):
    """ε of a group by the black-box lemma, and the line K·ε₁ (which is no guarantee).

    It is the least that two accounts of one unit give. A profile by loss distributions ends where
    float64 probabilities do; under Poisson sampling moments reach further: they are logarithms.
    """

    name = "group-baseline"
    scheme: Scheme
    group_size: int
    noise_multiplier: float
    delta: float

    def run(self, *needed: Result) -> Result:
        one = analysis(Mechanism(self.scheme))
        assert isinstance(one, DeterministicAnalysis)
        profile = one.profile(self.noise_multiplier)
        asked = profile, self.group_size, self.delta
        epsilon = black_box_epsilon(*asked, floor=BLACK_BOX_FLOOR)
        if isinstance(self.scheme, Poisson):
            at = (self.noise_multiplier, self.scheme.probability, self.scheme.iterations)
            epsilon = min(epsilon, moments.group_epsilon(*at, self.delta, self.group_size))
        # infinite is beyond numerical range, which says nothing about the privacy loss
        shown = None if math.isinf(epsilon) else epsilon
        return Result({"epsilon": shown, "line": lower_line(*asked)})
