"""What all modes have in common, paid exactly: the split, its payoff, both against the whole."""

import math

import jax
import numpy as np
import pytest
import scipy
from selection import few
from test_strategies import every_strategy

from mfopt import strategies as S
from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, common_part, dominating_pair, tilted
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Pilot, Point
from mfopt.accounting.monte_carlo.hockey import Hockey
from mfopt.sampling import BallsInBins

K = 4.5
SCHEME = BallsInBins(bins=5, epochs=3)


def pair_of(kind="blt"):
    return dominating_pair.exact(every_strategy(SCHEME.iterations)[kind], SCHEME)


def seen(pair, point, tilt, samples=2**16, seed=0):
    """(mean, its standard error)"""
    found = Pilot(tilt, *tilted.total(pair, tilt, point, samples, chunked.seed_key(seed)))
    mean = math.exp(found.log_mean)
    return mean, mean * found.deviation / math.sqrt(found.samples)


@pytest.mark.parametrize("mu", [0.05, 0.4, 3.0])
def test_the_hockey_stick_of_a_gaussian(mu):
    """By numerical integration of E (1 − e^(t−Y))₊, Y ~ N(μ²/2, μ²)."""
    stick = Hockey(mu)
    for t in np.array([-3.0, 0.0, 1.0, 4.0, 8.0]) * mu:
        start = (t - mu**2 / 2) / mu  # where Y = t, in standard deviations

        def density(u, t=t, start=start):
            z = start + u
            return -math.expm1(-mu * u) * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

        expected = scipy.integrate.quad(density, 0, max(-start, 0) + 12, epsabs=0, limit=200)[0]
        value = float(float64(stick.log_value)(t))
        assert math.log(expected) <= value + 1e-12 and value == pytest.approx(
            math.log(expected), abs=1e-8
        )
    assert np.isnan(float(float64(stick.log_value)(np.nan)))


def test_the_hockey_stick_past_twenty_standard_deviations():
    """Where the series takes over: against Mills' ratio by its continued fraction."""

    def mills(x):
        tail = 0.0
        for k in range(200, 0, -1):
            tail = k / (x + tail)
        return 1 / (x + tail)

    mu = 0.5
    for x in (15.0, 19.9, 20.1, 25.0, 60.0):
        t = mu * (x + mu / 2)
        expected = -(x**2) / 2 - math.log(2 * math.pi) / 2 + math.log(mills(x) - mills(x + mu))
        value = float(float64(Hockey(mu).log_value)(t))
        assert value == pytest.approx(expected, abs=1e-8) and value >= expected


@pytest.mark.parametrize("mu", few([1e-3, 0.3, 5.0], 1))
def test_its_peak_is_the_largest_value_and_no_more(mu):
    for order in (0.3, 1.0, 9.0, 80.0):
        peak = Hockey(mu).log_peak(order)
        around = mu**2 * (order + 0.5) + (60 * mu + 3) * np.linspace(-1, 1, 400_001)
        values = order * around + np.asarray(float64(Hockey(mu).log_value)(around))
        assert values.max() <= peak + 1e-12 and peak == pytest.approx(values.max(), abs=1e-4)
    assert Hockey(mu).log_peak(0.0) == 0


@pytest.mark.parametrize("kind", ["blt", "dense", "identity"])
def test_the_two_parts_are_the_whole(kind):
    pair = pair_of(kind)
    found = common_part.split(pair)
    whole = found.rest.gram + found.shift**2
    np.testing.assert_allclose(whole, pair.gram, rtol=0, atol=1e-9 * pair.gram.max())
    np.testing.assert_allclose(
        found.rest.factor @ found.rest.factor.T, found.rest.gram, atol=1e-9 * pair.gram.max()
    )
    assert np.linalg.eigvalsh(found.rest.gram).min() > 0
    # the largest common part: any larger one leaves no Gram matrix
    more = pair.gram - 1.01 * found.shift**2 / common_part._SHARE
    assert np.linalg.eigvalsh(more).min() < 0


