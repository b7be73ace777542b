"""Composed mixtures of Gaussians against dp_accounting, closed forms and direct summation."""

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats
from selection import before_release
from test_accounting_linear import one_round

from mfopt.accounting import Mechanism, account, loss_distribution
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import Composition, distribution
from mfopt.accounting.loss_distribution.mixture import Mixture, Resolution
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.errors import FailureError
from mfopt.sampling import CyclicPoisson, Poisson
from mfopt.strategies import BandedSquareRoot

# dp_accounting 0.6, from_mixture_gaussian_mechanism at value_discretization_interval 1e-4, whose
# self-composition takes a minute in all: (sensitivity law, rounds, σ, δ) -> ε
RECORDED = [
    (Mixture.binomial(1, 0.01), 2000, 1.0, 1e-8, 3.63563225648595),
    (Mixture.binomial(8, 0.01), 2000, 1.0, 1e-3, 25.391004892728695),
    (Mixture.binomial(30, 0.002), 1000, 0.8, 1e-8, 33.52770886764058),
    (Mixture.hypergeometric(4, 20, 1000), 300, 1.5, 1e-3, 3.506746983863663),
    (Mixture.binomial(16, 0.001), 10_000, 1.0, 1e-8, 14.263437097732673),
]


@pytest.mark.parametrize(("mixture", "rounds", "sigma", "delta", "expected"), RECORDED)
def test_epsilon_agrees_with_recorded_dp_accounting(mixture, rounds, sigma, delta, expected):
    profile = RoundsProfile(mixture, rounds, sigma)
    assert profile.epsilon(delta) == pytest.approx(expected, rel=1e-4)
    assert profile.log_delta(expected) == pytest.approx(math.log(delta), rel=2e-4)


def test_accuracy_is_kept_and_only_ever_rounded_up():
    mixture, rounds, sigma = Mixture.binomial(3, 0.02), 500, 1.1
    fine = RoundsProfile(mixture, rounds, sigma, 1e-6).epsilon(1e-6)
    for accuracy in (1e-2, 1e-3, 1e-4):
        epsilon = RoundsProfile(mixture, rounds, sigma, accuracy).epsilon(1e-6)
        assert fine < epsilon < fine * (1 + 1.5 * accuracy)


@pytest.mark.parametrize(
    ("sigma", "delta"), [(9.3364035, 1e-7), (2.6968047, 1e-7), (2.1591756, 1.3e-5), (1.2, 1e-300)]
)
def test_delta_asked_again_at_an_epsilon_is_no_larger(sigma, delta):
    profile = RoundsProfile(Mixture.binomial(1, 1 / 8), 24, sigma)
    epsilon = profile.epsilon(delta)
    assert profile.log_delta(epsilon) <= math.log(delta)
    assert profile.log_delta(epsilon * (1 - 2e-5)) > math.log(delta)  # and not far below


def test_deep_tail_against_exact_convolution():
    """Two rounds of a two-point pair, summed by hand, far below what float sums resolve."""
    step, heavy = 0.5, 1e-120
    loss = np.array([-0.5, 40.0])
    mass = np.array([1 - heavy, heavy])
    part = loss_distribution.from_atoms(step, loss, mass)
    composition = Composition(((part, 2),))
    composed = composition.convolve(composition.tilt_for_epsilon(79.5))
    expected = 2 * math.log(heavy) + math.log(-math.expm1(79.5 - 80.0))
    assert composed.log_delta(79.5) == pytest.approx(expected, rel=1e-9)


def test_discretized_pair_dominates_cell_by_cell_and_keeps_both_masses():
    mixture, sigma = Mixture.binomial(2, 0.3), 0.7
    part = mixture.discretize(sigma, 0.05, Resolution(0.02, -60.0))
    assert part.mass.sum() + part.infinite == pytest.approx(1, abs=1e-12)
    reverse = part.reverse()
    assert reverse.mass.sum() + reverse.infinite == pytest.approx(1, abs=1e-12)
    z = np.linspace(-12, 16, 400_001)
    q = stats.norm.pdf(z)
    ratio = mixture.loss(z, sigma)
    for epsilon in (0.0, 0.31, 1.07, 2.5):
        exact = np.trapezoid(np.maximum(np.exp(ratio) - np.exp(epsilon), 0) * q, z)
        grid = part.mass @ np.maximum(-np.expm1(epsilon - part.losses), 0) + part.infinite
        assert exact - 1e-9 <= grid <= exact + 2e-3


