"""ε of a group by the textbook lemma, from one unit's profile or its moments: a baseline."""

import math

import numpy as np
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant

from mfopt._runtime import _check
from mfopt.accounting import solve
from mfopt.accounting.closed_form.group import black_box_log_factor
from mfopt.accounting.profile import Profile

_POINTS = 21  # at which the lemma is tried before its ε is refined
SMALLEST_DELTA = 1e-250  # what the library's own profiles resolve


def black_box_epsilon(
    profile: Profile, group_size: int, delta: float, *, floor: float = 0.0
) -> float:
    """ε of a group by the textbook lemma from the best single point of the one-unit profile.

    A baseline: any mechanism has it, and it is exponential in K. ``floor`` is the smallest δ
    that the one-unit accountant resolves (1e-15 for accountants that work with plain float64
    probabilities); below it nothing is known.

    Args:
      profile: one unit's.
      group_size, delta: K, and δ of the group.
      floor: as above.

    Returns:
      ε, or infinity where the lemma needs a one-unit δ below ``floor``: beyond numerical range,
      and no statement that the privacy loss is infinite.
    """
    target = math.log(_check.probability("delta", delta))
    group_size = _check.integer("group_size", group_size)

    def excess(epsilon: float) -> float:
        return profile.log_delta(epsilon) + black_box_log_factor(epsilon, group_size) - target

    if excess(0.0) <= 0:
        return 0.0
    # nothing is known below the floor, so the search may not pass the ε at which it is reached
    largest = max(profile.epsilon(max(floor, SMALLEST_DELTA)), 1e-8)
    # one unit needs less than δ; past that the left side need not be monotone
    least = min(max(profile.epsilon(delta), 1e-6), largest)
    points = np.linspace(least, largest, _POINTS)
    guess = next((float(point) for point in points if excess(float(point)) <= 0), None)
    if guess is None:
        return math.inf
    each = solve.smallest(excess, guess, name="epsilon", relative=1e-7, largest=largest)
    return group_size * each


def group_epsilon(
    noise_scale: float, probability: float, rounds: int, delta: float, group_size: int
) -> float:
    """ε of a group of K by the textbook lemma, from the moments of one unit.

    One unit's log δ₁ at ε₁ is the least over orders of a line in ε₁, so
    nothing is too small for it. The lemma (:func:`black_box_epsilon`) asks for log δ₁ + (K-1) ε₁ -
    log(1 - e^{-ε₁}) <= log δ; with one order λ > K - 1 the first two terms fall by λ - K + 1 per
    unit of ε₁. The last term is bounded by its value at some smaller ε₁: where the others alone
    meet the target or, if that is at 0, the best of a few. At ε = 0 the lemma asks for K δ₁ <= δ.

    Args:
      noise_scale: z, the noise over the sensitivity of one unit.
      probability: q, chance that a unit takes part in a round.
      rounds, delta, group_size: T, δ of the group, in (0, 1), and K.
    """
    delta = _check.probability("delta", delta)
    size = _check.integer("group_size", group_size)
    rounds = _check.integer("rounds", rounds)
    if probability == 0:
        return 0.0
    orders = np.unique(np.round(np.geomspace(size, 64 * size + 2048, 240)))
    accountant = rdp_privacy_accountant.RdpAccountant(orders + 1)
    event = dp_event.PoissonSampledDpEvent(probability, dp_event.GaussianDpEvent(noise_scale))
    accountant.compose(event, rounds)
    total = accountant.rdp * orders  # log E e^{λ L} of all rounds
    alpha = orders + 1
    at_zero = total + orders * np.log1p(-1 / alpha) - np.log(alpha) - math.log(delta)
    if float(np.min(at_zero)) + math.log(size) <= 0:
        return 0.0
    one = float(np.min(at_zero / (orders - size + 1)))
    least = [one] if one > 0 else np.geomspace(1e-9, 1.0, 91).tolist()

    def found(at: float) -> float:
        return max(float(np.min((at_zero - math.log(-math.expm1(-at))) / (orders - size + 1))), at)

    return size * min(map(found, least))
