"""Bounds of the add direction by samples that are not shifted, and the tail of a convex loss."""

import math

import numpy as np
import plain_monte_carlo
import pytest
import scipy
from scipy.stats import binom, norm
from test_shared_component import CASES, EPSILON, SIGMA

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, convex
from mfopt.accounting.monte_carlo.evidence import Point, Sums, Trial
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLoss
from mfopt.accounting.monte_carlo.hockey import GaussianPayoff

POINT = Point(1.0, 2.0, GaussianPayoff(0.5))
SAMPLES, BETA = 2**14, 1e-6


def losses(below, inside, mean, square):
    """Sums of SAMPLES losses with these averages, of "plain"."""
    return Sums(0.0, 0.0, 0.0, SAMPLES * np.array([below, inside, mean, square]))


@pytest.mark.parametrize("average", [0.0, 1e-3, 0.3, 1.0])
def test_a_count_is_as_small_as_found_with_chance_beta_at_most(average):
    mean = convex._largest_mean(average, SAMPLES, BETA)
    assert average <= mean <= 1
    assert mean == 1 or binom.cdf(average * SAMPLES, SAMPLES, mean) <= BETA * (1 + 1e-9)
    if 0 < average < 1:  # no looser than an exact bound by more than a tenth of the way
        nearer = mean - 0.25 * (mean - average)
        assert binom.cdf(average * SAMPLES, SAMPLES, nearer) > BETA


def test_what_exceeds_the_ceiling_of_a_linear_loss_is_bounded_closely():
    """Y' is linear in X: the line is the truth, as integrated, but for what counts leave open."""
    spread = 0.05
    exact = losses(0.0, 0.0, -(spread**2) / 2, spread**2 + spread**4 / 4)
    placed = convex.cut(exact, SAMPLES, POINT)
    levels = np.array(placed.detail)
    quantiles = (levels + spread**2 / 2) / spread
    recorded = losses(*norm.cdf(quantiles[1:]), 0.0, 0.0)
    tilt, remainder = convex.with_tail(placed, recorded, SAMPLES, BETA)
    ceiling = math.exp(placed.log_ceiling)

    def above(z):
        value = float(float64(POINT.payoff.log_value)(POINT.epsilon - spread**2 / 2 + spread * z))
        return norm.pdf(z) * max(math.exp(value) - ceiling, 0.0)

    truth = scipy.integrate.quad(above, quantiles[0] - 12, quantiles[0], epsabs=0)[0]
    assert 0 < truth <= tilt.outside < 6 * truth and 0.95 * BETA < remainder < BETA
    # of counts that are known exactly it is the truth's tangent: no less than the truth
    large = recorded._replace(losses=recorded.losses * 2**40)
    assert truth <= convex.with_tail(placed, large, SAMPLES * 2**40, BETA)[0].outside < 2 * truth
    # levels that nothing tells apart bound nothing
    assert convex.with_tail(placed, losses(0.5, 0.5, 0, 0), SAMPLES, BETA)[0].outside == math.inf


def test_the_bound_is_that_of_the_whole_and_counts_what_the_ceiling_cuts_off():
    """Against plain sampling of P and Q; the control leaves out what is above a low ceiling."""
    mean, error = plain_monte_carlo.mixture(CASES[0][1].T, SIGMA, EPSILON)["add"]
    loss, point = FreshBinsLoss(CASES[0][0]), Point(SIGMA, EPSILON)
    trial = Trial(2**14, BETA, chunked.seed_key(1))
    pilot = loss.choose("add", point, trial)
    assert pilot.tilt.kind == convex.KIND and pilot.tilt.outside < 0.02 * mean

    def bound(tilt):
        bet, _ = pilot.log_bound(trial.samples, BETA)
        return loss.bound(tilt, point, bet, trial)

    convex_bound = bound(pilot.tilt)
    assert (
        mean - 4 * error < convex_bound.value < 1.1 * mean and convex_bound.mean < mean + 4 * error
    )
    levels = pilot.tilt.detail
    middle = levels.low + 0.7 * (levels.high - levels.low)
    low = convex.Levels(middle, middle, 2 * levels.high)
    cut = bound(convex.placed(2.0, low, loss._sampled(point)[2]))
    assert cut.mean < 0.97 * mean and cut.value > mean - 4 * error
