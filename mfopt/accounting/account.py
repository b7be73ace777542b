"""One entry point for all accountants: two of (σ, ε, δ) of a mechanism give the third.

Accountants are registered for the schemes that they know, by being defined, and say which
mechanisms they support. Those are evaluated and the smallest proved value is given, with the name
of the method that it is due to. A mechanism that none supports is refused, with the nearest that is
supported; so is a scheme that no accountant is registered for. Registration is for a scheme alone,
never for its subclasses: what they change may be what the proof needs.

A third party's accountant is a class::

    class Mine(Accountant):
        schemes = (MyScheme,)

        def check(self, mechanism): ...     # raises UsageError for what it does not support
        def analysis(self, mechanism, effort): ...
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any, ClassVar

from mfopt._runtime import _check, _plugins, _sizes
from mfopt.accounting.analyses import (
    Analysis,
    DeterministicAnalysis,
    Least,
    SampledAnalysis,
    least,
)
from mfopt.accounting.attained import with_lower_end
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import CertificateKind, Guarantee, is_deterministic
from mfopt.mechanism import Mechanism
from mfopt.sampling import Scheme

_REGISTERED: dict[str, dict[str, type[Accountant]]] = {}
# how far above its own lower end a bound may be that takes the place of a costly sampled account
_CLOSE = {"epsilon": 3e-3, "noise_multiplier": 3e-3, "delta": 0.05}


@dataclasses.dataclass(frozen=True)
class Effort:
    """Limits on the work of a sampled account. Deterministic accounts ignore them.

    Attributes:
      samples: number of verifying samples; unless given, as many as are worth it.
      seed: of the samples, if a run is to be reproduced; else the operating system's entropy.
      certify: whether to verify at all; without, the numbers are estimates that prove nothing.
      certificate: "deterministic" for bounds without samples alone.
    """

    samples: int | None = None
    seed: int | None = None
    certify: bool = True
    certificate: CertificateKind = "monte-carlo"

    def __post_init__(self) -> None:
        # a NumPy integer could not be written as JSON
        samples = _check.optional(_check.integer, "samples", self.samples)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "seed", _check.optional(_check.seed, "seed", self.seed))
        if self.deterministic and not self.certify:
            rule = "has no effect with `certify=False`, which asks for an estimate"
            raise _check.reject("certificate", self.certificate, rule)

    @property
    def deterministic(self) -> bool:
        """True if no samples are to be drawn."""
        return is_deterministic(self.certificate, self.samples)


class Accountant(abc.ABC):
    """One method for the schemes that it names. Defining a subclass registers it.

    Attributes:
      schemes: the scheme classes that it knows.
      free: whether it is a bound that holds anyway. Such a bound improves the answer of an
        accountant that supports a mechanism, or stands in for one that finds no finite answer;
        alone it does not count as support, since it forgoes what the sampling gives.
      sampled: whether its answers hold with a probability over its own randomness. Of those only
        the first that supports a mechanism is asked: the better of two would hold with less
        probability than either says.

    Raises:
      TypeError: when the class is defined, for a scheme that is none.
    """

    schemes: ClassVar[tuple[type[Scheme], ...]] = ()
    free: ClassVar[bool] = False
    sampled: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for scheme in vars(cls).get("schemes", ()):
            if not (isinstance(scheme, type) and issubclass(scheme, Scheme)):
                subject = f"accountant {cls.__qualname__}: {scheme!r}"
                raise TypeError(f"{subject} is not a sampling scheme")
            # the same class again (redefined in a notebook) takes its own place
            name = f"{cls.__module__}.{cls.__qualname__}"
            _REGISTERED.setdefault(scheme.kind, {})[name] = cls

    @abc.abstractmethod
    def check(self, mechanism: Mechanism) -> None:
        """Raise :class:`UsageError` for a mechanism that is not covered.

        The message names what is not covered and the nearest mechanism that is.
        """

    @abc.abstractmethod
    def analysis(self, mechanism: Mechanism, effort: Effort) -> Analysis:
        """Return the analysis of a mechanism that passed :meth:`check`."""


def registered() -> dict[str, tuple[Accountant, ...]]:
    """The accountants of every kind of scheme that has some, in the order of registration."""
    return {
        kind: tuple(accountant() for accountant in accountants.values())
        for kind, accountants in _REGISTERED.items()
    }


def supporting(mechanism: Mechanism) -> list[Accountant]:
    """The accountants that are to be asked about ``mechanism``.

    Raises:
      UsageError: none supports it; the message says why, and names the nearest that is supported.
    """
    kind = mechanism.sampling.kind
    if kind not in _REGISTERED:
        _plugins.load()
    candidates = [accountant() for accountant in _REGISTERED.get(kind, {}).values()]
    if all(accountant.free for accountant in candidates):
        covered = ", ".join(sorted(_REGISTERED))
        way_out = f"There are some for {covered}; see mfopt.accounting.account.Accountant."
        rule = "no accountant is registered for this scheme"
        raise _check.reject("sampling", mechanism.sampling, rule, way_out)
    fit: list[Accountant] = []
    refusals: list[UsageError] = []
    sampled = False
    for accountant in candidates:
        try:
            accountant.check(mechanism)
        except UsageError as refusal:
            if not accountant.free:
                refusals.append(refusal)
            continue
        if accountant.sampled and sampled:
            continue
        sampled |= accountant.sampled
        fit.append(accountant)
    if all(accountant.free for accountant in fit):
        said = list(dict.fromkeys(map(str, refusals)))
        raise refusals[0] if len(said) == 1 else UsageError(" Or: ".join(said))
    return fit


def analysis(
    mechanism: Mechanism,
    *,
    samples: int | None = None,
    seed: int | None = None,
    certify: bool = True,
    certificate: CertificateKind = "monte-carlo",
) -> Analysis:
    """The best analysis of the mechanism: the smallest bound of all accountants that support it.

    Args:
      mechanism: what is released and against whom it protects.
      samples, seed, certify, certificate: for sampled accounts, see :class:`Effort`.

    Raises:
      UsageError: no valid analysis is known; the message names the nearest mechanism with one.
    """
    effort = Effort(samples, seed, certify, certificate)
    _require(mechanism)
    # bounds that hold anyway are asked first: they are cheap
    fit = sorted(supporting(mechanism), key=lambda accountant: not accountant.free)
    return least([_analysed(accountant, mechanism, effort) for accountant in fit])


def _analysed(accountant: Accountant, mechanism: Mechanism, effort: Effort) -> Analysis:
    """The analysis of an accountant; a sampled one has to say what its tests spend.

    Raises:
      TypeError: it does not.
    """
    result = accountant.analysis(mechanism, effort)
    if accountant.sampled and not isinstance(
        result, SampledAnalysis | DeterministicAnalysis | Least
    ):
        subject = f"{type(accountant).__qualname__}.analysis: {type(result).__qualname__}"
        raise TypeError(f"{subject} must be an mfopt.accounting.SampledAnalysis")
    return result


def account(
    mechanism: Mechanism,
    *,
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int | None = None,
    seed: int | None = None,
    certify: bool = True,
    certificate: CertificateKind = "monte-carlo",
) -> Guarantee:
    """The third of (σ, ε, δ) from two of them; never rounded towards less privacy.

    Args:
      mechanism: what is released and against whom it protects.
      noise_multiplier: σ, relative to the clip norm, for C as stored.
      epsilon, delta: the (ε, δ) of the statement.
      samples, seed, certify, certificate: for sampled accounts, see :class:`Effort`.

    Raises:
      UsageError: not exactly two of the three are given, one is out of range, or no analysis of
        the mechanism is known.
      FailureError: there is an analysis, but it gives no finite answer here.

    >>> from mfopt.sampling import FixedOrder
    >>> mechanism = Mechanism(FixedOrder(bins=10, epochs=1))
    >>> round(account(mechanism, noise_multiplier=1.0, delta=1e-5).epsilon, 4)
    4.3772
    """
    statement = {"noise_multiplier": noise_multiplier, "epsilon": epsilon, "delta": delta}
    if sum(value is not None for value in statement.values()) != 2:
        names, values = ", ".join(statement), tuple(statement.values())
        raise _check.reject(names, values, "give exactly two of three")
    if noise_multiplier is not None:  # before an analysis, which may take long to make
        _check.noise_multiplier(noise_multiplier)
    if delta is not None:
        _check.probability("delta", delta)
    question = next(name for name, value in statement.items() if value is None)
    numbers = [value for value in statement.values() if value is not None]

    def answer(bound: Analysis) -> Guarantee:
        return with_lower_end(mechanism, getattr(bound, question)(*numbers), question)

    effort = Effort(samples, seed, certify, certificate)
    _require(mechanism)
    # a sampled account may take over ten CPU seconds: 40 for 100 units in 8 bins
    is_large_group = mechanism.group_size >= 64 and getattr(mechanism.sampling, "bins", 0) >= 8
    costly = certify and samples is None and is_large_group
    if (
        free := [accountant for accountant in supporting(mechanism) if accountant.free]
        if costly
        else []
    ):
        with contextlib.suppress(FailureError):
            bound = answer(least([_analysed(accountant, mechanism, effort) for accountant in free]))
            if (bound.lower_bound or 0.0) >= (1 - _CLOSE[question]) * getattr(bound, question):
                return bound
    return answer(analysis(mechanism, **dataclasses.asdict(effort)))


def _require(mechanism: Mechanism) -> None:
    if not isinstance(mechanism, Mechanism):
        raise _check.reject("mechanism", mechanism, "must be an mfopt.mechanism.Mechanism")
    n = mechanism.sampling.iterations
    if n > 10**7 and not mechanism.strategy.is_identity:  # all columns of C are examined
        _sizes.require("iterations", n, lambda length: 48.0 * length)
