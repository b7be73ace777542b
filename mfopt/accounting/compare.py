"""A group's ε from one example's, by every method side by side (Ganesh 2024, section 4)."""

from __future__ import annotations

import functools
import math
from typing import get_args

from mfopt import _check
from mfopt.accounting import group
from mfopt.accounting.chain import Chain, DeterministicUnit
from mfopt.accounting.mechanism import Mechanism, account
from mfopt.accounting.mixture import Mixture
from mfopt.accounting.rounds import RoundsProfile
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.guarantee import Guarantee
from mfopt.sampling import Poisson


def group_methods(
    probability: float,
    iterations: int,
    noise_multiplier: float,
    delta: float,
    group_size: int,
    *,
    floor: float = 0.0,
) -> list[Guarantee]:
    """Guarantees of Poisson-sampled DP-SGD for ``group_size`` examples at δ.

    The mixture of Gaussians (tight), the whole one-example profile, the textbook lemma in its two
    forms with ``floor`` as the smallest one-example δ it may use (ε is infinite where it needs
    less: beyond numerical range), and last the line K ε_1, with status "estimate" as it proves
    nothing.
    """
    mechanism = Mechanism(Poisson(probability, iterations), group_size=group_size)
    sigma, count = _check.positive("noise_multiplier", noise_multiplier), mechanism.group_size
    tight = account(mechanism, noise_multiplier=sigma, delta=delta)
    one = RoundsProfile(Mixture.binomial(1, probability), iterations, sigma)
    make = functools.partial(_made, tight)
    results = [tight]
    if count > 1:
        results.append(_whole_profile(mechanism, sigma, delta))
    for form in get_args(group.Form):
        found = group.black_box_epsilon(one, count, delta, form=form, floor=floor)
        status = "bound" if math.isfinite(found) else "estimate"
        results.append(make(found, f"textbook lemma, {form} form", status))
    line = group.line(one, count, delta)
    return [*results, make(line, "line K times one example's epsilon, no guarantee", "estimate")]


def _whole_profile(mechanism: Mechanism, sigma: float, delta: float) -> Guarantee:
    scheme = mechanism.sampling
    assert isinstance(scheme, Poisson)
    mixture = Mixture.binomial(1, scheme.probability)

    def profile(at: float, accuracy: float) -> RoundsProfile:
        return RoundsProfile(mixture, scheme.iterations, at, accuracy)

    def start(epsilon: float, target: float) -> float:
        return max(mixture.guess(scheme.iterations, epsilon, target), 1e-3)

    chain = Chain(DeterministicUnit(profile, start), mechanism.group_size, "one example")
    return VerifiedAnalysis(mechanism, chain).epsilon(sigma, delta)


def _made(like: Guarantee, epsilon: float, method: str, status: str) -> Guarantee:
    return Guarantee(
        epsilon=epsilon, delta=like.delta, noise_multiplier=like.noise_multiplier,
        privacy_unit=like.privacy_unit, group_size=like.group_size, adjacency=like.adjacency,
        method=method, status=status,  # type: ignore[arg-type]
    )  # fmt: skip
