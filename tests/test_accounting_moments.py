"""The moments accountant against McMahan et al. 2018; the filter of Chua et al. 2024."""

import math

import pytest
import scipy
from fedavg import PRINTED, ROUNDS
from privacy_unit import compare
from scipy.stats import norm

from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import moments
from mfopt.errors import UsageError
from mfopt.sampling import Poisson

# Table 2: σ of the average, S, users, expected users a round -> ε after 5000 rounds, δ = 1e-9
TABLE_2 = [
    (0.003, 15, 763_430, 5000, 4.634),
    (0.006, 10, 763_430, 1667, 2.314),
    (0.012, 15, 763_430, 1250, 2.038),
    (0.003, 15, 1e8, 5000, 1.152),
    (0.006, 10, 1e8, 1667, 0.991),
    (0.012, 15, 1e8, 1250, 0.987),
]


@pytest.mark.parametrize("row", PRINTED)
def test_table_1_to_its_printed_digits(row):
    users, sample, z = row
    for rounds, printed in zip(ROUNDS, PRINTED[row], strict=True):
        epsilon = moments.epsilon(z, sample / users, rounds, users**-1.1)
        assert epsilon == pytest.approx(printed, abs=0.0051)


@pytest.mark.parametrize("row", TABLE_2)
def test_table_2_to_its_printed_digits(row):
    deviation, clip, users, sample, printed = row
    z = deviation / (clip / sample)  # of the average of all that a round expects
    assert z == pytest.approx(1.0, abs=3e-4)
    epsilon = moments.epsilon(z, sample / users, 5000, 1e-9)
    assert epsilon == pytest.approx(printed, abs=0.0011)


@pytest.mark.parametrize(("users", "sample", "rounds"), [(1e5, 1e2, 10**4), (1e6, 1e4, 10**3)])
def test_todays_account_of_the_same_mechanism_is_smaller(users, sample, rounds):
    """Direction of the difference: privacy loss distributions are below the published ε."""
    delta, q = users**-1.1, sample / users
    published = moments.epsilon(1.0, q, rounds, delta)
    tight = account(Mechanism(Poisson(q, rounds)), noise_multiplier=1.0, delta=delta).epsilon
    assert tight < 0.8 * published


@pytest.mark.parametrize(("z", "q"), [(1.0, 0.01), (0.7, 0.3), (4.0, 1.0)])
@pytest.mark.parametrize("order", [1, 4, 16])
def test_moments_are_those_of_the_sampled_gaussian_by_quadrature(z, q, order):
    def integrand(x):
        loss = scipy.special.logsumexp([0.0, (x - 0.5) / z**2], b=[1 - q, q])
        return math.exp(norm.logpdf(x, scale=z) + (order + 1) * loss)

    ends, peaks = (-12 * z, order + 1 + 12 * z), (0, order + 1)
    moment = math.log(scipy.integrate.quad(integrand, *ends, limit=500, points=peaks)[0])
    assert moments.log_moments(z, q)[order - 1] == pytest.approx(moment, rel=1e-7, abs=1e-9)


def test_nobody_is_sampled_and_nothing_is_lost():
    assert moments.epsilon(1.0, 0.0, 10, 1e-6) == 0
    assert account(Mechanism(Poisson(0.0, 10)), noise_multiplier=1.0, delta=1e-6).epsilon == 0


def test_third_of_three():
    forward = moments.fedavg(1.1, 0.01, 1000, delta=1e-6)
    back = moments.fedavg(None, 0.01, 1000, delta=1e-6, epsilon_target=forward.epsilon)
    assert back.noise_multiplier == pytest.approx(1.1, rel=1e-6)
    assert back.noise_multiplier >= 1.1 * (1 - 1e-9)
    delta = moments.fedavg(1.1, 0.01, 1000, epsilon_target=forward.epsilon).delta
    assert delta == pytest.approx(1e-6, rel=1e-6)


def test_filter_noise_follows_the_published_formula():
    epsilon, delta, iterations, users = 3.0, 1e-6, 50, 1000
    compared = compare(epsilon, delta, iterations, users, user_batch=100)
    sigma = compared.filter_multiplier
    expected = math.sqrt(8 * math.log(math.exp(3) * 50 / 1e-6)) * sigma / 1000
    assert compared.filter_noise_per_threshold == pytest.approx(expected)
    assert compared.plain_noise == compared.plain_multiplier / 100
    # noise proportional to τ: the break-even is where the two are equal
    break_even = compared.break_even
    assert compared.ratio(break_even) == pytest.approx(1)
    assert compared.ratio(0.5 * break_even) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: moments.epsilon(0.0, 0.1, 10, 1e-5),
        lambda: moments.epsilon(1.0, 1.5, 10, 1e-5),
        lambda: moments.epsilon(1.0, 0.1, 0, 1e-5),
        lambda: moments.epsilon(1.0, 0.1, 10, 0.0),
        lambda: moments.epsilon(math.nan, 0.1, 10, 1e-5),
        lambda: moments.fedavg(1.0, 0.1, 10),
        lambda: moments.fedavg(1.0, 0.1, 10, delta=1e-5, epsilon_target=2.0),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(UsageError):
        call()
