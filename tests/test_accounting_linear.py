"""Much noise, small ε and δ: bounds against exact values of one round, and the Gaussian limit."""

import math

import mpmath
import numpy as np
import pytest
import scipy
from selection import before_release

from mfopt import strategies
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.closed_form.linear import NearlyLinear
from mfopt.accounting.loss_distribution.allocation import AllocationProfile, linear_part
from mfopt.accounting.loss_distribution.mixture import Mixture
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.sampling import BallsInBins, FixedBatch, FreshBins, Poisson


def call(root, threshold):
    """E (X - t)₊ of X = e^(root z - root²/2), a mean of 1: Black and Scholes."""
    if threshold <= 0:
        return 1 - threshold
    d = (-mpmath.log(threshold) + root**2 / 2) / root
    return mpmath.ncdf(d) - threshold * mpmath.ncdf(d - root)


def one_round(probability, sigma, epsilon):
    """log δ(ε) of one Poisson-sampled round by 50 digits: (remove, add)."""
    with mpmath.workdps(50):
        p, root, alpha = mpmath.mpf(probability), 1 / mpmath.mpf(sigma), mpmath.exp(epsilon)
        remove = p * call(root, (alpha - 1 + p) / p)
        threshold = (1 / alpha - 1 + p) / p
        # puts by parity: E (t - X)₊ = E (X - t)₊ + t - 1
        add = alpha * p * (call(root, threshold) + threshold - 1) if threshold > 0 else 0
        return float(mpmath.log(remove)), float(mpmath.log(add))


def two_bins(gram, epsilon):
    """δ(ε) of one unit in one of two orthogonal modes, the larger direction: a mean over one X."""
    with mpmath.workdps(40):
        root, alpha = mpmath.sqrt(gram), mpmath.exp(epsilon)

        def mean(value):
            nodes = mpmath.linspace(-9, 9, 13)
            return mpmath.quad(
                lambda z: value(mpmath.exp(root * z - root**2 / 2)) * mpmath.npdf(z), nodes
            )

        remove = mean(lambda x: call(root, 2 * alpha - x)) / 2
        below = mean(lambda x: call(root, 2 / alpha - x) + 2 / alpha - x - 1)
        return float(mpmath.log(max(remove, alpha * below / 2)))


@pytest.mark.parametrize("probability", [0.5, 0.01])
@pytest.mark.parametrize("sigma", [10.0, 1e3, 1e6, 1e12, 1e14])
@pytest.mark.parametrize("deviations", [0.0, 1e-3, 1.0, 3.0])
def test_bounds_hold_an_exact_round_between_them(probability, sigma, deviations):
    epsilon = deviations * probability / sigma
    truth = max(one_round(probability, sigma, epsilon))
    mixture = Mixture.binomial(1, probability)
    linear = NearlyLinear.of_rounds([(1, *mixture.linear(sigma))])
    assert linear.log_delta_below(epsilon) <= truth + 1e-12
    assert truth <= linear.log_delta(epsilon)
    if deviations <= 1:
        gap = linear.log_delta(epsilon) - linear.log_delta_below(epsilon)
        assert gap < 20 / sigma + 1e-10
    profile = RoundsProfile(mixture, 1, sigma)
    assert profile.log_delta_below(epsilon) <= truth + 1e-12
    # grids are planned for a rise of 1e-3, by estimates of what they add
    assert truth <= profile.log_delta(epsilon) <= truth + 2e-3


@pytest.mark.parametrize(
    ("probability", "rounds", "deviation"), [(1e-3, 10**6, 1e-6), (1e-6, 10**9, 1e-8)]
)
def test_lower_bounds_of_many_rounds_stay_below_the_upper(probability, rounds, deviation):
    """Grids lost the losses of single rounds to rounding: of 10⁹ a "lower" bound was 50 times too
    high at 1e-8, and an ε 0.6% too small at 1e-6."""
    profile = RoundsProfile(
        Mixture.binomial(1, probability), rounds, probability * math.sqrt(rounds) / deviation
    )
    above, below = profile.log_delta(deviation), profile.log_delta_below(deviation)
    assert below <= above <= below + 1e-3
    delta = math.exp(below)
    assert profile.epsilon_below(delta) <= profile.epsilon(delta)
    assert profile.epsilon(delta) == pytest.approx(deviation, rel=1e-3)


def test_a_smaller_remainder_would_be_no_bound():
    """Control: the linear part alone is not enough where Λ is far from linear."""
    variance, excess = Mixture.binomial(1, 0.01).linear(1.5)
    whole = NearlyLinear.of_rounds([(1, variance, excess)])
    epsilon = 4 * whole.deviation
    truth = max(one_round(0.01, 1.5, epsilon))
    assert truth <= whole.log_delta(epsilon)
    assert NearlyLinear(whole.deviation, whole.rest / 100).log_delta(epsilon) < truth