@pytest.mark.parametrize("kind", few(["chain", "shift", "mean"], 2))
def test_both_ways_have_one_mean(kind):
    """With and without the split, both directions; control: a shift 5% off."""
    pair = pair_of()
    sigma, epsilon = 1.2 * math.sqrt(pair.gram.max()), 0.5
    parts = common_part.split(pair)
    point = Point(sigma, epsilon)
    order = {"chain": 2, "shift": 1.0, "mean": 1.5}[kind]
    with jax.enable_x64(True):
        whole = seen(pair, point, tilted.tilt(kind, order, pair, point))

        def apart(shift):
            beside = point._replace(payoff=Hockey(shift / sigma))
            return seen(parts.rest, beside, tilted.tilt(kind, order, parts.rest, beside), seed=1)

        split, off = apart(parts.shift), apart(1.05 * parts.shift)
    assert abs(split[0] - whole[0]) < K * math.hypot(split[1], whole[1])
    assert abs(off[0] - whole[0]) > K * math.hypot(off[1], whole[1])
    assert split[1] < whole[1]


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_a_loss_and_the_whole_have_one_mean(direction):
    pair = pair_of()
    point = Point(1.2 * math.sqrt(pair.gram.max()), 0.5)
    loss = BallsInBinsLoss(pair)
    with jax.enable_x64(True):
        tilts = tilted.remove_tilts if direction == "remove" else tilted.mean_tilt
        tilt = tilts(pair, point)
        whole = seen(pair, point, tilt[0] if direction == "remove" else tilt, samples=2**17)
        found = loss.pilot(loss.least(direction, point), point, 2**17, chunked.seed_key(3))
    mean = math.exp(found.log_mean)
    error = mean * found.deviation / math.sqrt(found.samples)
    assert abs(mean - whole[0]) < K * math.hypot(error, whole[1]) < 0.02 * mean


def test_the_ceiling_of_a_loss_falls():
    strategy = S.BLT(np.array([0.3, 0.2]), np.array([0.95, 0.5]))
    pair = dominating_pair.exact(strategy, BallsInBins(bins=16, epochs=4))
    sigma = 0.6 * math.sqrt(pair.gram.max())
    point = Point(sigma, 2.0)
    with jax.enable_x64(True):
        for direction, tilts in (
            ("remove", tilted.remove_tilts(pair, point)),
            ("add", [tilted.mean_tilt(pair, point)]),
        ):
            loss = BallsInBinsLoss(pair)
            least = loss.least(direction, point)
            assert least.log_ceiling < tilts[0].log_ceiling - 0.3
            assert loss.at(least, point).log_ceiling == pytest.approx(least.log_ceiling, rel=1e-12)


def test_a_companion_is_paid_with_the_whole():
    """δ₂ of a table takes all of Y: nothing is paid twice."""
    from mfopt.accounting.monte_carlo import composition

    pair = pair_of()
    stick = composition.HockeyStick.of(composition.gaussian(1.3))
    point = Point(1.0, 1.0, stick)
    found, at = BallsInBinsLoss(pair)._sampled(point)
    assert found.gram is not common_part.split(pair).rest.gram and at.payoff is stick
    np.testing.assert_array_equal(found.gram, pair.gram)


def test_where_nothing_is_in_common_all_is_sampled():
    # a mode that is nearly 0 has next to nothing in common with any other
    for gram in (np.diag([1.0, 1e-5]), np.eye(2000)):
        pair = DominatingPair(gram, np.sqrt(gram))
        assert common_part.split(pair) is None
        point = Point(1.0, 1.0)
        assert BallsInBinsLoss(pair)._sampled(point)[1] is point
    # twice the same mode: no inverse to find the largest common part by
    assert common_part.split(DominatingPair(np.ones((2, 2)), np.ones((2, 1)))) is None
    # two modes that differ by rounding: what comes out is either even or not taken
    gram = np.array([[1.0, 1.0], [1.0, 1 + 1e-15]])
    factor = np.array([[1.0, 0.0], [1.0, math.sqrt(1e-15)]])
    found = common_part.split(DominatingPair(gram, factor))
    assert found is None or found.shift**2 <= 1 + 1e-9
