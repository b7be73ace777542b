"""Conformance checks for every account of a mechanism, whatever its method."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy import special

from mfopt.accounting.account import account, registered, supporting
from mfopt.errors import UsageError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.testing._rules import refused, rule

_ONCE = 1e-6  # chance that a right account is refused


def check_accountant(
    mechanism: Mechanism,
    *,
    noise_multiplier: float,
    delta: float = 1e-5,
    longer: Mechanism | None = None,
    patterns: np.ndarray | None = None,
    population: int | None = None,
    runs: int = 4000,
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
      population: number of units of the simulated runs, where the scheme prescribes it.
      runs: draws of the scheme.
      tolerance: relative width to which σ comes back; larger for sampled accounts.
      effort: keywords of :func:`mfopt.accounting.account` for sampled accounts.

    Raises:
      AssertionError: a rule is broken; the message says which.
    """
    sigma = noise_multiplier
    rule(mechanism.sampling.kind in registered(), "no accountant is registered for this scheme")
    supporting(mechanism)
    here = account(mechanism, noise_multiplier=sigma, delta=delta, **effort)
    _statement(here, mechanism, sigma, delta)
    rule(0 < here.epsilon < math.inf, f"the example has ε = {here.epsilon}: choose another σ")
    _monotone(mechanism, here, longer, effort)
    _round_trip(mechanism, here, tolerance, effort)
    _bad_numbers(mechanism, sigma, delta)
    if patterns is None and mechanism.sampling.executable:
        patterns = drawn_patterns(mechanism, runs, population)
    if patterns is not None:
        _executed(mechanism, sigma, patterns, effort)


