"""Groups under balls-in-bins: values with a proven ceiling, against oracles and exact limits."""

import math

import bin_counts
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from selection import before_release

from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.monte_carlo import balls_in_bins, chunked, count_mixture, group
from mfopt.accounting.monte_carlo.count_mixture import CountPair
from mfopt.accounting.monte_carlo.evidence import Point, Trial
from mfopt.accounting.verify import Engine
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins
from mfopt.strategies import BandedToeplitz

KEY = chunked.seed_key(5)
PAIR = CountPair(8, 3, 4.0)


@float64
def test_the_loss_is_the_coefficient_of_the_polynomial():
    a = 0.8 * np.random.default_rng(1).standard_normal((20, 8))
    base = jnp.asarray(count_mixture._base(PAIR, 2.5)[0])
    state = jnp.eye(4)[:, :1] * jnp.ones(20), jnp.zeros(20)
    for i in range(8):
        state = count_mixture._times(state, jnp.asarray(a[:, i]), base)[0]
    mine = jnp.log(state[0][-1]) + state[1] + count_mixture._log_constant(PAIR)
    oracle = bin_counts.log_ratio(a, 4.0 / 2.5**2, 3)
    np.testing.assert_allclose(mine, oracle, rtol=1e-12, atol=1e-12)


def test_the_chance_of_a_total_lies_below_its_bound():
    """(4): q <= e^-s I0(s), with q = R/(c Π F) from the exact coefficient."""
    rng = np.random.default_rng(2)
    base, root = count_mixture._base(PAIR, 1.3)
    for scale in (0.3, 2.0, 6.0):
        # around where the mean total is K
        z = 0.5 * root + 0.4 + scale * rng.standard_normal((50, PAIR.bins))
        level, spread = count_mixture._one_bin(base, root, z.ravel())
        level, spread = (part.reshape(z.shape).sum(axis=1) for part in (level, spread))
        ratio = bin_counts.log_ratio(root * z, root**2, 3)
        log_q = ratio - count_mixture._log_constant(PAIR) - level
        bound = np.log(special.i0e(spread))
        assert np.all(log_q <= bound + 1e-12)
        assert not np.all(log_q <= bound - 0.5)  # and it says something


def test_draws_within_a_cell_follow_its_law(monkeypatch):
    monkeypatch.setattr(count_mixture, "CELLS", 4)  # so wide that where one draws in them counts
    point = Point(1.5, 2.0)  # of no other test: tables are kept
    exact = bin_counts.estimate(8, 3, 4.0 / 1.5**2, 2.0, direction="remove", seed=3)
    tilt = count_mixture.tilt(PAIR, "remove", 1.0, point)
    pilot = count_mixture.pilot(PAIR, tilt, point, 2**17, KEY)
    error = math.hypot(
        pilot.deviation / math.sqrt(pilot.samples), exact.standard_error / exact.value
    )
    assert error < 0.01
    assert abs(pilot.log_mean - math.log(exact.value)) < 4 * error


def test_counts_that_weigh_more_than_floats_hold_have_a_ceiling():
    """Many units in few bins, and some in one bin under little noise."""
    for pair, position in [
        (CountPair(512, 8, 2.2), Point(0.2, 48.0)),
        (CountPair(8, 50, 1.0), Point(0.43, 7300.0)),
        (CountPair(8, 300, 1.0), Point(200.0, 1.0)),
    ]:
        assert math.isfinite(count_mixture.least(pair, "remove", position).log_ceiling)
    # of Σ_j x^j/j! to the power b: b^K/K!
    actual = count_mixture._log_power(-special.gammaln(np.arange(301) + 1), 8, 300)
    assert actual == pytest.approx(300 * math.log(8) - math.lgamma(301), rel=1e-12)


def test_fewer_samples_are_drawn_where_each_takes_long():
    easy, hard = (group.CountLoss(CountPair(bins, 4, 1.0)) for bins in (64, 1024))
    assert easy.least_samples == 2**13 and hard.least_samples == 2**11
    assert hard.affordable(64) == 256  # and no fewer