def test_a_lost_tail_is_counted():
    """Control: the same composition without its infinite mass would claim too little."""
    mixture = Mixture.binomial(1, 0.5)
    cut = mixture.discretize(1.0, 0.01, Resolution(0.01, math.log(1e-4)))
    composition = Composition(((cut, 10),))
    tilt = composition.tilt_for_epsilon(8.0)
    exact = RoundsProfile(mixture, 10, 1.0).log_delta(8.0)
    with_tail = composition.convolve(tilt)
    assert with_tail.log_delta(8.0) > exact
    bare = loss_distribution.LossDistribution(cut.step, cut.index, cut.mass, 0.0, 0.0)
    without = Composition(((bare, 10),))
    assert without.convolve(tilt).log_delta(8.0) < exact
    assert with_tail.infinite > 1e-4


def test_sensitivities_that_are_left_out_count_as_infinite_losses():
    mixture, log_tail = Mixture.binomial(30, 0.1), math.log(1e-6)
    lost = mixture.cut(log_tail).missing
    part = mixture.discretize(1.0, 0.01, Resolution(0.01, log_tail))
    assert 1e-8 < lost < 1e-6 and part.infinite >= lost
    assert part.mass.sum() + part.infinite == pytest.approx(1, abs=1e-3 * lost)


def counted(group_size, batch_size, population):
    """log P(h of the group are in the batch) from whole numbers, h = 0, 1, ..."""
    ways = [
        math.comb(group_size, h) * math.comb(population - group_size, batch_size - h)
        for h in range(min(group_size, batch_size) + 1)
    ]
    shares = [Fraction(count, math.comb(population, batch_size)) for count in ways]
    return [math.log(share.numerator) - math.log(share.denominator) for share in shares if share]


@pytest.mark.parametrize(
    ("group_size", "batch_size", "population"),
    [(1, 7, 50), (4, 20, 1000), (9, 3, 40), (30, 35, 60), (40, 500, 3000), (1, 1999, 2000)],
)
def test_weights_of_a_fixed_batch_are_those_counted(group_size, batch_size, population):
    actual = Mixture.hypergeometric(group_size, batch_size, population)
    exact = counted(group_size, batch_size, population)
    np.testing.assert_allclose(actual.log_weights, exact, rtol=1e-12, atol=1e-12)
    assert actual.sensitivities[-1] == min(group_size, batch_size)
    # control: a batch of one more
    other = counted(group_size, batch_size + 1, population)
    size = min(len(other), len(exact))
    assert not np.allclose(other[-size:], exact[-size:], rtol=1e-4)


@pytest.mark.parametrize(("probability", "group_size"), [(0.3, 2), (1e-4, 50), (0.97, 200)])
def test_weights_of_a_group_are_the_binomial_law(probability, group_size):
    p, complement = Fraction(probability), 1 - Fraction(probability)
    exact = [
        math.comb(group_size, h) * p**h * complement ** (group_size - h) for h in range(group_size)
    ]
    exact = [math.log(share.numerator) - math.log(share.denominator) for share in exact]
    actual = Mixture.binomial(group_size, probability).log_weights[:-1]
    np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    ("mixture", "mean"),
    [
        (lambda: Mixture.hypergeometric(1, 10**7, 10**10), 1e-3),
        (lambda: Mixture.hypergeometric(5, 10**9, 10**11), 0.05),
        (lambda: Mixture.hypergeometric(1000, 10**6, 10**9), 1.0),
        (lambda: Mixture.binomial(10**5, 0.01), 1000.0),
    ],
)
def test_weights_of_large_numbers_lose_no_mass(mixture, mean):
    weights = np.exp(mixture().log_weights)
    assert abs(math.fsum(weights) - 1) < 1e-14
    assert mixture().mean == pytest.approx(mean, rel=1e-12)
    assert mixture() == mixture() != Mixture.binomial(1, 0.1)  # what laws are remembered by


def test_weights_that_do_not_add_up_to_1_are_refused():
    shift, weights = np.array([0.0, 1.0]), np.array([0.9, 0.1])
    for factor in (1 - 1e-10, 1 + 1e-10, math.nan):
        with pytest.raises(FailureError, match="add up to"), np.errstate(invalid="ignore"):
            Mixture(shift, np.log(factor * weights))
    # control: what is missing is named, and is an infinite loss
    with_error = Mixture(shift, np.log((1 - 1e-5) * weights), 1e-5)
    part = with_error.discretize(1.0, 0.01, Resolution(0.01, -60.0))
    assert part.infinite >= 1e-5


