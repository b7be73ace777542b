"""Runs in phases of different noise, rates and schemes, in sequence on the same data.

Each phase is a mechanism with its σ. Those whose account is a composition of rounds (Poisson
sampling, fixed batches, a banded C under cyclic Poisson sampling, no sampling at all) add up on one
grid. One phase may have a sampled account (balls-in-bins, fresh bins): the others are its
companion, see :mod:`mfopt.accounting.monte_carlo.composition`. A later phase may depend on what an
earlier one released. :mod:`mfopt.accounting.events` exchanges phases with ``dp_accounting``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mfopt._runtime import _check, _sizes
from mfopt._runtime._types import JsonObject
from mfopt.accounting.account import Effort, account, analysis
from mfopt.accounting.accountants.independent_rounds import composed, is_chained
from mfopt.accounting.accountants.sampled import refuse_replacement
from mfopt.accounting.analyses import Analysis
from mfopt.accounting.loss_distribution import poisson
from mfopt.accounting.loss_distribution.grid import RepeatedRound
from mfopt.accounting.loss_distribution.rounds import COARSE, FINE, RoundsProfile
from mfopt.accounting.monte_carlo import composition, protocol
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee, reported_delta
from mfopt.mechanism import Mechanism
from mfopt.sampling import FixedOrder, MinSeparation, Scheme
from mfopt.strategies import Dense, Strategy

# by exact class: a subclass may let units take part otherwise
_PUBLIC = FixedOrder, MinSeparation


@dataclasses.dataclass(frozen=True)
class Phase:
    """One part of a run.

    Attributes:
      mechanism: what is released in it.
      noise_multiplier: σ, relative to the clip norm, for C as stored.
    """

    mechanism: Mechanism
    noise_multiplier: float

    def __post_init__(self) -> None:
        _check.noise_multiplier(self.noise_multiplier)
        self.rounds  # noqa: B018  refuses a mechanism that does not compose when it is given

    @functools.cached_property
    def rounds(self) -> poisson.Rounds | None:
        """The rounds that compose in this phase; None where its loss is sampled.

        Raises:
          UsageError: it has neither.
        """
        mechanism, scheme = self.mechanism, self.mechanism.sampling
        if type(scheme) in _PUBLIC:
            return poisson.public(
                mechanism.strategy, scheme, mechanism.group_size, mechanism.adjacency
            )
        if type(scheme) not in poisson.MIXTURES:
            refuse_replacement(mechanism)
            if not protocol.is_sampled(scheme):
                rule = f"no account of {scheme.kind} composes with others"
                way_out = "Account for its run alone."
                raise _check.reject("sampling", scheme, rule, way_out)
            if mechanism.group_size != 1:
                rule = f"a phase of {scheme.kind} is composed for one unit"
                raise _check.reject("group_size", mechanism.group_size, rule)
            return None
        if is_chained(mechanism):
            rule = f"a group's account under {scheme.kind} is not a composition of rounds"
            way_out = "Compose for one unit, or account for the phases one by one."
            raise _check.reject("group_size", mechanism.group_size, rule, way_out)
        return composed(mechanism)


def compose(
    phases: Sequence[Phase],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    samples: int | None = None,
    seed: int | None = None,
    certify: bool = True,
) -> Guarantee:
    """ε for δ, or δ for ε, of all phases together; an upper bound, or certified.

    Beside a bound stands what some data sets attain, in ``details["bracket"]``.

    Args:
      phases: the parts of the run, with one privacy unit, group size and adjacency; at most one
        of them with a sampled account.
      epsilon, delta: exactly one of the two.
      samples, seed, certify: for a sampled account, see :class:`mfopt.accounting.Effort`.

    Raises:
      UsageError: the phases protect different things, or do not compose.
    """
    if not phases or (epsilon is None) == (delta is None):
        arguments = len(phases), epsilon, delta
        raise _check.reject("phases, epsilon, delta", arguments, "give phases, and one of ε and δ")
    mechanism = phases[0].mechanism
    for phase in phases[1:]:
        for name in ("privacy_unit", "group_size", "adjacency"):
            value, expected = (getattr(part, name) for part in (phase.mechanism, mechanism))
            if value != expected:
                raise _check.reject(name, value, f"the first phase has {expected}")
    details: JsonObject = {
        "phases": [
            {
                "sampling": phase.mechanism.sampling.describe(),
                "strategy": phase.mechanism.strategy.describe(),
                "noise_multiplier": phase.noise_multiplier,
            }
            for phase in phases
        ]
    }
    sampled = [phase for phase in phases if phase.rounds is None]
    if sampled:
        effort = Effort(samples, seed, certify)
        answer = _with_sampled(phases, sampled, epsilon, delta, effort)
        return dataclasses.replace(answer, details={**answer.details, **details})
    profile = _profile(phases)
    if delta is not None:
        _check.probability("delta", delta)
        solved = profile.epsilon(delta) if profile else 0.0
    elif epsilon is not None:
        _check.non_negative("epsilon", epsilon)
        solved = profile.log_delta(epsilon) if profile else -math.inf
    below = -math.inf
    if math.isfinite(solved):
        with contextlib.suppress(FailureError, UsageError):  # the answer holds without
            attacked = _profile(phases, attacked=True)
            if attacked and delta is not None:
                below = attacked.epsilon_below(delta, solved)
            elif attacked and epsilon is not None:
                below = attacked.log_delta_below(epsilon)
    if epsilon is not None:
        below, solved = math.exp(below), reported_delta(math.exp(solved))
    guarantee = Guarantee(
        epsilon=solved if epsilon is None else epsilon,
        delta=solved if delta is None else delta,
        noise_multiplier=min(phase.noise_multiplier for phase in phases),
        privacy_unit=mechanism.privacy_unit,
        group_size=mechanism.group_size,
        adjacency=mechanism.adjacency,
        method="privacy loss distribution of phases",
        status="bound",
        details=details,
    )
    return guarantee.with_lower_end(below, solved) if below > 0 else guarantee


def _profile(
    phases: Sequence[Phase], accuracy: float = FINE, *, attacked: bool = False
) -> RoundsProfile | None:
    """The profile of the phases that are compositions of rounds; None where nothing is released.

    Args:
      phases: the parts of the run.
      accuracy: relative error of ε.
      attacked: whether to take rounds that some data attain, of phases where such are known.
    """
    kinds: list[RepeatedRound] = []
    for phase in phases:
        mechanism, rounds = phase.mechanism, phase.rounds
        if attacked:
            described = mechanism.strategy, mechanism.sampling
            rounds = poisson.attack(*described, mechanism.group_size, mechanism.adjacency)
        if rounds is not None and not rounds.mixture.trivial:
            kinds += rounds.at(phase.noise_multiplier)
    return RoundsProfile.of(kinds, accuracy / len(phases)) if kinds else None


def _with_sampled(
    phases: Sequence[Phase],
    sampled: Sequence[Phase],
    epsilon: float | None,
    delta: float | None,
    effort: Effort,
) -> Guarantee:
    """The phases that are rounds are the companion of the one whose loss is sampled."""
    if len(sampled) > 1:
        kinds = " and ".join(phase.mechanism.sampling.kind for phase in sampled)
        way_out = "Continue with the same bins: one mechanism of more epochs."
        raise _check.reject("phases", kinds, "only one phase may have a sampled account", way_out)
    (sampled_phase,) = sampled
    sigma = sampled_phase.noise_multiplier
    if profile := _profile(phases, COARSE):
        target = -30.0 if delta is None else math.log(_check.probability("delta", delta))
        companion = profile.composition(target)
        options = dataclasses.asdict(effort)
        del options["certificate"]  # samples alone prove this one
        answers: Analysis = composition.analysis(sampled_phase.mechanism, companion, **options)
    else:
        answers = analysis(sampled_phase.mechanism, **dataclasses.asdict(effort))
    if delta is not None:
        return answers.epsilon(sigma, delta)
    assert epsilon is not None
    return answers.delta(sigma, epsilon)


def over_training(
    phases: Mechanism | Sequence[Phase],
    noise_multiplier: float | None = None,
    delta: float | None = None,
    points: int = 20,
    *,
    epsilon: float | None = None,
    **effort: Any,
) -> Iterator[tuple[int, Guarantee]]:
    """Yield (iterations done, guarantee so far) along a run, for monitoring.

    The first iterations of a run are the same mechanism with a leading block of C; points lie at
    whole epochs where the scheme has epochs (at whole assignment rounds where bins are reassigned),
    so that the guarantee at the end of an epoch holds within it. The end of the run is the only
    point where the scheme's first steps are no shorter run (a unit may have taken part more
    often by then than such a run says).

    Args:
      phases: the whole run: a mechanism, or phases one after the other.
      noise_multiplier: σ, in clip norms, of a mechanism; phases have their own.
      delta: δ of every point.
      points: how many, evenly spread over the run; fewer where it has fewer iterations or epochs.
      epsilon: ε of every point, whose δ is wanted, in place of ``delta``.
      effort: ``samples``, ``seed`` and ``certify`` of sampled accounts.

    Raises:
      UsageError: neither or both of ε and δ are given, or an argument is out of range.
    """
    if isinstance(phases, Mechanism):
        if noise_multiplier is None:
            raise _check.reject("noise_multiplier", None, "must be given for a mechanism")
        question: Any = {"noise_multiplier": noise_multiplier, "epsilon": epsilon, "delta": delta}
        for part in _beginnings(phases, _check.integer("points", points)):
            yield part.iterations, account(part, **question, **effort)
        return
    total = sum(phase.mechanism.iterations for phase in phases)
    earlier: list[Phase] = []
    for phase in phases:
        share = max(1, round(points * phase.mechanism.iterations / total))
        done = sum(done_phase.mechanism.iterations for done_phase in earlier)
        for part in _beginnings(phase.mechanism, share):
            cut = dataclasses.replace(phase, mechanism=part)
            guarantee = compose([*earlier, cut], epsilon=epsilon, delta=delta, **effort)
            yield done + part.iterations, guarantee
        earlier.append(phase)


def _beginnings(mechanism: Mechanism, points: int) -> Iterator[Mechanism]:
    scheme = mechanism.sampling
    if not scheme.prefix_closed:
        yield mechanism
        return
    whole = getattr(scheme, "rethrow", 1)  # epochs that share an assignment end together
    total = getattr(scheme, _length_field(scheme)) // whole
    for count in sorted({max(1, round(total * (k + 1) / points)) for k in range(points)}):
        yield beginning(mechanism, count * whole)


def _length_field(scheme: Scheme) -> str:
    return "epochs" if hasattr(scheme, "epochs") else "iterations"


def beginning(mechanism: Mechanism, count: int) -> Mechanism:
    """The first ``count`` epochs, or iterations where there are none, of a mechanism.

    Args:
      mechanism: whose scheme is ``prefix_closed``.
      count: of whole assignment rounds where bins are reassigned.
    """
    scheme = mechanism.sampling
    shorter = dataclasses.replace(scheme, **{_length_field(scheme): count})
    begun = _beginning(mechanism.strategy, mechanism.iterations, shorter.iterations)
    return dataclasses.replace(mechanism, sampling=shorter, strategy=begun)


def _beginning(strategy: Strategy, n: int, done: int) -> Strategy:
    """The first rows of the n×n C: of most kinds the C of fewer steps; of a tree another one."""
    if done == n:
        return strategy
    whole, shorter = strategy.toeplitz_column(n), strategy.toeplitz_column(done)
    if whole is None or shorter is None:
        some = np.random.default_rng(0).normal(size=done)  # orthogonal to no difference
        whole = strategy.multiply(np.append(some, np.zeros(n - done)))
        shorter = strategy.multiply(some)
    leading, shorter = np.asarray(whole)[:done], np.asarray(shorter)
    if np.allclose(leading, shorter, rtol=0, atol=1e-12 * float(np.max(np.abs(shorter)))):
        return strategy
    _sizes.require("iterations", n, lambda n: 8 * 3.0 * n**2)
    return Dense(np.asarray(strategy.materialize(n))[:done, :done])