def drawn_patterns(
    mechanism: Mechanism, runs: int, population: int | None = None, seed: int = 0
) -> np.ndarray:
    """Number of a group's units in each iteration, shape (runs, n), drawn by the scheme.

    Args:
      mechanism: whose scheme draws, and whose group is followed.
      runs: how many.
      population: units of each run, where the scheme prescribes it.
      seed: of the first run.
    """
    scheme, group = mechanism.sampling, mechanism.group_size
    counts = np.zeros((runs, scheme.length))
    if scheme.independent and population is None:
        # units are drawn each on its own, so that one run has as many groups as are wanted
        drawn = scheme.draws(runs * group, seed)
        for t in range(scheme.length):
            counts[:, t] = np.bincount(np.asarray(drawn(t)) // group, minlength=runs)
        return counts
    for run in range(runs):
        drawn = scheme.draws(population or 4 * group, seed + run)
        for t in range(scheme.length):
            counts[run, t] = np.count_nonzero(np.asarray(drawn(t)) < group)
    return counts


def shown_delta(
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
    at = np.linspace(-6, 6 + float(means.max()) / sigma, 1001)
    caught = special.ndtr(means[None, :] / sigma - at[:, None]).mean(axis=1)
    false = special.ndtr(-at)
    remove = caught - math.exp(epsilon) * false
    add = (1 - false) - math.exp(epsilon) * (1 - caught)
    uncertain = math.sqrt(math.log(2 / _ONCE) / (2 * len(means)))
    if np.ptp(patterns, axis=0).max() == 0:
        uncertain = 0.0  # nothing was drawn
    both = np.array([remove.max(), add.max() - (math.exp(epsilon) - 1) * uncertain])
    return float(both.max()), uncertain


def _statement(found: Guarantee, mechanism: Mechanism, sigma: float, delta: float) -> None:
    asked = {name: getattr(mechanism, name) for name in ("group_size", "adjacency", "privacy_unit")}
    for name, meant in {**asked, "noise_multiplier": sigma, "delta": delta}.items():
        stated = getattr(found, name)
        rule(stated == meant, f"the statement has {name} = {stated!r}, not {meant!r}")
    rule(bool(found.method), "the statement must name its method")
    sampling = found.details.get("sampling")
    rule(sampling == mechanism.sampling.describe(), "its details must hold the sampling")
    rule(
        (found.failure_probability > 0) == (found.status == "certified")
        and found.failure_probability < delta,
        "a certified statement has a failure probability below δ, and no other has one",
    )


def _monotone(
    mechanism: Mechanism, here: Guarantee, longer: Mechanism | None, effort: dict[str, Any]
) -> None:
    sigma, delta = here.noise_multiplier, here.delta

    def epsilon(of: Mechanism, sigma: float = sigma, delta: float = delta) -> float:
        return account(of, noise_multiplier=sigma, delta=delta, **effort).epsilon

    rule(epsilon(mechanism, 0.8 * sigma) > here.epsilon, "less noise must cost ε")
    rule(epsilon(mechanism, 1.5 * sigma) < here.epsilon, "more noise must give a smaller ε")
    rule(epsilon(mechanism, delta=delta / 100) > here.epsilon, "a smaller δ must cost ε")
    if longer is not None:
        rule(epsilon(longer) > here.epsilon, "more iterations must cost ε")
    larger = dataclasses.replace(mechanism, group_size=mechanism.group_size + 2)
    try:
        supporting(larger)
    except UsageError:
        return
    if here.status != "certified":  # chains of sampled bounds take minutes
        # a group of K has at least K times an ε of one unit: 1 + 2/K of a group of K
        most = 1 + 1 / mechanism.group_size
        rule(epsilon(larger) > most * here.epsilon, "a larger group must cost ε in proportion")


def _round_trip(
    mechanism: Mechanism, here: Guarantee, tolerance: float, effort: dict[str, Any]
) -> None:
    sampled = here.status == "certified"
    sigma = here.noise_multiplier
    back = account(mechanism, noise_multiplier=sigma, epsilon=here.epsilon, **effort)
    most = here.delta * (1.15 if sampled else 1.001)
    rule(
        here.delta * (1 - 40 * tolerance) <= back.delta <= most,
        f"δ = {here.delta} gave ε = {here.epsilon}, which gives δ = {back.delta}",
    )
    if sampled:
        return
    found = account(mechanism, epsilon=here.epsilon, delta=here.delta, **effort)
    rule(
        math.isclose(found.noise_multiplier, sigma, rel_tol=tolerance),
        f"σ = {sigma} gave ε = {here.epsilon}, which gives σ = {found.noise_multiplier}",
    )
    again = account(
        mechanism, noise_multiplier=found.noise_multiplier, epsilon=here.epsilon, **effort
    )
    rule(again.delta <= here.delta * (1 + 1e-9), "the σ that was found does not satisfy its target")


def _bad_numbers(mechanism: Mechanism, sigma: float, delta: float) -> None:
    some: dict[str, tuple[Any, ...]] = {
        "noise_multiplier": (0.0, -1.0, math.nan, math.inf, "x"),
        "delta": (0.0, 1.0, -1e-5, math.nan),
        "epsilon": (-1.0, math.nan, math.inf),
    }
    for name, values in some.items():
        other = {"delta": delta} if name != "delta" else {"noise_multiplier": sigma}
        for bad in values:
            rule(
                refused(lambda asked: account(mechanism, **asked), {**other, name: bad}),
                f"{name} = {bad!r} must be refused with a UsageError",
            )


def _executed(
    mechanism: Mechanism, sigma: float, patterns: np.ndarray, effort: dict[str, Any]
) -> None:
    # at little noise, where a threshold tells what is executed from what is accounted
    for factor in (1.0, 0.3):
        for epsilon in (0.1, 1.0):
            shown, uncertain = shown_delta(mechanism, factor * sigma, epsilon, patterns)
            if shown - uncertain <= 0:
                continue
            stated = account(
                mechanism, noise_multiplier=factor * sigma, epsilon=epsilon, **effort
            ).delta
            rule(
                stated >= (shown - uncertain) * (1 - 1e-6),
                f"at σ = {factor * sigma:.4g} and ε = {epsilon} the account says δ = {stated:.4g}, "
                f"and the scheme as it is executed shows {shown:.4g} (± {uncertain:.2g})",
            )