def test_what_the_window_loses_and_infinite_losses_are_added():
    part = Mixture.binomial(1, 0.1).discretize(1.0, 0.01, Resolution(0.01, -60.0))
    composition = Composition(((part, 10),))
    composed = composition.convolve(composition.tilt_for_epsilon(6.0))
    log_delta = math.exp(composed.log_delta(6.0))
    for extra in ({"log_lost": math.log(1e-3)}, {"infinite": 1e-3}):
        with_it = math.exp(dataclasses.replace(composed, **extra).log_delta(6.0))
        assert with_it == pytest.approx(log_delta + 1e-3, rel=1e-6)
    unsure = dataclasses.replace(composed, rounding=1e-3)
    assert unsure.log_delta(6.0) > composed.log_delta(6.0)
    assert unsure.log_delta_below(6.0) < composed.log_delta_below(6.0)


def test_window_rejects_epsilons_it_does_not_cover():
    part = Mixture.binomial(1, 0.1).discretize(1.0, 0.01, Resolution(0.01, -60.0))
    composition = Composition(((part, 1000),))
    composed = composition.convolve(composition.tilt_for_epsilon(12.0))
    below = composed.step * composed.start - 0.5
    assert composed.log_delta(below) == 0.0
    assert composed.log_delta(12.0) < -1
    # nor where all that the window holds is next to nothing, and would say that δ is
    scale = composed.log_scale - 1000.0
    faint = dataclasses.replace(composed, log_scale=scale, log_lost=-math.inf, infinite=0.0)
    assert faint.log_delta(below) == 0.0
    assert faint.log_delta(12.0) == pytest.approx(composed.log_delta(12.0) - 1000.0)


def test_the_larger_direction_is_the_answer_whichever_it_is(monkeypatch):
    """Removing seems to be the larger always; nothing here may rest on that."""
    values = {"remove": -9.0, "add": -7.0}
    item = Mixture.binomial(1, 0.1).discretize(1.0, 0.01, Resolution(0.01, -60.0))
    part = Composition(((item, 10),))

    class Profile(RoundsProfile):
        def _log_delta(self, epsilon, direction):
            return values[direction] + 1 - epsilon, part

    profile = Profile(Mixture.binomial(1, 0.5), 10, 0.5)
    for shown in (False, True):  # by Chernoff's bound alone
        monkeypatch.setattr(loss_distribution.rounds, "_no_larger", lambda *_, shown=shown: shown)
        values.update(remove=-9.0, add=-7.0)
        assert profile.log_delta(1.0) == (-9.0 if shown else -7.0)
        values.update(remove=-1.5, add=-1.1)
        epsilon = profile.epsilon(math.exp(-1.2))
        assert epsilon == pytest.approx(0.7 if shown else 1.1, rel=2e-5)
        values.update(remove=-1.9, add=-2.5)
        assert profile.log_delta(1.0) == -1.9


def test_nothing_sampled_is_nothing_lost():
    profile = RoundsProfile(Mixture.binomial(5, 0.0), 100, 1.0)
    assert profile.log_delta(0.0) == -math.inf and profile.epsilon(1e-9) == 0


def test_overwhelming_noise_needs_no_grid():
    """Below the distance of the two laws ε is 0, as it is where hardly anybody takes part."""
    for probability, rounds, sigma in ((0.01, 1000, 1e6), (1e-8, 10_000, 0.9)):
        profile = RoundsProfile(Mixture.binomial(1, probability), rounds, sigma)
        assert profile.epsilon(1e-5) == 0.0 and profile.log_chance > math.log(1e-5)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("probability", "sigma"), [(1e-6, 0.4), (0.001, 1.3), (0.003, 0.7), (0.3, 2.0), (0.9, 1)]
)
def test_bracket_holds_the_closed_form_of_one_round(probability, sigma, direction):
    mixture = Mixture.binomial(1, probability)
    profile = RoundsProfile(mixture, 1, sigma)
    for epsilon in (1e-3, 0.1, 1.0, 5.0):
        exact = one_round(probability, sigma, epsilon)[direction == "add"]
        if exact < -600:
            continue
        law = profile._law(direction, -690.0)
        below = profile._below(epsilon, law, exact).log_delta_below(epsilon)
        assert below - 1e-9 <= exact <= profile.log_delta(epsilon, direction) + 1e-9
        assert profile.log_delta(epsilon, direction) - below < 1e-2


