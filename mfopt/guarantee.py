"""Record of a privacy guarantee: the public API returns no bare (ε, δ)."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, Literal, get_args

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.sampling import Adjacency
from mfopt.words import round_up

Status = Literal["exact", "certified", "bound", "estimate"]
CertificateKind = Literal["monte-carlo", "deterministic"]

_LARGE_DELTA = 1e-3  # whatever the number of units

# fields of a guarantee that are numbers >= 0, and the largest value of each
_NUMBERS = {
    "epsilon": math.inf,
    "delta": 1.0,
    "noise_multiplier": math.inf,
    "failure_probability": 1.0,
}


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


def questionable_delta(delta: float, population: int | None = None) -> str:
    """One sentence where ``delta`` permits what a guarantee should exclude; empty elsewhere.

    To publish each unit's data with probability δ is (0, δ)-DP: at δ >= 1/N one of N units is
    published on average.

    Args:
      delta: δ of the statement.
      population: N, the number of units; None where it is not known.

    >>> questionable_delta(1e-5, 10_000)
    ''
    """
    if population is not None and delta * population >= 1:
        return (
            f"δ = {delta:g} is not below 1/N for N = {population:,} units: publishing the data of "
            f"a random unit would satisfy it. Use a δ well below {1 / population:.2g}"
        )
    if delta > _LARGE_DELTA:
        return (
            f"δ = {delta:g} is above {_LARGE_DELTA:g}: publishing each unit's data with that "
            "probability would satisfy it. Use a δ well below 1/N for N units"
        )
    return ""


def absence(guarantee: Guarantee, *, pinned: bool) -> str:
    """ "none" and the reason, where a run has no guarantee; empty elsewhere.

    Args:
      guarantee: of the factorization that is run.
      pinned: whether a seed pins batches or noise.
    """
    if pinned:
        return "none: seed pinned"
    return "none: not certified" if guarantee.status == "estimate" else ""


def require_guarantee(guarantee: Guarantee, *, pinned: bool, allow_uncertified: bool) -> None:
    """Refuse a run without a guarantee.

    Args:
      guarantee, pinned: as for :func:`absence`.
      allow_uncertified: whether the caller asked for such a run.

    Raises:
      UsageError: there is no guarantee, and ``allow_uncertified`` is not set.
    """
    words = absence(guarantee, pinned=pinned)
    if words and not allow_uncertified:
        name, value = ("seed", "pinned") if pinned else ("factorization", "an estimate")
        way_out = "Leave the seed out, or certify the file (`mfopt certify`); for experiments and "
        way_out += "tests say `allow_uncertified=True`."
        raise _check.reject(name, value, f"the guarantee of such a run is {words}", way_out)


@dataclasses.dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-DP of one mechanism, with everything needed to read the two numbers.

    Attributes:
      epsilon: ε of the statement, never rounded towards less privacy.
      delta: δ of the statement, never rounded towards less privacy.
      noise_multiplier: σ relative to the clip norm, for the strategy matrix C as stored.
      privacy_unit: unit of the adjacency relation ("example", "user", ...).
      group_size: number of units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      method: the analysis, in words short enough for a table.
      status: "exact" up to a stated discretization; "certified", holds except with
        ``failure_probability``; "bound", holds with certainty but is not tight; "estimate", a
        point estimate that proves nothing.
      failure_probability: β, the chance over the accountant's own randomness (independent of
        the data) that the statement is wrong; already counted inside ``delta``, so at most that
        where the status is "certified". 0 for deterministic methods.
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
        # ε and σ may be infinite: an accountant may have no finite answer, and says so
        for name, largest in _NUMBERS.items():
            number = _check.real(name, getattr(self, name), at_most=largest)
            object.__setattr__(self, name, number)
        object.__setattr__(self, "group_size", _check.integer("group_size", self.group_size))
        _check.kind("method", self.method, str)
        _check.word("privacy_unit", self.privacy_unit)
        _check.choice("adjacency", self.adjacency, get_args(Adjacency))
        _check.choice("status", self.status, get_args(Status))
        if self.status == "certified":  # δ counts it
            _check.real("failure_probability", self.failure_probability, at_most=self.delta)
        _check.kind("details", self.details, dict)
        if "bracket" in self.details:
            ends = self.details["bracket"]
            if not isinstance(ends, list | tuple) or len(ends) != 2:
                raise _check.reject("bracket", ends, "must be a lower and an upper end")
            above = _check.real("upper end of the bracket", ends[1])
            _check.real("lower end of the bracket", ends[0], at_most=above)

    @classmethod
    def from_description(cls, described: Any) -> Guarantee:
        """The guarantee that :meth:`describe` gave, as a file holds it.

        Raises:
          UsageError: other fields, a field of another type, or a number that is not finite.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        stated = sorted(_check.kind("guarantee", described, dict))
        if stated != sorted(fields):
            raise _check.reject("guarantee", stated, f"must have the fields {', '.join(fields)}")
        for name in _NUMBERS:
            _check.finite(name, described[name])
        return cls(**described)

    @property
    def proved(self) -> bool:
        """True for a statement that claims to hold; an estimate proves nothing."""
        return self.status != "estimate"

    @property
    def certificate(self) -> CertificateKind:
        """Kind of certificate that the details name: the one to prove the statement again by."""
        kind = self.details.get("certificate")
        return "deterministic" if kind == "deterministic" else "monte-carlo"

    @property
    def lower_bound(self) -> float | None:
        """Proven lower bound of the number that was asked for, where one is known."""
        bracket: Any = self.details.get("bracket")
        return bracket and float(bracket[0])

    def with_lower_end(self, below: float, value: float) -> Guarantee:
        """The guarantee with a lower bound on record, the largest that is known.

        Args:
          below: proven lower bound of the number that was asked for.
          value: that number.
        """
        low = min(max(below, self.lower_bound or 0.0), value)
        return dataclasses.replace(self, details={**self.details, "bracket": [low, value]})

    def describe(self) -> JsonObject:
        """JSON-able description."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """One-line statement; ε, δ and σ rounded up."""
        sigma = round_up(self.noise_multiplier)
        return f"{self.claim}, {self.status} by {self.method}, noise multiplier {sigma}"

    @property
    def claim(self) -> str:
        """What is claimed, without who proved it; ε and δ rounded up."""
        group = f" (groups of {self.group_size})" if self.group_size > 1 else ""
        return (
            f"({round_up(self.epsilon)}, {round_up(self.delta)})-DP per "
            f"{self.privacy_unit}{group}, {self.adjacency} adjacency"
        )
