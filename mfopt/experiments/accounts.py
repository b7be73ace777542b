"""Accountants as tasks: one (σ, ε, δ) question each, cached like the rest."""

from __future__ import annotations

import math
from typing import Any

from mfopt import sampling
from mfopt.accounting import Mechanism, account, analysis
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.closed_form import filter as concentration
from mfopt.accounting.closed_form.group import Profile, black_box_log_factor, lower_line
from mfopt.experiments.cache import Result, Task

# Below this one-unit δ the accountants that Ganesh and Charles et al. plot have lost all digits.
BLACK_BOX_FLOOR = 1e-15


def account_task(
    scheme: Any,
    *,
    group_size: int = 1,
    adjacency: str = "add-remove",
    noise_multiplier: float | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
) -> Task:
    """The third of (σ, ε, δ) for independent noise under ``scheme``.

    Args:
      scheme: sampling scheme, or its description.
      group_size: K, units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      noise_multiplier: σ relative to the clip norm, for C as stored.
      epsilon: ε of the statement.
      delta: δ of the statement.
    """
    return Task.of(
        "account",
        scheme=scheme.describe(),
        group_size=group_size,
        adjacency=adjacency,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
    )


def group_baseline_task(
    scheme: Any, *, group_size: int, adjacency: str, noise_multiplier: float, delta: float
) -> Task:
    """ε of a group by the black-box lemma, and the line K·ε₁ (which is no guarantee).

    Args:
      scheme: sampling scheme, or its description.
      group_size: K, units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      noise_multiplier: σ relative to the clip norm, for C as stored.
      delta: δ of the statement.
    """
    return Task.of(
        "group-baseline",
        scheme=scheme.describe(),
        group_size=group_size,
        adjacency=adjacency,
        noise_multiplier=noise_multiplier,
        delta=delta,
    )


def run_account(
    *,
    scheme: dict[str, Any],
    group_size: int,
    adjacency: Any,
    noise_multiplier: float | None,
    epsilon: float | None,
    delta: float | None,
) -> Result:
    """The third of (σ, ε, δ), on record.

    Args:
      scheme: sampling scheme, or its description.
      group_size: K, units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      noise_multiplier: σ relative to the clip norm, for C as stored.
      epsilon: ε of the statement.
      delta: δ of the statement.
    """
    found = account(
        Mechanism(sampling.from_description(scheme), group_size=group_size, adjacency=adjacency),
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
    )
    return Result(
        {
            "noise_multiplier": found.noise_multiplier,
            "epsilon": found.epsilon,
            "delta": found.delta,
            "status": found.status,
            "method": found.method,
        }
    )


def run_group_baseline(
    *,
    scheme: dict[str, Any],
    group_size: int,
    adjacency: Any,
    noise_multiplier: float,
    delta: float,
) -> Result:
    """ε of a group by the black-box lemma, on record.

    Args:
      scheme: sampling scheme, or its description.
      group_size: K, units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      noise_multiplier: σ relative to the clip norm, for C as stored.
      delta: δ of the statement.
    """
    one = analysis(Mechanism(sampling.from_description(scheme), adjacency=adjacency))
    assert isinstance(one, DeterministicAnalysis)
    profile = one.profile(noise_multiplier)
    return Result(
        {
            "epsilon": black_box(profile, group_size, delta),
            "line": lower_line(profile, group_size, delta),
        }
    )


def black_box(profile: Profile, group_size: int, delta: float) -> float | None:
    """K ε for the least ε with δ(ε)·(e^{Kε} - 1)/(e^ε - 1) <= δ and δ(ε) above the floor.

    The left side need not be monotone, so the range is scanned before it is halved. None where
    no ε qualifies: beyond numerical range, which says nothing about the privacy loss.
    """
    first, last = profile.epsilon(delta), profile.epsilon(BLACK_BOX_FLOOR) * 0.999

    def holds(epsilon: float) -> bool:
        log_delta = profile.log_delta(epsilon)
        return log_delta + black_box_log_factor(epsilon, group_size, "geometric") <= math.log(delta)

    points = [first + (last - first) * i / 20 for i in range(21)]
    high = next((i for i, point in enumerate(points) if holds(point)), None)
    if high is None:
        return None
    upper = points[high]
    lower = points[high - 1] if high else upper
    while upper - lower > 1e-4 * upper:
        middle = (lower + upper) / 2
        lower, upper = (lower, middle) if holds(middle) else (middle, upper)
    return group_size * upper


def filter_task(
    epsilon: float, delta: float, iterations: int, users: int, user_batch: float
) -> Task:
    """Noise of user-wise DP-SGD with and without the concentration filter.

    Args:
      epsilon: ε of the statement.
      delta: δ of the statement.
      iterations: training iterations n.
      users: users in the data set.
      user_batch: expected users in a batch.
    """
    return Task.of(
        "filter",
        epsilon=epsilon,
        delta=delta,
        iterations=iterations,
        users=users,
        user_batch=user_batch,
    )


def run_filter(**settings: Any) -> Result:
    found = concentration.compare(**settings)
    return Result(
        {
            "plain_noise": found.plain_noise,
            "filter_noise_per_threshold": found.filter_noise_per_threshold,
            "break_even": found.break_even,
        }
    )
