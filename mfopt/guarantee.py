"""Record of a privacy guarantee: the public API returns no bare (ε, δ)."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal, get_args

from mfopt._runtime import _check
from mfopt.sampling import Adjacency
from mfopt.words import delta as delta_in_words
from mfopt.words import round_up

Status = Literal["exact", "certified", "bound", "estimate"]
CertificateKind = Literal["monte-carlo", "deterministic"]


def is_deterministic(certificate: CertificateKind, samples: int | None = None) -> bool:
    """True for "deterministic", a certificate that no samples are drawn for.

    Args:
      certificate: the kind that is asked for.
      samples: iid samples that are asked for.

    Raises:
      UsageError: no such kind, or samples for one that draws none.
    """
    _check.choice("certificate", certificate, get_args(CertificateKind))
    if certificate == "deterministic" and samples is not None:
        rule = "have no effect on a deterministic certificate"
        raise _check.reject("certify samples", samples, rule, "Leave out one of the two.")
    return certificate == "deterministic"


def reported_delta(delta: float) -> float:
    """``delta`` as a statement has it: at most 1, and rounded up to the least normal float.

    A smaller number would be printed as 0, which was not proved.
    """
    return min(max(delta, sys.float_info.min), 1.0)


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-DP of one mechanism, with everything needed to read the two numbers.

    Attributes:
      epsilon, delta: the statement. Never rounded towards less privacy.
      noise_multiplier: σ relative to the clip norm, for the strategy matrix C as stored.
      privacy_unit: unit of the adjacency relation ("example", "user", ...).
      group_size: number of units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      method: the analysis, in words short enough for a table.
      status: "exact" up to a stated discretization; "certified", holds except with
        ``failure_probability``; "bound", holds with certainty but is not tight; "estimate", a
        point estimate that proves nothing.
      failure_probability: β, the chance over the accountant's own randomness (independent of
        the data) that the statement is wrong; already counted inside ``delta`` where the
        method is estimate-verify-release. 0 for deterministic methods.
      details: further public numbers of the method, JSON-able.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    privacy_unit: str = "example"
    group_size: int = 1
    adjacency: Adjacency = "add-remove"
    method: str = ""
    status: Status = "estimate"
    failure_probability: float = 0.0
    details: dict[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # epsilon may be infinite: an accountant may have no finite answer, and says so.
        if not self.epsilon >= 0:
            raise _check.reject("epsilon", self.epsilon, "must not be negative or NaN")
        if not 0 <= self.delta <= 1:
            raise _check.reject("delta", self.delta, "must lie in [0, 1]")
        _check.integer("group_size", self.group_size)
        _check.word("privacy_unit", self.privacy_unit)
        _check.choice("adjacency", self.adjacency, get_args(Adjacency))
        _check.choice("status", self.status, get_args(Status))
        if not isinstance(self.details, dict):
            raise _check.reject("details", self.details, "must be a dictionary")

    @property
    def certificate(self) -> CertificateKind:
        """Kind of certificate that the details name: the one to prove the statement again by."""
        named = self.details.get("certificate")
        return "deterministic" if named == "deterministic" else "monte-carlo"

    @property
    def lower_bound(self) -> float | None:
        """Proven lower bound of the number that was asked for, where one is known."""
        bracket = self.details.get("bracket")
        return float(bracket[0]) if isinstance(bracket, list | tuple) else None

    def with_lower_end(self, below: float, value: float) -> Guarantee:
        """The guarantee with a lower bound on record, the largest that is known.

        Args:
          below: proven lower bound of the number that was asked for.
          value: that number.
        """
        low = min(max(below, self.lower_bound or 0.0), value)
        return dataclasses.replace(self, details={**self.details, "bracket": [low, value]})

    def describe(self) -> dict[str, Any]:
        """JSON-able description."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One-line statement; ε, δ and σ rounded up."""
        epsilon, sigma = (round_up(value, 6) for value in (self.epsilon, self.noise_multiplier))
        delta = delta_in_words(self.delta)
        return (
            f"({epsilon}, {delta})-DP per {self.privacy_unit}"
            f"{f' (groups of {self.group_size})' if self.group_size > 1 else ''}, "
            f"{self.adjacency} adjacency, {self.status} by {self.method}, "
            f"noise multiplier {sigma}"
        )
