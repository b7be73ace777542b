"""ε or σ of a group by every method side by side (Ganesh 2024, section 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import get_args

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.account import account, analysis
from mfopt.accounting.analyses import DeterministicAnalysis
from mfopt.accounting.chain import Chain, DeterministicUnit
from mfopt.accounting.closed_form import group
from mfopt.accounting.verified import VerifiedAnalysis
from mfopt.errors import FailureError
from mfopt.guarantee import Guarantee
from mfopt.mechanism import Mechanism
from mfopt.sampling import Poisson


def black_box_multiplier(
    make: Callable[[float], group.Profile],
    group_size: int,
    epsilon: float,
    delta: float,
    guess: float,
    *,
    form: group.Form = "geometric",
    floor: float = 0.0,
) -> float:
    """σ of a group by the textbook lemma: one unit needs δ / factor at ε / K.

    It is infinite where that δ is below ``floor``.

    Args:
      make: σ -> the one-unit profile.
      group_size, epsilon, delta: K and the group's target.
      guess: a σ to begin at.
      form, floor: as in :func:`~.group.black_box_epsilon`.
    """
    group_size = _check.integer("group_size", group_size)
    one = _check.epsilon("epsilon", epsilon) / group_size
    target = math.log(_check.probability("delta", delta))
    target -= group.black_box_log_factor(one, group_size, form)
    if target < math.log(max(floor, group.SMALLEST_DELTA)):
        return math.inf
    return solve.smallest(
        lambda sigma: make(sigma).log_delta(one) - target, guess, name="noise multiplier"
    )


def lower_line(profile: group.Profile, group_size: int, delta: float) -> float:
    """K ε_1: the line that Ganesh (2024, section 4) compares the growth in K with, no guarantee.

    A group's ε was above it in every case computed here under Poisson sampling; with fixed batches
    it need not be.
    """
    return group_size * profile.epsilon(delta)


LINE = "line K times one example's epsilon, no guarantee"


def group_methods(
    probability: float,
    iterations: int,
    noise_multiplier: float | None,
    delta: float,
    group_size: int,
    *,
    epsilon: float | None = None,
    floor: float = 0.0,
) -> list[Guarantee]:
    """Guarantees of Poisson-sampled DP-SGD for ``group_size`` examples at δ.

    ε is found from σ, or σ from ε, by each of: the mixture of Gaussians (tight), the whole
    one-example profile, the textbook lemma in its two forms (infinite where it needs less than
    ``floor``), and last the line K ε_1, with status "estimate" as it proves nothing.

    Args:
      probability: chance that an example is in a batch.
      iterations: n.
      noise_multiplier: σ in clip norms, or None where ``epsilon`` is given.
      delta: δ of the group.
      group_size: K, examples that change together.
      epsilon: ε of the group, to find σ for.
      floor: smallest one-example δ that the textbook lemma may use; 1e-15 is what accountants on
        plain float64 probabilities resolve.
    """
    mechanism = Mechanism(Poisson(probability, iterations), group_size=group_size)
    floor = _check.probability("floor", floor, closed=True)
    given = {"noise_multiplier": noise_multiplier, "epsilon": epsilon, "delta": delta}
    tight = account(mechanism, **given)  # type: ignore[arg-type]
    one = analysis(Mechanism(mechanism.sampling))
    assert isinstance(one, DeterministicAnalysis)
    found = [tight]
    if mechanism.group_size > 1:
        unit = DeterministicUnit(one.profile, one.guess)
        chain = Chain(unit, mechanism.group_size, "one example")
        found.append(_whole(VerifiedAnalysis(mechanism, chain), tight, epsilon))
    forms = get_args(group.Form)
    sigma = tight.noise_multiplier
    if epsilon is None:
        at = one.profile(sigma), mechanism.group_size, delta
        lemma = [group.black_box_epsilon(*at, form=form, floor=floor) for form in forms]
        line = lower_line(*at)
    else:
        to = one.profile, mechanism.group_size, epsilon, delta, sigma
        lemma = [black_box_multiplier(*to, form=form, floor=floor) for form in forms]
        line = one.noise_multiplier(epsilon / mechanism.group_size, delta).noise_multiplier
    for form, value in zip(forms, lemma, strict=True):
        found.append(_made(tight, epsilon, value, f"textbook lemma, {form} form"))
    found.append(_made(tight, epsilon, line, LINE))
    asked = "epsilon" if epsilon is None else "noise_multiplier"
    below = tight.lower_bound or 0.0  # of the mechanism, so of every bound of it

    def bracketed(one: Guarantee) -> Guarantee:
        value = getattr(one, asked)
        other = one.status == "bound" and one is not tight
        return one.with_lower_end(below, value) if other and 0 < below < value else one

    return [bracketed(one) for one in found]


def _whole(whole: VerifiedAnalysis, tight: Guarantee, epsilon: float | None) -> Guarantee:
    """The bound from the whole profile; infinite where there is none, as for the lemma."""
    try:
        if epsilon is None:
            return whole.epsilon(tight.noise_multiplier, tight.delta)
        return whole.noise_multiplier(epsilon, tight.delta)
    except FailureError:
        return _made(tight, epsilon, math.inf, whole.model.method)


def _made(like: Guarantee, epsilon: float | None, value: float, method: str) -> Guarantee:
    """A bound that is ``value`` for what is asked for: ε, or σ where ``epsilon`` is given."""
    proven = math.isfinite(value) and method != LINE
    return Guarantee(
        epsilon=value if epsilon is None else epsilon,
        delta=like.delta,
        noise_multiplier=like.noise_multiplier if epsilon is None else value,
        privacy_unit=like.privacy_unit,
        group_size=like.group_size,
        adjacency=like.adjacency,
        method=method,
        status="bound" if proven else "estimate",
    )
