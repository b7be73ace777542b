"""Conformance checks for every account of a mechanism, whatever its method."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from scipy import special

from mfopt._runtime._types import JsonObject
from mfopt.accounting.account import account, registered, supporting
from mfopt.errors import UsageError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.testing._rules import refused, rule

_RUNS, _WHOLE_RUNS = 4000, 200  # draws of independent units, and of units that hang together
_ONCE = 1e-6  # chance that a right account is refused


def check_accountant(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    delta: float = 1e-5,
    longer: Mechanism | None = None,
    patterns: np.ndarray | None = None,
    tolerance: float = 1e-3,
    **effort: Any,
) -> None:
    """Check the account of an example against general rules and against the executed scheme.

    The decisive one: participations are drawn by the scheme itself, as the loader draws them, a
    unit's contributions all point the same way, and along one direction the release then is a
    mixture of Gaussians. What can be told from that is a lower bound of δ, and no account may be
    below it.

    Args:
      mechanism: an example of what the accountant supports.
      noise_multiplier: σ at which ε is finite, best about 1.
      delta: δ of the questions.
      longer: the same with more iterations, which must cost ε.
      patterns: participations of one unit, shape (runs, n), for a scheme that is not executable.
      tolerance: relative width to which σ comes back; larger for sampled accounts.
      effort: keywords of :func:`mfopt.accounting.account` for sampled accounts.

    Raises:
      AssertionError: a rule is broken; the message says which.
    """
    sigma = noise_multiplier
    rule(mechanism.sampling.kind in registered(), "no accountant is registered for this scheme")
    supporting(mechanism)
    guarantee = account(mechanism, noise_multiplier=sigma, delta=delta, **effort)
    _statement(guarantee, mechanism, sigma, delta)
    rule(
        0 < guarantee.epsilon < math.inf,
        f"the example has ε = {guarantee.epsilon}: choose another σ",
    )
    _monotone(mechanism, guarantee, longer, effort)
    _round_trip(mechanism, guarantee, tolerance, effort)
    _bad_numbers(mechanism, sigma, delta)
    if patterns is None and mechanism.sampling.executable:
        patterns = drawn_patterns(mechanism)
    if patterns is not None:
        # at little noise, where a threshold tells what is executed from what is accounted
        points = itertools.product((sigma, 0.3 * sigma), (0.1, 1.0))
        not_below_executed(
            mechanism,
            patterns,
            points,
            lambda sigma, epsilon: (
                account(mechanism, noise_multiplier=sigma, epsilon=epsilon, **effort).delta
            ),
        )


def drawn_patterns(mechanism: Mechanism) -> np.ndarray:
    """Number of a group's units in each iteration, shape (runs, n), drawn by the scheme.

    Args:
      mechanism: whose scheme draws, and whose group is followed.
    """
    scheme, group = mechanism.sampling, mechanism.group_size
    population = scheme.describe().get("population")
    runs = _RUNS if scheme.independent else _WHOLE_RUNS
    counts = np.zeros((runs, scheme.length))
    if scheme.independent and population is None:
        # units are drawn each on its own, so that one run has as many groups as are wanted
        drawn = scheme.draws(runs * group, 0)
        for t in range(scheme.length):
            counts[:, t] = np.bincount(np.asarray(drawn(t)) // group, minlength=runs)
        return counts
    for run in range(runs):
        drawn = scheme.draws(population or 4 * group, run)
        for t in range(scheme.length):
            counts[run, t] = np.count_nonzero(np.asarray(drawn(t)) < group)
    return counts


def _shown_delta(
    mechanism: Mechanism, sigma: float, epsilon: float, patterns: np.ndarray
) -> tuple[float, float]:
    """(δ, its uncertainty) that the drawn participations show at this σ and ε, without any theory.

    Along the mean of C x the release is a mixture of Gaussians; a threshold tells it from noise.
    The uncertainty is that of an empirical law (Massart 1990), for all thresholds at once.

    Args:
      mechanism: whose C is streamed.
      sigma: σ, in clip norms.
      epsilon: ε.
      patterns: participations, shape (runs, n), half of which choose the direction.
    """
    signal = np.asarray(mechanism.strategy.materialize(mechanism.iterations)) @ patterns.T
    # the direction is chosen on one half, and the law along it measured on the other
    half = signal.shape[1] // 2
    direction = signal[:, :half].mean(axis=1)
    means = direction @ signal[:, half:] / np.linalg.norm(direction)
    thresholds = np.linspace(-6, 6 + float(means.max()) / sigma, 1001)
    caught = special.ndtr(means[None, :] / sigma - thresholds[:, None]).mean(axis=1)
    false = special.ndtr(-thresholds)
    remove = caught - math.exp(epsilon) * false
    add = (1 - false) - math.exp(epsilon) * (1 - caught)
    uncertain = math.sqrt(math.log(2 / _ONCE) / (2 * len(means)))
    if np.ptp(patterns, axis=0).max() == 0:
        uncertain = 0.0  # nothing was drawn
    deltas = np.array([remove.max(), add.max() - (math.exp(epsilon) - 1) * uncertain])
    return float(deltas.max()), uncertain


def _statement(guarantee: Guarantee, mechanism: Mechanism, sigma: float, delta: float) -> None:
    expected = {
        name: getattr(mechanism, name) for name in ("group_size", "adjacency", "privacy_unit")
    }
    for name, meant in {**expected, "noise_multiplier": sigma, "delta": delta}.items():
        stated = getattr(guarantee, name)
        rule(stated == meant, f"the statement has {name} = {stated!r}, not {meant!r}")
    rule(bool(guarantee.method), "the statement must name its method")
    sampling = guarantee.details.get("sampling")
    rule(sampling == mechanism.sampling.describe(), "its details must hold the sampling")
    rule(
        (guarantee.failure_probability > 0) == (guarantee.status == "certified")
        and guarantee.failure_probability < delta,
        "a certified statement has a failure probability below δ, and no other has one",
    )


def _monotone(
    mechanism: Mechanism, guarantee: Guarantee, longer: Mechanism | None, effort: JsonObject
) -> None:
    sigma, delta = guarantee.noise_multiplier, guarantee.delta

    def epsilon(example: Mechanism, sigma: float = sigma, delta: float = delta) -> float:
        return account(example, noise_multiplier=sigma, delta=delta, **effort).epsilon

    rule(epsilon(mechanism, 0.8 * sigma) > guarantee.epsilon, "less noise must cost ε")
    rule(epsilon(mechanism, 1.5 * sigma) < guarantee.epsilon, "more noise must give a smaller ε")
    rule(epsilon(mechanism, delta=delta / 100) > guarantee.epsilon, "a smaller δ must cost ε")
    if longer is not None:
        rule(epsilon(longer) > guarantee.epsilon, "more iterations must cost ε")
    larger = dataclasses.replace(mechanism, group_size=mechanism.group_size + 2)
    try:
        supporting(larger)
    except UsageError:
        return
    if guarantee.status != "certified":  # chains of sampled bounds take minutes
        # a group of K has at least K times an ε of one unit: 1 + 2/K of a group of K
        factor = 1 + 1 / mechanism.group_size
        rule(
            epsilon(larger) > factor * guarantee.epsilon, "a larger group must cost ε in proportion"
        )


def _round_trip(
    mechanism: Mechanism, guarantee: Guarantee, tolerance: float, effort: JsonObject
) -> None:
    sampled = guarantee.status == "certified"
    sigma = guarantee.noise_multiplier
    back = account(mechanism, noise_multiplier=sigma, epsilon=guarantee.epsilon, **effort)
    largest_delta = guarantee.delta * (1.15 if sampled else 1.001)
    rule(
        guarantee.delta * (1 - 40 * tolerance) <= back.delta <= largest_delta,
        f"δ = {guarantee.delta} gave ε = {guarantee.epsilon}, which gives δ = {back.delta}",
    )
    if sampled:
        return
    calibrated = account(mechanism, epsilon=guarantee.epsilon, delta=guarantee.delta, **effort)
    rule(
        math.isclose(calibrated.noise_multiplier, sigma, rel_tol=tolerance),
        f"σ = {sigma} gave ε = {guarantee.epsilon}, which gives σ = {calibrated.noise_multiplier}",
    )
    checked = account(
        mechanism, noise_multiplier=calibrated.noise_multiplier, epsilon=guarantee.epsilon, **effort
    )
    rule(
        checked.delta <= guarantee.delta * (1 + 1e-9),
        "the σ that was found does not satisfy its target",
    )


def _bad_numbers(mechanism: Mechanism, sigma: float, delta: float) -> None:
    some: dict[str, tuple[object, ...]] = {
        "noise_multiplier": (0.0, -1.0, math.nan, math.inf, "x"),
        "delta": (0.0, 1.0, -1e-5, math.nan),
        "epsilon": (-1.0, math.nan, math.inf),
    }
    for name, values in some.items():
        valid = {"delta": delta} if name != "delta" else {"noise_multiplier": sigma}
        for bad in values:
            rule(
                refused(lambda arguments: account(mechanism, **arguments), {**valid, name: bad}),
                f"{name} = {bad!r} must be refused with a UsageError",
            )


def not_below_executed(
    mechanism: Mechanism,
    patterns: np.ndarray,
    points: Iterable[tuple[float, float]],
    delta: Callable[[float, float], float],
) -> None:
    """Hold δ at each (σ, ε) against what the drawn participations show there.

    Args:
      mechanism: whose C is streamed.
      patterns: participations, shape (runs, n).
      points: (σ, ε).
      delta: of the account, at a σ and ε.

    Raises:
      AssertionError: the account is below.
    """
    for sigma, epsilon in points:
        shown, uncertain = _shown_delta(mechanism, sigma, epsilon, patterns)
        if shown > uncertain:
            stated = delta(sigma, epsilon)
            rule(
                stated >= (shown - uncertain) * (1 - 1e-6),
                f"at σ = {sigma:.4g} and ε = {epsilon:.4g} the account says δ = {stated:.4g}, "
                f"and the scheme as it is executed shows {shown:.4g} (± {uncertain:.2g})",
            )