@pytest.mark.ci
@pytest.mark.parametrize(("sigma", "deviations"), [(3.0, 1.0), (1e2, 3.0), (1e6, 0.0)])
def test_bins_hold_the_truth_between_their_bounds(sigma, deviations):
    gram = sigma**-2
    epsilon = deviations * math.sqrt(gram / 2)
    truth = two_bins(gram, epsilon)
    profile = AllocationProfile(2, gram)
    assert profile.log_delta_below(epsilon) <= truth <= profile.log_delta(epsilon)
    assert profile.log_delta(epsilon) <= truth + 1e-3
    linear = NearlyLinear.of_rounds([(1, *linear_part(2, gram))])
    assert linear.log_delta_below(epsilon) <= truth <= linear.log_delta(epsilon)


@pytest.mark.parametrize(
    ("scheme", "deviation"),
    [
        (Poisson(0.01, 10_000), 1.0),
        (Poisson(1e-3, 10**6), 1.0),
        (BallsInBins(32, 4), 8**-0.5),
        (BallsInBins(4096, 4), 32**-1),
        (FreshBins(32, 4), 8**-0.5),
    ],
)
@pytest.mark.parametrize("delta", before_release([1e-5, 1e-10], 1))
def test_a_small_epsilon_needs_no_more_noise_than_the_gaussian_limit(scheme, deviation, delta):
    """σ was twice that at ε = 1e-9: the grid added to δ what it may add to a larger ε."""
    guarantee = account(Mechanism(scheme), epsilon=1e-9, delta=delta)
    limit = deviation / gaussian.largest_mu(1e-9, delta)
    assert guarantee.noise_multiplier == pytest.approx(limit, rel=5e-4)
    assert guarantee.status == "exact"


def test_many_bins_of_independent_noise_are_accounted():
    """The sum over 40,000 bins needed too wide a window, and was refused."""
    mechanism = Mechanism(BallsInBins(40_000, 1))
    delta = account(mechanism, noise_multiplier=0.42, epsilon=2).delta
    plain = math.exp(gaussian.log_delta(1 / 0.42, 2))
    log_delta = math.exp(
        gaussian.log_delta(1 / 0.42, 2 + math.log(40_000))
    )  # others only add to it
    assert log_delta < delta < plain / 1000


def test_what_no_grid_covers_has_the_bound_that_holds_anyway(monkeypatch):
    monkeypatch.setattr("mfopt.accounting.loss_distribution.convolution.LARGEST_WINDOW", 1)
    mechanism = Mechanism(BallsInBins(40, 1))
    guarantee = account(mechanism, noise_multiplier=1.0, epsilon=2)
    assert guarantee.delta == pytest.approx(math.exp(gaussian.log_delta(1.0, 2)), rel=1e-9)
    assert guarantee.status == "bound" and "no amplification" in guarantee.method


def test_hardly_any_noise_is_answered_without_a_word():
    mechanism = Mechanism(Poisson(0.01, 2000))  # a warning would be an error
    guarantee = account(mechanism, noise_multiplier=1e-6, delta=1e-6)
    assert math.isfinite(guarantee.epsilon) and guarantee.epsilon > 1e11


def test_a_spacing_beyond_floats_takes_mass_away_only():
    from mfopt.accounting.loss_distribution import distribution

    mass_p, mass_q = np.array([0.2, 0.3, 0.5]), np.array([0.7, 0.29, 0.01])
    actual = distribution.from_below(1e4, mass_p, mass_q)  # a warning would be an error
    assert 0 < actual.mass.sum() + actual.infinite <= 1


TWO_BANDS = strategies.BandedToeplitz([1.0, 0.5])
FAINT = {
    "poisson": Mechanism(Poisson(0.01, 2000)),
    "fixed batches": Mechanism(FixedBatch(50, 1000, 40), adjacency="replace"),
    "balls in bins": Mechanism(BallsInBins(40, 1)),
    "balls in bins of two bands": Mechanism(BallsInBins(4, 1), TWO_BANDS),
    "fresh bins": Mechanism(FreshBins(8, 2)),
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "epsilon"), [*((name, 1e300) for name in FAINT), ("poisson", 1e6)]
)
def test_a_delta_below_all_floats_is_rounded_up(name, epsilon):
    """0 was printed, and called exact."""
    guarantee = account(FAINT[name], noise_multiplier=1.0, epsilon=epsilon)
    assert 0 < guarantee.delta < 1e-300 and guarantee.status == "bound"


@pytest.mark.parametrize("epsilon", [2e3, 1e4, 1e6])
def test_a_probability_below_all_floats_does_not_raise_a_lower_bound(epsilon):
    """Q-mass that underflows was taken for none, and P's mass for an infinite loss: e^-706."""
    profile = RoundsProfile(Mixture.binomial(1, 0.01), 2000, 1.0)
    # j of the rounds, a Gaussian mechanism of mean √j each: the chance of j times its δ, at most
    j = np.arange(1, 2001)
    chance = scipy.stats.binom.logpmf(j, 2000, 0.01)
    ceiling = scipy.special.logsumexp(
        chance + [gaussian.log_delta(math.sqrt(square), epsilon) for square in j]
    )
    assert profile.log_delta_below(epsilon) <= ceiling < -706