@pytest.mark.parametrize(
    ("probability", "rounds", "sigma"),
    before_release([(1e-4, 10**7, 0.6), (1e-4, 10**7, 1.0), (0.01, 10**6, 8.0)], 0, 2),
)
def test_both_ends_of_millions_of_rounds_meet(probability, rounds, sigma):
    """Where most losses are at the edge of their law, a grid that is shifted at random drops a
    share of P in every round, of which millions of rounds leave nothing."""
    profile = RoundsProfile(Mixture.binomial(1, probability), rounds, sigma)
    epsilon = profile.epsilon(1e-5)
    assert epsilon * (1 - 1e-3) < profile.epsilon_below(1e-5, epsilon) < epsilon


def test_points_of_a_sparse_grid_are_on_the_grid_and_cover_it():
    index = distribution._sparse_index(-5000, 100_000, 16)
    assert index[0] <= -5000 and index[-1] >= 100_000
    gaps = np.diff(index)
    assert np.all(gaps[np.abs(index[:-1]) < 15] == 1) and np.all(gaps & (gaps - 1) == 0)
    assert np.all(gaps <= 2 + np.abs(index[:-1]) / 8)


def test_rounds_whose_losses_are_all_beyond_floats_have_no_lower_bound():
    profile = RoundsProfile(Mixture.binomial(1, 0.3), 100, 1e-6)
    with pytest.raises(FailureError, match="beyond numerical range"):
        profile.log_delta_below(1.0)
    guarantee = account(Mechanism(Poisson(0.3, 100)), noise_multiplier=1e-6, epsilon=1.0)
    assert guarantee.delta == 1.0


@pytest.mark.parametrize(
    ("probability", "group_size", "rounds"), [(0.99828338257786, 25, 73), (0.9, 2, 1)]
)
def test_the_chance_of_taking_part_may_be_1_to_rounding(probability, group_size, rounds):
    # 0.00172^25 is far below the rounding of 1
    mixture = Mixture.binomial(group_size, probability)
    expected = -math.expm1(rounds * group_size * math.log1p(-probability))
    assert expected - 1e-15 <= math.exp(RoundsProfile(mixture, rounds, 1.0).log_chance) <= 1
    assert math.exp(RoundsProfile(mixture, rounds, 1.0).log_chance) <= expected + 1e-12


@pytest.mark.parametrize("group_size", [1, 3])
@pytest.mark.parametrize("question", [{"delta": 1e-5}, {"epsilon": 1.0}])
def test_what_is_in_every_batch_is_one_gaussian_release(group_size, question):
    """A σ was called a bound, and a search's accuracy above the closed form."""
    guarantee = account(
        Mechanism(Poisson(1.0, 40), group_size=group_size), noise_multiplier=20.0, **question
    )
    mu = group_size * math.sqrt(40) / 20
    want = (
        gaussian.epsilon(mu, 1e-5) if "delta" in question else math.exp(gaussian.log_delta(mu, 1.0))
    )
    assert (guarantee.epsilon if "delta" in question else guarantee.delta) == pytest.approx(
        want, rel=1e-11
    )
    assert guarantee.status == "exact" and "closed form" in guarantee.method
    sigma = account(Mechanism(Poisson(1.0, 40), group_size=group_size), epsilon=1.0, delta=1e-5)
    lowest = group_size * math.sqrt(40) / gaussian.largest_mu(1.0, 1e-5)
    assert sigma.noise_multiplier == pytest.approx(lowest, rel=1e-11)
    assert sigma.status == "exact"


def test_a_group_that_is_always_drawn_is_not_accounted_as_one_unit():
    """Of a banded C the closed form is one unit's: a group goes through its whole profile."""
    sqrt = BandedSquareRoot(2)
    guarantee, three = (
        account(
            Mechanism(CyclicPoisson(1.0, 2, 40), sqrt, group_size),
            noise_multiplier=20.0,
            delta=1e-5,
        )
        for group_size in (1, 3)
    )
    assert three.epsilon > 2.5 * guarantee.epsilon


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("question", [{"noise_multiplier": 0.5}, {"epsilon": 8.0}])
def test_lower_ends_take_finer_grids_while_they_narrow_the_bracket(group_size, question):
    """ε at σ = 0.5 was called a bound: its lower end was 0.8% below."""
    mechanism = Mechanism(Poisson(0.01, 2000), group_size=group_size)
    guarantee = account(mechanism, delta=1e-6, **question)
    low, high = guarantee.details["bracket"]
    assert guarantee.status == "exact" and high * (1 - 1e-3) <= low <= high
    if "noise_multiplier" in question:  # the truth, by grids that are a hundred times finer
        profile = RoundsProfile(Mixture.binomial(group_size, 0.01), 2000, 0.5, 2e-7)
        assert low <= profile.epsilon(1e-6) <= high
