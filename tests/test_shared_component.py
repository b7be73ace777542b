"""The Gaussian component that all patterns share, paid exactly: its payoff, both schemes."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy
from selection import before_release
from test_fresh_bins import all_patterns
from test_likelihoods import banded, modes_of
from test_strategies import every_strategy

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import (
    composition,
    dominating_pair,
    kept_bins,
    likelihood,
)
from mfopt.accounting.monte_carlo import patterns as pattern
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.accounting.monte_carlo.hockey import GaussianPayoff
from mfopt.accounting.monte_carlo.kept_bins import KeptBins
from mfopt.accounting.monte_carlo.likelihood import Residual
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import Banded, BandedToeplitz, TimeScaled

K = 4.5
SCHEME = BallsInBins(bins=5, epochs=3)


def pair_of(kind="blt"):
    return dominating_pair.exact(every_strategy(SCHEME.iterations)[kind], SCHEME)


@pytest.mark.parametrize("mu", [0.05, 0.4, 3.0])
def test_the_hockey_stick_of_a_gaussian(mu):
    """By numerical integration of E (1 − e^(t−Y))₊, Y ~ N(μ²/2, μ²)."""
    stick = GaussianPayoff(mu)
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
        value = float(float64(GaussianPayoff(mu).log_value)(t))
        assert value == pytest.approx(expected, abs=1e-8) and value >= expected


@pytest.mark.parametrize("mu", before_release([1e-3, 0.3, 5.0], 1))
def test_its_peak_is_the_largest_value_and_no_more(mu):
    for order in (0.3, 1.0, 9.0, 80.0):
        peak = GaussianPayoff(mu).log_peak(order)
        around = mu**2 * (order + 0.5) + (60 * mu + 3) * np.linspace(-1, 1, 400_001)
        values = order * around + np.asarray(float64(GaussianPayoff(mu).log_value)(around))
        assert values.max() <= peak + 1e-12 and peak == pytest.approx(values.max(), abs=1e-4)
    assert GaussianPayoff(mu).log_peak(0.0) == 0


@pytest.mark.parametrize("kind", ["blt", "dense", "identity"])
def test_the_component_of_kept_bins_and_the_rest_are_the_whole(kind):
    pair = pair_of(kind)
    component = kept_bins.shared(pair)
    residual = Residual(KeptBins(*pair), component)
    remainder = np.asarray(float64(lambda: residual.noise(jnp.eye(pair.bins)))())
    whole = remainder.T @ remainder + component.shift**2
    np.testing.assert_allclose(whole, pair.gram, rtol=0, atol=1e-9 * pair.gram.max())
    # the largest component: any larger one leaves no Gram matrix
    gram = pair.gram - 1.01 * component.length**2
    assert np.linalg.eigvalsh(gram).min() < 0


def test_a_companion_is_paid_with_the_whole():
    """δ₂ of a table takes all of Y: nothing is paid twice."""
    stick = composition.HockeyStick.of_composition(composition.gaussian(1.3))
    point = Point(1.0, 1.0, stick)
    actual, limits, position = BallsInBinsLoss(pair_of())._sampled(point)
    assert isinstance(actual, KeptBins) and position.payoff is stick and limits.common == 0


def test_where_nothing_is_in_common_all_is_sampled():
    # a mode that is nearly 0 has next to nothing in common with any other
    for gram in (np.diag([1.0, 1e-5]), np.eye(2000)):
        pair = DominatingPair(gram, np.sqrt(gram))
        assert kept_bins.shared(pair) is None
        point = Point(1.0, 1.0)
        assert BallsInBinsLoss(pair)._sampled(point)[2] is point
    # twice the same mode: no inverse to find the largest common part by
    assert kept_bins.shared(DominatingPair(np.ones((2, 2)), np.ones((2, 2)) / 2**0.5)) is None
    # two modes that differ by rounding: what comes out is either even or not taken
    gram = np.array([[1.0, 1.0], [1.0, 1 + 1e-15]])
    factor = np.array([[1.0, 0.0], [1.0, math.sqrt(1e-15)]])
    component = kept_bins.shared(DominatingPair(gram, factor))
    assert component is None or component.shift**2 <= 1 + 1e-9


# --- patterns of bins that are assigned anew -----------------------------------------------------

SIGMA, EPSILON = 2.5, 0.7
SCALED = TimeScaled(
    BandedToeplitz([1.0, 0.6, 0.3]), np.linspace(1, 1.6, 12), np.linspace(1.3, 1, 12)
)


def case(bins=4, epochs=3, rethrow=1, strategy=SCALED):
    """(patterns, every m_k as a column, M)"""
    scheme = FreshBins(bins, epochs, rethrow)
    matrix = strategy.materialize(scheme.iterations)
    patterns = FreshBinsLaw(scheme).exact(strategy)
    return patterns, all_patterns(matrix, scheme), modes_of(matrix, scheme)


CASES = [
    case(),
    pytest.param(*case(strategy=Banded.from_dense(banded(12, 4), 4)), marks=pytest.mark.ci),
    pytest.param(
        *case(epochs=4, rethrow=2, strategy=Banded.from_dense(banded(16, 3), 3)),
        marks=pytest.mark.ci,
    ),
]


@pytest.mark.parametrize(("patterns", "all_modes", "modes"), CASES)
def test_the_common_part_is_the_distance_from_the_hull_and_leaves_one_constant(
    patterns, all_modes, modes
):
    shared = pattern.shared(patterns)
    residual = Residual(patterns, shared)
    products = shared.toward @ all_modes
    np.testing.assert_allclose(products, shared.length)
    np.testing.assert_allclose(np.linalg.norm(shared.toward), 1)
    gram = all_modes.T @ all_modes
    # 1/(1ᵀG⁺1), the largest there is; with bins kept for two epochs it is not reached
    largest = 1 / np.sum(np.linalg.pinv(gram, hermitian=True))
    reached = products[0] ** 2 / largest
    assert abs(reached - 1) < 1e-6 if patterns.rethrow == 1 else 0.3 < reached < 1

    remainder = np.asarray(float64(lambda: residual.noise(jnp.eye(patterns.dimension)))()).copy()
    parts = math.sqrt(likelihood._PART) * shared.parts
    np.testing.assert_allclose(
        remainder.T @ remainder, modes.T @ modes - np.outer(parts, parts), atol=1e-12
    )
    # (2): of patterns one number is missing, the same for all
    chosen = np.linalg.lstsq(modes, all_modes, rcond=None)[0].round(9)  # the bins of each
    common = shared.shift**2
    inner = (remainder @ chosen).T @ (remainder @ chosen)
    np.testing.assert_allclose(inner, gram - common, atol=1e-7)


def test_where_there_is_little_in_common_or_it_cannot_be_solved_for_nothing_is_split():
    patterns = CASES[0][0]
    assert pattern.shared(patterns) is not None
    columns = np.array(patterns.columns)
    columns[0, 5] = 0.0  # C has no inverse
    gone = pattern.Patterns(columns, patterns.gram, patterns.bins, patterns.rethrow)
    assert pattern.shared(gone) is None
    # a time scale over six orders: the solution's products are not even to the last digits
    steep = TimeScaled(BandedToeplitz([1.0, 0.99]), np.geomspace(1, 1e-9, 12), np.ones(12))
    component = pattern.shared(FreshBinsLaw(FreshBins(4, 3)).exact(steep))
    if component is not None:
        products = component.toward @ all_patterns(steep.materialize(12), FreshBins(4, 3))
        np.testing.assert_allclose(products, component.length, rtol=1e-9)


def test_the_best_component_is_found_where_the_inverse_grows():
    """D is singular to rounding. Conjugate gradients reach the same."""
    doubling = FreshBinsLaw(FreshBins(2, 16)).exact(BandedToeplitz([1.0, 2.0]))
    assert pattern.shared(doubling).length ** 2 == pytest.approx(62.527866, rel=1e-6)


def test_of_many_epochs_neighbours_count_together():
    """Of all 1024 apart it is 575.873."""
    long = FreshBinsLaw(FreshBins(4, 1024)).exact(BandedToeplitz([1.0, 0.5]))
    assert pattern.shared(long).length ** 2 == pytest.approx(575.864, abs=0.001)
