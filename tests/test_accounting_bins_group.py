"""Groups under balls-in-bins: values with a proven ceiling, against oracles and exact limits."""

import math

import bench_truth
import numpy as np
import pytest
from scipy import special
from selection import before_release

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


def exact(pair):
    """Modes of all ways that the group may fall, and their chances."""
    (law,) = bench_truth.laws(BallsInBins(pair.bins, 1), pair.group_size)
    return math.sqrt(pair.squared_norm) * np.array([*law]), np.array([*law.values()])


def test_the_chance_of_a_total_lies_below_its_bound():
    """(4): q <= e^-s I0(s), with q = R/(c Π F) from the exact coefficient."""
    rng = np.random.default_rng(2)
    base, root = count_mixture._base(PAIR, 1.3)
    for scale in (0.3, 2.0, 6.0):
        # around where the mean total is K
        z = 0.5 * root + 0.4 + scale * rng.standard_normal((50, PAIR.bins))
        level, spread = count_mixture._one_bin(base, root, z.ravel())
        level, spread = (part.reshape(z.shape).sum(axis=1) for part in (level, spread))
        modes, chances = exact(PAIR)
        ratio, _ = bench_truth.log_density(z, (modes / 1.3, np.log(chances)))
        log_q = ratio - count_mixture._log_constant(PAIR) - level
        bound = np.log(special.i0e(spread))
        assert np.all(log_q <= bound + 1e-12)
        assert not np.all(log_q <= bound - 0.5)  # and it says something


def test_draws_within_a_cell_follow_its_law(monkeypatch):
    monkeypatch.setattr(count_mixture, "CELLS", 4)  # so wide that where one draws in them counts
    point = Point(1.5, 2.0)  # of no other test: tables are kept
    modes, chances = exact(PAIR)
    truth, uncertainty = bench_truth.mixture(modes, 1.5, 2.0, chances)["remove"]
    tilt = count_mixture.tilt(PAIR, "remove", 1.0, point)
    pilot = count_mixture.pilot(PAIR, tilt, point, 2**17, KEY)
    error = math.hypot(pilot.deviation / math.sqrt(pilot.samples), uncertainty / truth)
    assert error < 0.01
    assert abs(pilot.log_mean - math.log(truth)) < 4 * error


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
def test_two_bins_against_the_truth(pair, limit, monkeypatch):
    """Every part of the bound against a number: what is sampled, left out, and both directions."""
    sigma, epsilon = 1.5, 0.8
    modes, chances = exact(pair)
    truths = bench_truth.mixture(modes, sigma, epsilon, chances, accuracy=0.002)
    if limit is not None:
        monkeypatch.setattr(CountPair, "most", limit)
    aside = pair.left_out + 2 * pair.faint
    for direction, (truth, uncertainty) in truths.items():
        tilt = count_mixture.least(pair, direction, Point(sigma, epsilon))
        pilot = count_mixture.pilot(pair, tilt, Point(sigma, epsilon), 2**13, KEY)
        spread = pilot.deviation / math.sqrt(pilot.samples)
        mean, error = math.exp(pilot.log_mean), 4 * math.hypot(spread, uncertainty / truth)
        least = truth - 4 * uncertainty
        assert least <= math.exp(tilt.log_ceiling) + aside
        bet, _ = pilot.expected(2**13, 1e-4)
        bound = count_mixture.bound(
            pair, tilt, Point(sigma, epsilon), bet, Trial(2**13, 1e-4, chunked.seed_key(9))
        )
        if direction == "remove":
            assert mean * (1 - error) <= truth <= mean * (1 + error) + aside
        elif limit is None:
            assert abs(mean / truth - 1) < error
        assert least <= bound.value


def test_groups_whose_pilots_take_long_are_bounded_without_samples():
    costly, fast = (Mechanism(BallsInBins(bins, 1), group_size=2) for bins in (6554, 6553))
    assert balls_in_bins.is_costly(costly) and not balls_in_bins.is_costly(fast)
    assert account(costly, noise_multiplier=4.0, delta=1e-6).status == "bound"


def test_overlaps_that_do_not_fit_are_refused_before_they_are_made():
    mechanism = Mechanism(BallsInBins(10**6, 1), BandedToeplitz([1.0, 0.5]), 2)
    for question in (
        balls_in_bins.whole_profile,
        lambda one: account(one, epsilon=1.0, delta=1e-6),
    ):
        with pytest.raises(UsageError, match="bins"):
            question(mechanism)


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
