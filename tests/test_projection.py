"""Laws of a shift along one direction: against enumeration, and δ of it against quadrature."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mfopt.accounting import projection
from mfopt.accounting.closed_form import gaussian
from mfopt.sampling import BMinSep

RNG = np.random.default_rng(5)


def exact(shifts, weights, sigma, epsilon):
    """H(P, Q) of the mixture of N(a_k, σ²) against N(0, σ²), by sums over a fine grid."""
    x = np.linspace(-12 * sigma, max(shifts) + 12 * sigma, 6_001)
    top = sum(w * stats.norm.pdf(x, a, sigma) for a, w in zip(shifts, weights, strict=True))
    above = np.maximum(top - math.exp(epsilon) * stats.norm.pdf(x, 0, sigma), 0)
    return float(np.sum(above) * (x[1] - x[0]))


def compared(law, shifts, weights, loses):
    for sigma, epsilon in itertools.product((0.5, 2.0, 8.0), (0.0, 0.5, 3.0)):
        truth = exact(shifts, weights, sigma, epsilon)
        below = math.exp(law.profile(sigma).log_delta_below(epsilon))
        assert below <= truth * (1 + 1e-5) + 1e-30
        if truth > 1e-5:
            assert below > truth * (1 - loses)


@pytest.mark.parametrize("units", [1, 2])
def test_a_sum_of_choices(units):
    choices = [RNG.uniform(0.2, 1.0, 3), RNG.uniform(0.2, 1.0, 3)]
    law = projection.of_sum(choices).of_group(units)
    assert np.sum(law.weights) == pytest.approx(1.0, abs=1e-12)
    picks = list(itertools.product(*(choices * units)))
    compared(law, [sum(pick) for pick in picks], [1 / len(picks)] * len(picks), 0.1)


@pytest.mark.parametrize("separation", [1, 2, 3])
def test_separated_steps(separation):
    scheme, shifts = BMinSep(4, 2, separation), RNG.uniform(0.5, 1.0, 8)
    p = scheme.probability
    law = projection.of_separated(shifts, separation, p)
    assert np.sum(law.weights) == pytest.approx(1.0, abs=1e-12)
    weights = {}

    def walk(step, chance, total):
        if step >= 8:
            weights[total] = weights.get(total, 0.0) + chance
        else:
            walk(step + 1, chance * (1 - p), total)
            walk(step + separation, chance * p, total + shifts[step])

    start = 1 + (separation - 1) * p
    for first in range(separation):
        walk(first, (p if first else 1.0) / start, 0.0)
    compared(law, [*weights], [*weights.values()], 0.1)


def test_one_shift_is_a_gaussian_release():
    law = projection.of_sum([np.array([0.7])])
    profile = law.profile(0.5)
    for epsilon in (0.0, 1.0, 20.0):
        actual, truth = profile.log_delta_below(epsilon), gaussian.log_delta(1.4, epsilon)
        assert truth - 1e-3 < actual <= truth
    assert profile.epsilon_below(1e-5) == pytest.approx(gaussian.epsilon(1.4, 1e-5), rel=1e-5)
    assert profile.epsilon_below(0.99) == 0.0


def test_large_groups_stay_on_small_grids():
    law = projection.of_sum([np.ones(8)] * 4).of_group(1000)
    assert law.weights.size < 2**12 and np.sum(law.weights) == pytest.approx(1.0, abs=1e-9)
    mean = float(np.arange(law.weights.size) @ law.weights) * law.cell
    assert 0.9 * 4000 < mean <= 4000
