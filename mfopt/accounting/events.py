"""Phases of a run as events of ``dp_accounting``, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mfopt._runtime import _check
from mfopt._runtime._types import JsonObject
from mfopt.accounting.loss_distribution.mixture import Mixture
from mfopt.accounting.phases import Phase
from mfopt.mechanism import Mechanism
from mfopt.sampling import Adjacency, Poisson, TruncatedPoisson


def to_event(phases: Sequence[Phase]) -> Any:
    """The ``dp_accounting`` event of phases, whose account there is the same question.

    Poisson-sampled and unsampled phases become Gaussian events, groups and fixed batches under
    "add-remove" mixtures of Gaussians. Poisson-sampled phases under "replace" are for its
    accountant of privacy loss distributions with "replace one".

    Raises:
      UsageError: a phase has no event: its loss is sampled, or its adjacency is none there.
    """
    from dp_accounting import dp_event

    events = []
    for phase in phases:
        rounds, scheme = phase.rounds, phase.mechanism.sampling
        if rounds is None:
            raise _check.reject("phases", scheme, "dp_accounting has no event for this scheme")
        facts, one = scheme.describe(), phase.mechanism.group_size == 1
        is_drawn = facts["kind"] in ("poisson", "cyclic-poisson") and 0 < facts["probability"] < 1
        for mixture, count, sigma in rounds.at(phase.noise_multiplier):
            event = dp_event.GaussianDpEvent(sigma)
            if facts["kind"] == "truncated-poisson":
                event = dp_event.TruncatedSubsampledGaussianDpEvent(
                    facts["population"], facts["probability"], facts["batch_size"], sigma
                )
            elif is_drawn and one:
                event = dp_event.PoissonSampledDpEvent(facts["probability"], event)
            elif phase.mechanism.adjacency == "replace" or not isinstance(mixture, Mixture):
                rule = f"dp_accounting has no event for it under {scheme.kind}"
                raise _check.reject("adjacency", phase.mechanism.adjacency, rule)
            elif (shift := mixture.sensitivities.tolist()) != [1.0]:
                weight = np.exp(mixture.log_weights).tolist()
                event = dp_event.MixtureOfGaussiansDpEvent(sigma, shift, weight)
            events.append(dp_event.SelfComposedDpEvent(event, count))
    return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)


def from_event(
    event: Any, *, privacy_unit: str = "example", adjacency: Adjacency = "add-remove"
) -> list[Phase]:
    """The phases of a ``dp_accounting`` event.

    Args:
      event: Gaussian, Poisson-sampled (truncated or not), a group's mixture of Gaussians, or
        compositions of these.
      privacy_unit: what a record is.
      adjacency: of its accountant; dp_accounting's "add or remove one" by default, "replace" for
        its "replace one".

    Raises:
      UsageError: the event has a part that is none of these.
    """
    return list(_phases(event, 1, {"privacy_unit": privacy_unit, "adjacency": adjacency}))


def _phases(event: Any, count: int, protects: JsonObject) -> Iterator[Phase]:
    kind = type(event).__name__
    if kind == "NoOpDpEvent":
        return
    inner: Any = getattr(event, "event", None)
    gaussian = type(inner).__name__ == "GaussianDpEvent"
    if kind == "SelfComposedDpEvent":
        yield from _phases(inner, count * event.count, protects)
    elif kind == "ComposedDpEvent":
        for part in event.events:  # the order of independent rounds does not matter
            yield from _phases(part, count, protects)
    elif kind == "GaussianDpEvent":
        yield Phase(Mechanism(Poisson(1.0, count), **protects), event.noise_multiplier)
    elif kind == "PoissonSampledDpEvent" and gaussian:
        scheme = Poisson(event.sampling_probability, count)
        yield Phase(Mechanism(scheme, **protects), inner.noise_multiplier)
    elif kind == "TruncatedSubsampledGaussianDpEvent":
        cut = TruncatedPoisson(
            event.sampling_probability, event.truncated_batch_size, event.dataset_size, count
        )
        yield Phase(Mechanism(cut, **protects), event.noise_multiplier)
    elif kind == "MixtureOfGaussiansDpEvent":
        group, chance = _binomial(event)
        mechanism = Mechanism(Poisson(chance, count), group_size=group, **protects)
        yield Phase(mechanism, event.standard_deviation)
    else:
        raise _check.reject(
            "event",
            kind,
            "phases are Gaussian, Poisson-sampled Gaussian, mixtures of Gaussians of a "
            "Poisson-sampled group, or compositions of these",
            "Sampling without replacement is left out: its accountant there reads the noise "
            "multiplier relative to what a replacement changes, not to the clip norm.",
        )


def _binomial(event: Any) -> tuple[int, float]:
    """(K, p) of the group whose number of sampled units has the event's law."""
    order = np.argsort(event.sensitivities)
    shift = np.asarray(event.sensitivities, dtype=np.float64)[order]
    weight = np.asarray(event.sampling_probs, dtype=np.float64)[order]
    group = int(shift[-1])
    chance = float(weight @ shift) / max(group, 1)
    if group >= 1 and 0 < chance <= 1:
        law = Mixture.binomial(group, chance)
        stated = np.zeros(group + 1)
        if np.array_equal(shift, np.round(shift)) and shift[0] >= 0:
            stated[shift.astype(int)] = weight
        binomial = np.zeros(group + 1)
        binomial[law.sensitivities.astype(int)] = np.exp(law.log_weights)
        if np.allclose(stated, binomial, rtol=1e-6, atol=1e-15):
            return group, chance
    rule = (
        "its sensitivities are not those of a Poisson-sampled group: 0..K, binomially distributed"
    )
    raise _check.reject("event", "MixtureOfGaussiansDpEvent", rule)
