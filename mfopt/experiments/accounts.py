"""Accountants as tasks: one (σ, ε, δ) question each, cached like the rest."""

from __future__ import annotations

import math
from typing import Any

from mfopt import sampling
from mfopt.accounting import Mechanism, account, analysis
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.closed_form import filter as concentration
from mfopt.accounting.closed_form import moments
from mfopt.accounting.closed_form.group import black_box_epsilon, lower_line
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
    """ε of a group by the black-box lemma, on record: the least that two accounts of one unit give.

    A profile by loss distributions ends where float64 probabilities do. Under Poisson sampling
    moments go on from there: they are logarithms.

    Args:
      scheme: sampling scheme, or its description.
      group_size: K, units that change together.
      adjacency: "add-remove", "zero-out" or "replace".
      noise_multiplier: σ relative to the clip norm, for C as stored.
      delta: δ of the statement.
    """
    made = sampling.from_description(scheme)
    one = analysis(Mechanism(made, adjacency=adjacency))
    assert isinstance(one, DeterministicAnalysis)
    profile = one.profile(noise_multiplier)
    epsilon = black_box_epsilon(profile, group_size, delta, floor=BLACK_BOX_FLOOR)
    if scheme["kind"] == "poisson" and adjacency == "add-remove":
        at = (noise_multiplier, scheme["probability"], scheme["iterations"])
        epsilon = min(epsilon, moments.group_epsilon(*at, delta, group_size))
    return Result(
        {
            # beyond numerical range, which says nothing about the privacy loss
            "epsilon": None if math.isinf(epsilon) else epsilon,
            "line": lower_line(profile, group_size, delta),
        }
    )


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
