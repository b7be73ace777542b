"""What is asked of an optimization: the statement, the form of C, its error and the effort."""

from __future__ import annotations

import dataclasses
from typing import Any

from mfopt._runtime import _check
from mfopt.accounting.account import Effort
from mfopt.accounting.verify import check_delta
from mfopt.guarantee import CertificateKind, is_deterministic
from mfopt.optimize import kinds
from mfopt.optimize.objective import Loss, Objective
from mfopt.strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Target:
    """Statement that a σ is certified for, and effort that is put into it.

    Attributes:
      epsilon, delta: of one unit, add-remove adjacency.
      privacy_unit: what the statement protects, by name.
      samples: iid samples of the certificate; None for as many as are worth it.
      seed: pinned seed of all samples, or None for the operating system's entropy.
      certificate: "deterministic" draws no samples for σ and has failure probability 0.

    Raises:
      UsageError: a field out of range.
    """

    epsilon: float
    delta: float = 1e-5
    privacy_unit: str = "example"
    samples: int | None = None
    seed: int | None = None
    certificate: CertificateKind = "monte-carlo"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _check.epsilon("epsilon", self.epsilon))
        object.__setattr__(self, "delta", check_delta(self.delta))
        samples = _check.optional(_check.integer, "certify samples", self.samples, at_least=256)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "seed", _check.optional(_check.seed, "seed", self.seed))
        _check.word("privacy_unit", self.privacy_unit)
        is_deterministic(self.certificate, self.samples)

    @property
    def effort(self) -> Effort:
        """Effort of an account or certificate."""
        return Effort(self.samples, self.seed, certificate=self.certificate)


@dataclasses.dataclass(frozen=True)
class Form:
    """Form of C; None stands for the default of the scheme.

    Attributes:
      strategy: kinds of C, the best of which is kept: a tuple of names, made of one or several.
      bands: of banded kinds.
      buffers: of BLT kinds.

    Raises:
      UsageError: an unknown kind, or a size that is not a whole number >= 1.
    """

    strategy: Any = None
    bands: int | None = None
    buffers: int | None = None

    def __post_init__(self) -> None:
        if self.strategy is not None:
            names = self.strategy if isinstance(self.strategy, list | tuple) else (self.strategy,)
            if not names:
                raise _check.reject("strategy", self.strategy, "names no kind", '"blt" is one.')
            object.__setattr__(self, "strategy", tuple(dict.fromkeys(map(kinds.check, names))))
        for name in ("bands", "buffers"):
            number = _check.optional(_check.integer, name, getattr(self, name))
            object.__setattr__(self, name, number)


@dataclasses.dataclass(frozen=True)
class Search:
    """Options of a search of one kind of C; None stands for the kind's own default.

    Attributes:
      time_scale: whether C is put between two diagonals that vary with time.
      samples: frozen Monte Carlo samples.
      steps: evaluations of the objective at most for each kind, from the start that is chosen;
        short runs of at most 12 from each of several starts come before.
      init: one or several strategies to start from, instead of the built-in starts; of several
        kinds, those are searched that it says something about.
      tolerance: relative change of the error that counts as progress.

    Raises:
      UsageError: a field out of range.
    """

    time_scale: bool | None = None
    samples: int | None = None
    steps: int | None = None
    init: Any = None
    tolerance: float | None = None

    def __post_init__(self) -> None:
        _check.optional(_check.kind, "time_scale", self.time_scale, expected=bool)
        for name, lowest in (("samples", 64), ("steps", 1)):
            number = _check.optional(_check.integer, name, getattr(self, name), at_least=lowest)
            object.__setattr__(self, name, number)
        for strategy in self.starts:
            _check.kind("init", strategy, Strategy, "mfopt.load(path).strategy is one.")
        _check.optional(_check.positive, "tolerance", self.tolerance)

    @property
    def starts(self) -> tuple[Strategy, ...]:
        """The strategies to start from."""
        if isinstance(self.init, list | tuple):
            return tuple(self.init)
        return () if self.init is None else (self.init,)


@dataclasses.dataclass(frozen=True)
class Question:
    """Everything that an optimized C depends on beside its sampling.

    Attributes:
      target: statement and effort of its certificate.
      form: kinds of C and their sizes.
      objective: error that is minimized, or a differentiable function of (C, σ).
      search: how C is searched for.
    """

    target: Target
    form: Form = Form()
    objective: Objective | Loss = dataclasses.field(default_factory=Objective)
    search: Search = Search()

    @property
    def described_objective(self) -> Objective:
        """The objective, for work that records it or changes the number of iterations.

        Raises:
          UsageError: it is a function of (C, σ), which says neither its name nor its iterations.
        """
        objective: Objective = _check.kind("objective", self.objective, Objective)
        return objective
