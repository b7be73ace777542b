"""Runs in phases: different noise, rates, schemes, one after the other on the same data.

Each phase is a mechanism with its σ whose account is a composition of rounds: Poisson sampling,
fixed batches, a banded C under cyclic Poisson sampling, or no sampling at all. Their losses add
up on one grid. A later phase may depend on what an earlier one released. Phases are exchanged
with ``dp_accounting`` as its events.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mfopt import _check
from mfopt.accounting import unamplified
from mfopt.accounting.account import account
from mfopt.accounting.loss_distribution import poisson
from mfopt.accounting.loss_distribution.convolution import Composition
from mfopt.accounting.loss_distribution.grid import Grid, Law
from mfopt.accounting.loss_distribution.mixture import Mixture
from mfopt.accounting.loss_distribution.rounds import FINE, smallest_epsilon
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import CyclicPoisson, FixedBatch, FixedOrder, MinSeparation, Poisson

_TRUNCATED = 16.0


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
        _check.positive("noise_multiplier", self.noise_multiplier)
        self.rounds  # noqa: B018  refuses a mechanism without rounds when it is given

    @property
    def rounds(self) -> poisson.Rounds:
        """What composes in this phase.

        Raises:
          UsageError: its account is no composition of rounds.
        """
        mechanism, scheme = self.mechanism, self.mechanism.sampling
        if mechanism.adjacency == "replace":
            raise _check.reject("adjacency", "replace", "phases are composed for 'add-remove'")
        # by exact class: a subclass may let units take part otherwise
        known = _ROUNDS.get(type(scheme))
        rounds = None if known is None else known(mechanism)
        if rounds is None:
            raise _check.reject(
                "sampling",
                scheme,
                "its account is no composition of rounds",
                "Phases may be Poisson, cyclic Poisson (one unit), fixed batches or fixed order; "
                "balls-in-bins composes by mfopt.accounting.monte_carlo.composition.",
            )
        return rounds


def _poisson(mechanism: Any) -> poisson.Rounds:
    return poisson.poisson(mechanism.strategy, mechanism.sampling, mechanism.group_size)


def _fixed_batch(mechanism: Any) -> poisson.Rounds | None:
    if mechanism.adjacency != "add-remove":
        return None
    return poisson.fixed_batch(mechanism.strategy, mechanism.sampling, mechanism.group_size)


def _cyclic_poisson(mechanism: Any) -> poisson.Rounds | None:
    if mechanism.group_size != 1:
        return None
    return poisson.cyclic_poisson(mechanism.strategy, mechanism.sampling)


def _unsampled(mechanism: Any) -> poisson.Rounds:
    one = unamplified.sensitivity(mechanism.strategy, mechanism.sampling)
    moved = one.value * mechanism.group_size
    return poisson.Rounds(Mixture.binomial(1, 1.0), 1, moved, one.exact)


# what composes in a phase; None where a group or an adjacency has no rounds
_ROUNDS: dict[type, Callable[[Any], poisson.Rounds | None]] = {
    Poisson: _poisson,
    FixedBatch: _fixed_batch,
    CyclicPoisson: _cyclic_poisson,
    FixedOrder: _unsampled,
    MinSeparation: _unsampled,
}


def compose(
    phases: Sequence[Phase],
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    accuracy: float = FINE,
) -> Guarantee:
    """ε for δ, or δ for ε, of all phases together; an upper bound.

    Args:
      phases: the parts of the run, with one privacy unit, group size and adjacency.
      epsilon, delta: exactly one of the two.
      accuracy: relative error of ε that the grid is chosen for.

    Raises:
      UsageError: the phases protect different things, or one has no rounds to compose.
    """
    if not phases or (epsilon is None) == (delta is None):
        raise _check.reject(
            "phases, epsilon, delta",
            (len(phases), epsilon, delta),
            "give phases, and one of ε and δ",
        )
    first = phases[0].mechanism
    for phase in phases[1:]:
        for name in ("privacy_unit", "group_size", "adjacency"):
            if getattr(phase.mechanism, name) != getattr(first, name):
                raise _check.reject(
                    name,
                    getattr(phase.mechanism, name),
                    f"the first phase has {getattr(first, name)}",
                )
    found = [_value(phases, add, epsilon, delta, accuracy) for add in (False, True)]
    solved = max(found)
    given = {"epsilon": epsilon, "delta": math.exp(solved) if delta is None else delta}
    return Guarantee(
        epsilon=solved if epsilon is None else epsilon,
        delta=float(given["delta"] or 0.0),
        noise_multiplier=min(phase.noise_multiplier for phase in phases),
        privacy_unit=first.privacy_unit,
        group_size=first.group_size,
        adjacency=first.adjacency,
        method="privacy loss distribution of phases",
        status="bound",
        details={
            "phases": [
                {
                    "sampling": phase.mechanism.sampling.describe(),
                    "strategy": phase.mechanism.strategy.describe(),
                    "noise_multiplier": phase.noise_multiplier,
                }
                for phase in phases
            ]
        },
    )


def _value(
    phases: Sequence[Phase], add: bool, epsilon: float | None, delta: float | None, accuracy: float
) -> float:
    """ε, or log δ, in one direction."""
    parts = [(phase.rounds, phase.noise_multiplier / phase.rounds.scale) for phase in phases]
    parts = [(part, sigma) for part, sigma in parts if not part.mixture.trivial]
    if not parts:
        return 0.0 if epsilon is None else -math.inf
    log_delta = -60.0 if delta is None else math.log(_check.probability("delta", delta))
    tails = [log_delta - math.log(len(parts) * part.rounds) - _TRUNCATED for part, _ in parts]
    laws = [
        Law.of(part.mixture, sigma, part.rounds, tail, add)
        for (part, sigma), tail in zip(parts, tails, strict=True)
    ]
    # where ε will be: at least that of each phase alone, at most the sum of all
    alone = [law.epsilon(log_delta) for law in laws]
    at = epsilon if epsilon is not None else max(math.hypot(*alone), 1e-4)
    grids = [
        Grid.plan(law, at, accuracy / len(parts), part.mixture.components)
        for law, (part, _) in zip(laws, parts, strict=True)
    ]
    step = min(grid.step for grid in grids)
    composition = Composition(
        tuple(
            (part.mixture.discretize(sigma, step, grid.spacing, tail), part.rounds)
            for (part, sigma), grid, tail in zip(parts, grids, tails, strict=True)
        )
    )
    composition = composition.reverse() if add else composition
    if epsilon is not None:
        return composition.convolve(composition.tilt_for_epsilon(at)).log_delta(epsilon)
    return smallest_epsilon(composition.convolve(composition.tilt_for_delta(log_delta)), log_delta)


def over_training(
    mechanism: Mechanism, noise_multiplier: float, delta: float, points: int = 20
) -> Iterator[tuple[int, Guarantee]]:
    """(iterations done, what they have cost): what a user watches during a run.

    The prefix of a run is the same mechanism with fewer iterations, or whole epochs where the
    scheme has epochs. The last point is the whole run's account.

    Args:
      mechanism: the whole run.
      noise_multiplier: σ, in clip norms.
      delta: δ of every point.
      points: how many, evenly spread over the run; fewer where it has fewer iterations or epochs.

    Raises:
      UsageError: C is a matrix of one size, which has no shorter one of its kind.
    """
    scheme: Any = mechanism.sampling
    field = "epochs" if hasattr(scheme, "epochs") else "iterations"
    total = getattr(scheme, field)
    done = sorted({max(1, round(total * (k + 1) / points)) for k in range(points)})
    for count in done:
        shorter = dataclasses.replace(scheme, **{field: count})
        part = dataclasses.replace(mechanism, sampling=shorter)
        yield part.iterations, account(part, noise_multiplier=noise_multiplier, delta=delta)


def to_event(phases: Sequence[Phase]) -> Any:
    """The ``dp_accounting`` event of Poisson-sampled or unsampled phases, one unit."""
    from dp_accounting import dp_event

    events = []
    for phase in phases:
        found = phase.rounds
        sigma = phase.noise_multiplier / found.scale
        one: Any = found.mixture
        shift = one.sensitivities
        if phase.mechanism.group_size > 1 or not set(shift.tolist()) <= {0.0, 1.0}:
            raise _check.reject(
                "phases",
                phase.mechanism.sampling,
                "no event for groups or for fixed batches under 'add-remove'",
            )
        event: Any = dp_event.GaussianDpEvent(sigma)
        if shift.size == 2:
            scheme: Any = phase.mechanism.sampling
            event = dp_event.PoissonSampledDpEvent(scheme.probability, event)
        events.append(dp_event.SelfComposedDpEvent(event, found.rounds))
    return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)


def from_event(event: Any, *, privacy_unit: str = "example") -> list[Phase]:
    """The phases of a ``dp_accounting`` event: Gaussian, Poisson-sampled, and compositions.

    Raises:
      UsageError: the event has a part that is none of these.
    """
    return list(_phases(event, 1, privacy_unit))


def _phases(event: Any, count: int, unit: str) -> Iterator[Phase]:
    kind = type(event).__name__
    if kind == "NoOpDpEvent":
        return
    if kind == "SelfComposedDpEvent":
        yield from _phases(event.event, count * event.count, unit)
    elif kind == "ComposedDpEvent":
        if count > 1:  # the order of independent rounds does not matter
            for one in event.events:
                yield from _phases(one, count, unit)
            return
        for one in event.events:
            yield from _phases(one, 1, unit)
    elif kind == "GaussianDpEvent":
        yield Phase(Mechanism(Poisson(1.0, count), privacy_unit=unit), event.noise_multiplier)
    elif kind == "PoissonSampledDpEvent" and type(event.event).__name__ == "GaussianDpEvent":
        scheme = Poisson(event.sampling_probability, count)
        yield Phase(Mechanism(scheme, privacy_unit=unit), event.event.noise_multiplier)
    else:
        raise _check.reject(
            "event", kind, "phases are Gaussian, Poisson-sampled Gaussian, or compositions of these"
        )
