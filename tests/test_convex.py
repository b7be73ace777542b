"""Bounds of the add direction, and the tail of values whose logarithm is concave."""

import math

import bench_truth
import numpy as np
import pytest
from scipy.stats import binom, norm
from test_likelihoods import CELLS
from test_shared_component import CASES, EPSILON, SIGMA

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, convex
from mfopt.accounting.monte_carlo.convex import LEVELS, STEP, Cut
from mfopt.accounting.monte_carlo.evidence import HINGE, Point, Trial
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLoss
from mfopt.accounting.monte_carlo.hockey import GaussianPayoff

SAMPLES, BETA = 2**14, 1e-6


@pytest.mark.parametrize("average", [0.0, 1e-3, 0.3, 1.0])
def test_a_count_is_as_small_as_found_with_chance_beta_at_most(average):
    mean = convex.largest_mean(average, SAMPLES, BETA)
    assert average <= mean <= 1
    assert mean == 1 or binom.cdf(average * SAMPLES, SAMPLES, mean) <= BETA * (1 + 1e-9)
    if 0 < average < 1:  # no looser than an exact bound by more than a tenth of the way
        nearer = mean - 0.25 * (mean - average)
        assert binom.cdf(average * SAMPLES, SAMPLES, nearer) > BETA


# spread of a linear loss Y ~ N(−s²/2, s²), ε, payoff, and a part of the tilt that brings it to −ε
LINEAR = [
    (0.7, 1.0, HINGE, 0.0),
    (0.7, 1.0, HINGE, 0.6),
    (2.0, 3.0, HINGE, 1.0),
    (0.05, 2.0, GaussianPayoff(0.5), 0.0),
]
Z = np.linspace(-12, 12, 48_001)
MASS = norm.pdf(Z) * (Z[1] - Z[0])


def excess(values, log_ceiling):
    """E (f/B − 1)₊, and the shares of every level, of log f at the points Z of a normal number."""
    above = MASS @ np.maximum(np.exp(values - log_ceiling) - 1, 0.0)
    levels = log_ceiling - STEP * np.arange(LEVELS)
    return above, np.array([min(MASS @ (values >= level), 1.0) for level in levels])


@pytest.mark.parametrize(("spread", "epsilon", "payoff", "part"), LINEAR)
def test_what_exceeds_the_ceiling_is_bounded(spread, epsilon, payoff, part):
    """Of a loss that is linear in X, by any two levels, and closely where log f is nearly so."""
    t = part * epsilon / spread**2
    linear = spread * Z - t * spread**2
    paid = np.asarray(float64(payoff.log_value)(epsilon + linear - spread**2 / 2))
    values = t * linear + t**2 * spread**2 / 2 + paid
    for multiple in (1.3, 4.0):
        truth, shares = excess(values, math.log(multiple * (MASS @ np.exp(values))))
        for samples in (SAMPLES, 2**34):
            for near in range(1, LEVELS - 5):
                cut = Cut(1.0, near, near + 5)
                assert cut.above(shares, samples, BETA) >= truth * (1 - 1e-6)
        if isinstance(payoff, GaussianPayoff):
            cut = Cut(1.0).placed(shares, 2**34, 2**34, BETA)
            assert cut.above(shares, 2**34, BETA) < 1.3 * truth
    assert Cut(0.0, 1, 2).above(shares, SAMPLES, BETA) == 0
    assert Cut(1.0).above(shares, SAMPLES, BETA) == math.inf  # levels are yet to be chosen


def test_the_tail_of_values_that_are_not_log_concave_is_not_bounded():
    """Control: what the line says then is less than the truth."""
    truth, shares = excess(0.2 * Z**2, 3.0)
    assert 0 < Cut(1.0, 4, 9).above(shares, 2**34, BETA) < 0.7 * truth


@pytest.mark.parametrize("scheme", ["fresh bins", "separated"])
def test_the_bound_is_that_of_the_whole_and_counts_what_the_ceiling_cuts_off(scheme):
    """Beside a shared component and alone; against δ of the whole mixture."""
    if scheme == "separated":
        cell = CELLS[scheme]
        loss, point, (mean, error) = cell.loss, Point(cell.sigma, 0.7), cell.truth["add"]
    else:
        mean, error = bench_truth.mixture(CASES[0][1].T, SIGMA, EPSILON)["add"]
        loss, point = FreshBinsLoss(CASES[0][0]), Point(SIGMA, EPSILON)
    trial = Trial(2**14, BETA, chunked.seed_key(1))
    pilot = loss.choose("add", point, trial)

    def bound(tilt):
        return loss.bound(tilt, point, pilot.log_bound(trial.samples, BETA)[0], trial)

    chosen = bound(pilot.tilt)
    assert mean - 4 * error < chosen.value < 1.1 * mean and chosen.mean < mean + 4 * error
    # control: what is above a ceiling that is too low is missing in the mean, and in no bound
    low = pilot.tilt.lowered(math.log(chosen.ceiling / mean) - pilot.tilt.cut.below + 0.1)
    again = loss.pilot(low, point, trial.samples, chunked.subkey(trial.key, 9))
    shares = np.asarray(again.sums.shares) / again.samples
    placed = low.cut.placed(shares, again.samples, trial.samples, BETA)
    lower = bound(low._replace(detail=placed))
    assert lower.mean < 0.97 * mean and lower.value > mean - 4 * error