def plane(pair, sigma, epsilon):
    """(H(P, Q), H(Q, P)) of two bins by sums over a fine grid of z."""
    z, cell = np.linspace(-9, 9 + 3 * pair.group_size, 401, retstep=True)
    abscissa, two = np.meshgrid(z, z, indexing="ij")
    g, k = pair.squared_norm / sigma**2, pair.group_size
    exponents = np.stack([abscissa.ravel(), two.ravel()], axis=1) * math.sqrt(g)
    loss = bin_counts.log_ratio(exponents, g, k)
    plain = np.exp(-0.5 * (abscissa**2 + two**2)).ravel() / (2 * math.pi) * cell**2
    remove, add = (np.maximum(-np.expm1(epsilon - sign * loss), 0) for sign in (1, -1))
    return float(plain @ (np.exp(loss) * remove)), float(plain @ add)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("pair", "limit"),
    before_release(
        [
            (CountPair(2, 3, 1.0), None),
            (CountPair(2, 4, 2.0, 3e-3), None),  # A leaves much out
            (CountPair(2, 4, 2.0), 2),  # and so do the counts that are sampled
        ],
        0,
    ),
)
def test_two_bins_by_quadrature(pair, limit, monkeypatch):
    """Every part of the bound against a number: what is sampled, left out, and both directions."""
    sigma, epsilon = 1.5, 0.8
    exact = dict(zip(("remove", "add"), plane(pair, sigma, epsilon), strict=True))
    if limit is not None:
        monkeypatch.setattr(CountPair, "most", limit)
    aside = pair.left_out + 2 * pair.faint
    for direction, truth in exact.items():
        tilt = count_mixture.least(pair, direction, Point(sigma, epsilon))
        pilot = count_mixture.pilot(pair, tilt, Point(sigma, epsilon), 2**13, KEY)
        mean, error = math.exp(pilot.log_mean), 4 * pilot.deviation / math.sqrt(pilot.samples)
        assert truth <= math.exp(tilt.log_ceiling) + aside
        bet, _ = pilot.expected(2**13, 1e-4)
        bound = count_mixture.bound(
            pair, tilt, Point(sigma, epsilon), bet, Trial(2**13, 1e-4, chunked.seed_key(9))
        )
        if direction == "remove":
            assert mean * (1 - error) <= truth <= mean * (1 + error) + aside
        elif limit is None:
            assert abs(mean / truth - 1) < error
        assert truth <= bound.value


def test_groups_whose_pilots_take_long_are_bounded_without_samples(monkeypatch):
    costly, short_run, small = (
        Mechanism(BallsInBins(bins, 1), group_size=2) for bins in (6554, 6553, 300)
    )
    assert balls_in_bins.is_costly(costly) and not balls_in_bins.is_costly(short_run)
    monkeypatch.setattr(balls_in_bins, "_MOST", 1)
    monkeypatch.setattr(balls_in_bins, "model", None)  # a model that is sampled fails
    assert account(small, noise_multiplier=4.0, delta=1e-6).status == "bound"


def test_overlaps_that_do_not_fit_are_refused_before_they_are_made():
    mechanism = Mechanism(BallsInBins(10**6, 1), BandedToeplitz([1.0, 0.5]), 2)
    for question in (
        balls_in_bins.whole_profile,
        lambda one: account(one, epsilon=1.0, delta=1e-6),
    ):
        with pytest.raises(UsageError, match="bins"):
            question(mechanism)


@pytest.mark.release
def test_groups_of_independent_noise_are_near_the_exact_mixture():
    """σ for (ε, δ): above the exact mixture's, and near it, where the profile's bound is not."""
    guarantee = account(
        Mechanism(BallsInBins(8, 4), group_size=3),
        epsilon=2.0,
        delta=1e-3,
        seed=9,
        samples=2**14,
    )
    sigma = guarantee.noise_multiplier
    below, estimate = (
        bin_counts.estimate(8, 3, 4.0 / s**2, 2.0, samples=2**20, seed=1)
        for s in (0.9 * sigma, sigma)
    )
    assert (
        estimate.value - 4 * estimate.standard_error < 1e-3 < below.value + 4 * below.standard_error
    )
    # all three are asked; which is the least differs from case to case
    assert guarantee.group_size == 3 and len(guarantee.details["least_of"]) == 3


@pytest.mark.release
def test_a_moment_below_the_smallest_float_is_a_moment():
    pair = CountPair(4, 8, 1.0)
    for lowest in (0.5, 3.0, 1e3):
        actual = count_mixture._lower_tail(pair, np.array([0.0, 1.0]), np.array([0.0, lowest]))
        assert 0 < actual <= 4 * lowest  # there is never less than that
    mechanism = Mechanism(BallsInBins(4, 1), group_size=8)
    answer = account(mechanism, noise_multiplier=30.0, delta=1e-6, seed=1, certify=False)
    assert 0 < answer.epsilon < gaussian.epsilon(8 / 30, 1e-6)


@pytest.mark.ci
def test_nothing_is_certified_that_cannot_be_below_what_is_known(monkeypatch):
    mechanism = Mechanism(BallsInBins(8, 2), group_size=3)
    model = group.model(mechanism)
    whole = Engine(model, seed=0).epsilon(3.0, 1e-5)
    monkeypatch.setattr(type(model), "bounds", None)  # a test that is made fails
    value = whole.estimate.value * 1.0001
    for reference in (value, 0.9 * value):
        free = Engine(model, seed=0, known=reference).epsilon(3.0, 1e-5)
        assert free.method != whole.method and free.epsilon > whole.epsilon
    with pytest.raises(TypeError):
        Engine(model, seed=0, known=2 * value).epsilon(3.0, 1e-5)
