"""Monte Carlo accounting against the definition, exact values, and its own proven bounds.

Statistical comparisons use fixed seeds and ``K`` standard errors. Each has a control: the same
comparison with something wrong in it must fail.
"""

import math

import bench_truth
import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import before_release
from test_strategies import EVERY_KIND, dense_modes, every_strategy

from mfopt import strategies as S
from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import betting, chunked, dominating_pair, importance
from mfopt.accounting.monte_carlo import calibrate as calibration
from mfopt.accounting.monte_carlo import design_point as design_points
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Point, Trial, ceiling_alone
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, FixedOrder

K = 4.5
SMALL = BallsInBins(bins=5, epochs=3)
DENSE, BLT, IDENTITY = "dense", "blt", "identity"
EPSILON = 1.0


class Whole(BallsInBinsLoss):
    """Samples all of Y: what modes share is not paid apart (``test_shared_component.py``)."""

    shared = None


def pair_of(kind):
    strategy = every_strategy(SMALL.iterations)[kind]
    return dominating_pair.exact(strategy, SMALL), strategy.materialize(SMALL.iterations)


def design_point(pair, sigma, epsilon, placed=None):
    """(mean, standard error) of a search's sampler, shifts placed at another σ if asked."""
    with jax.enable_x64(True):
        proposal = design_points.placed(pair.gram, placed or sigma, epsilon)
        draws = design_points.draw(chunked.seed_key(2), 2**15, pair.bins)
        terms = design_points.exponents(DominatingPair(*map(jnp.asarray, pair)), proposal, draws)
        log_values = design_points.log_values(terms, math.log(sigma), epsilon)
    antithetic = np.exp(np.asarray(log_values)).reshape(2, -1).mean(axis=0)
    return antithetic.mean(), antithetic.std(ddof=1) / math.sqrt(antithetic.size)


def bound_of(pair, sigma, epsilon, tilt, *, samples, beta, key):
    """A bound whose bet was chosen on a pilot of its own."""
    loss, point = Whole(pair), Point(sigma, epsilon)
    pilot = loss.pilot(tilt, point, min(samples, BallsInBinsLoss.glance), chunked.subkey(key, 0))
    bet, _ = betting.choose(np.asarray(pilot.sums.log_wealth), pilot.samples, samples, beta)
    return loss.bound(tilt, point, bet, Trial(samples, beta, chunked.subkey(key, 1)))


def add_bound(pair, sigma, epsilon, **options):
    """Upper bound of the add direction."""
    return bound_of(pair, sigma, epsilon, pairs.mean_tilt(pair, Point(sigma, epsilon)), **options)


def separate(item, other):
    """Distance of two estimates in standard errors."""
    return abs(item[0] - other[0]) / math.hypot(item[1], other[1])


# --- the dominating pair -------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize("kind", before_release(EVERY_KIND, EVERY_KIND.index("time-scaled")))
def test_pair_is_the_gram_matrix_of_dense_modes(kind):
    pair, matrix = pair_of(kind)
    modes = dense_modes(matrix, SMALL)
    np.testing.assert_allclose(pair.gram, modes.T @ modes, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(pair.factor @ pair.factor.T, modes.T @ modes, rtol=1e-12, atol=1e-12)
    with jax.enable_x64(True):
        loose = law(SMALL).reduced(every_strategy(15)[kind])
    np.testing.assert_allclose(loose.gram, modes.T @ modes, rtol=1e-12, atol=1e-12)
    factor = np.asarray(loose.factor)
    np.testing.assert_allclose(factor @ factor.T, loose.gram, rtol=1e-10, atol=1e-10)


def test_pair_is_refused_where_the_lemma_does_not_hold():
    with pytest.raises(UsageError, match=">= 0"):
        dominating_pair.exact(S.Toeplitz([1.0, -0.1, 0.0]), BallsInBins(3, 1))
    with pytest.raises(UsageError, match="BallsInBins only"):
        dominating_pair.exact(S.Identity(), FixedOrder(3, 1))


# --- estimators against sampling in n dimensions -------------------------------------------------


@pytest.fixture(scope="module", params=before_release([IDENTITY, BLT, DENSE], 1))
def case(request):
    """A pair at a σ where δ is large, and the δ of both directions in n dimensions."""
    pair, matrix = pair_of(request.param)
    sigma = {IDENTITY: 1.2, BLT: 3.5, DENSE: 9.0}[request.param]
    modes = dense_modes(matrix, SMALL).T
    truth = bench_truth.mixture(modes, sigma, EPSILON)
    assert all(1e-3 < mean < 0.5 for mean, _ in truth.values())
    return pair, sigma, truth


def test_design_points_are_unbiased_wherever_they_are_placed(case):
    pair, sigma, truth = case
    actual = design_point(pair, sigma, EPSILON)
    assert separate(actual, truth["remove"]) < K and actual[1] < 0.02 * actual[0]
    assert separate(design_point(pair, sigma, EPSILON, placed=1.2 * sigma), truth["remove"]) < K
    assert separate(design_point(pair, 1.05 * sigma, EPSILON), truth["remove"]) > K


# few shapes, since each number of bins is compiled anew; any non-negative C


# --- known values --------------------------------------------------------------------------------

BIG = BallsInBins(bins=128, epochs=16)
_COLUMN = np.array([1, 0.5, 0.25, 0.125])
KNOWN = {
    "identity": (S.Identity(), 2.7818, 1.551),
    "four bands": (S.BandedToeplitz(_COLUMN / np.linalg.norm(_COLUMN)), 2.8311, 1.7696),
    "banded square root": (S.BandedSquareRoot(16), 4.4815, 3.5732),
    "square root": (S.SquareRoot(), 25.47, 25.45),
}


@pytest.mark.ci
@pytest.mark.parametrize("name", KNOWN)
def test_known_noise_multipliers(name):
    # two independent implementations agree on these to 0.1%
    strategy, remove, add = KNOWN[name]
    pair = dominating_pair.exact(strategy, BIG)
    actual = calibration.calibrate(pair, 2.0, 1e-5, samples=2**13, seed=6, near=1.05 * remove)
    assert actual.value == pytest.approx(remove, rel=0.003) and add < remove


def two_bins():
    """A pair of two unequal, partly overlapping modes, σ, ε, and δ of both directions."""
    matrix = np.array([[1.0, 0.0], [0.7, 1.8]])
    sigma, epsilon = 1.1, 1.0
    pair = dominating_pair.exact(S.Dense(matrix), BallsInBins(bins=2, epochs=1))
    return pair, sigma, epsilon, bench_truth.mixture(matrix.T, sigma, epsilon, accuracy=0.002)


# --- the certificate's bounds --------------------------------------------------------------------


@pytest.mark.ci
def test_bounds_fail_no_more_often_than_stated_and_are_unbiased():
    pair, sigma, epsilon, exact = two_bins()
    tilt = pairs.tilt("chain", 2, pair, Point(sigma, epsilon))
    beta, repetitions = 0.3, 300
    results = {"remove": [], "add": []}
    for seed in range(repetitions):
        key = chunked.seed_key(seed)
        results["remove"].append(
            bound_of(pair, sigma, epsilon, tilt, samples=256, beta=beta, key=key)
        )
        results["add"].append(add_bound(pair, sigma, epsilon, samples=256, beta=beta, key=key))
    for direction, bounds in results.items():
        truth, uncertainty = exact[direction]
        means = np.array([bound.mean for bound in bounds])
        failures = np.mean([bound.value < truth for bound in bounds])
        assert failures <= beta
        assert np.mean(means < truth) > beta  # control: the mean alone is no such bound
        error = math.hypot(means.std(ddof=1) / math.sqrt(repetitions), uncertainty)
        assert abs(means.mean() - truth) < K * error < 0.1 * truth
        # and it is not vacuous
        assert np.median([bound.value for bound in bounds]) < 0.9 * bounds[0].ceiling


def gram_and_factor(seed, scale):
    """A random Gram matrix of five non-negative modes, in noise units."""
    modes = np.random.default_rng(seed).exponential(size=(7, 5)) ** 2
    modes *= scale / np.sqrt(np.mean(np.sum(modes**2, axis=0)))
    factor = np.linalg.qr(modes, mode="r").T
    return factor @ factor.T, factor


@pytest.mark.ci
@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.05, 0.5, 2.0, 8.0]),
    order=st.sampled_from([1, 2, 3, 8, 40, 256]),
    epsilon=st.sampled_from([1e-3, 0.5, 3.0, 20.0]),
)
def test_no_sample_exceeds_the_range_bound(seed, scale, order, epsilon):
    """A block of points above its ceiling would be NaN, and so would be its sum."""
    gram, factor = gram_and_factor(seed, scale)
    pair = dominating_pair.DominatingPair(gram, factor)
    best = pairs.mean_tilt(pair, Point(1.0, epsilon))
    for tilt in (
        pairs.tilt("chain", order, pair, Point(1.0, epsilon)),
        pairs.tilt("shift", order / 3, pair, Point(1.0, epsilon)),
        pairs.tilt("mean", order / 3, pair, Point(1.0, epsilon)),
        pairs.tilt("shift", 0.0, pair, Point(1.0, epsilon)),
        pairs.tilt("mean", 0.0, pair, Point(1.0, epsilon)),
        best,
    ):
        pilot = Whole(pair).pilot(tilt, Point(1.0, epsilon), 2000, chunked.seed_key(seed))
        assert 0 <= pilot.sums.total <= pilot.samples and pilot.sums.square <= pilot.sums.total
        assert np.all(np.isfinite(pilot.sums.log_wealth[1:]))


@pytest.mark.parametrize("kind", before_release(["chain", "shift", "mean"], 2))
def test_a_ceiling_that_does_not_hold_leaves_no_number(kind):
    """Control: a ceiling e^6 times too low is noticed, and no bound is given."""
    gram, factor = gram_and_factor(3, 1.0)
    pair = dominating_pair.DominatingPair(gram, factor)
    order = {"chain": 2, "shift": 1.0, "mean": float(pairs.mean_tilt(pair, Point(1.0, 1.0)).order)}[
        kind
    ]
    good = pairs.tilt(kind, order, pair, Point(1.0, 1.0))
    for shift in (0.0, -6.0):
        tilt = good._replace(log_ceiling=good.log_ceiling + shift)
        trial = Trial(4096, 0.1, chunked.seed_key(0))
        bound = Whole(pair).bound(tilt, Point(1.0, 1.0), 4, trial)
        assert math.isnan(bound.value) == (shift < 0)


def test_the_ceiling_alone_is_a_bound():
    pair = dominating_pair.exact(S.Identity(), SMALL)
    sampled_bound = add_bound(pair, 2.0, 2.0, samples=256, beta=0.1, key=chunked.seed_key(0))
    ceiling_bound = ceiling_alone(pairs.mean_tilt(pair, Point(2.0, 2.0)))
    assert ceiling_bound.samples == 0 < sampled_bound.samples
    assert ceiling_bound.value >= sampled_bound.ceiling >= sampled_bound.value / (1 + 1e-6)


@pytest.mark.parametrize("bins", [1, 8, 131])
def test_a_pick_is_that_of_the_inverse_distribution_function(bins):
    """The same uniform number leads to the same column, whatever is added to a row."""
    size, key = 1000, jax.random.key(3)
    rng = np.random.default_rng(bins)
    exponents = rng.normal(0, 2, (size, bins)) + rng.choice([-400.0, -3.0, 0.0, 500.0], (size, 1))
    exponents[::3, bins // 2 :] -= 2000  # columns of weight 0
    with jax.enable_x64(True):
        chosen, tops, masses = map(np.asarray, importance.pick(exponents, key))
        uniform = np.asarray(jax.random.uniform(key, (size,)))
    weights = np.exp(exponents - exponents.max(axis=1, keepdims=True))
    ends = np.cumsum(weights, axis=1)
    expected = np.minimum(np.sum(ends <= (uniform * ends[:, -1])[:, None], axis=1), bins - 1)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_array_equal(tops, exponents.max(axis=1))
    np.testing.assert_allclose(masses, weights.sum(axis=1), rtol=1e-13)


@pytest.mark.parametrize("probability", [1e-3, 0.02, 0.3, 0.9])
@pytest.mark.parametrize("n", [50, 1000])
def test_the_bound_by_betting_on_coin_flips(probability, n):
    """The law of the number of ones is known, so is the failure rate of every bet."""
    ones = np.arange(n + 1)
    weight = scipy.stats.binom.pmf(ones, n, probability)
    for bet in (0, 4, 12, 20):
        with np.errstate(divide="ignore"):
            wealth = scipy.special.xlog1py(ones, -betting.BETS[bet])
        for beta in (0.3, 0.01):
            bounds = np.array([betting.upper_bound(w, bet, n, beta) for w in wealth])
            assert np.all(np.diff(bounds) > -1e-12)
            assert weight[bounds < probability].sum() <= beta
            # control: without log(1/β), ones alone are no bound
            bounds_one_by_one = np.array([betting.upper_bound(w, bet, n, 1.0) for w in wealth])
            assert bet < 20 or weight[bounds_one_by_one < probability].sum() > 0.3
            # and from below, by sums alone, at about the best bet
            rate = math.sqrt(-2 * math.log(beta) / (n * probability))
            below = np.array([betting.lower_bound(s, s, rate, n, beta) for s in ones])
            assert weight[below > probability].sum() <= beta
            wrong = np.array([betting.lower_bound(s, s, rate, n, 1 / beta) for s in ones])
            assert weight[wrong > probability].sum() > 0.3


@float64
def bet_against(values, beta):
    """Upper bound on the mean of iid values; the first sixteenth is the pilot."""
    cut = len(values) // 16
    first, final = (np.asarray(betting.log_wealth(x)) for x in (values[:cut], values[cut:]))
    bet, remaining = betting.choose(first, cut, len(values) - cut, beta)[0], len(values) - cut
    return min(betting.upper_bound(float(final[bet]), bet, remaining, beta), 1.0)


def test_a_bet_is_chosen_well_and_values_are_bounded():
    values = np.random.default_rng(0).beta(0.02, 20, size=2**16)
    mean, second = values.mean(), np.mean(values**2)
    for beta in (1e-2, 1e-12):
        actual = bet_against(values, beta)
        per_sample = math.log(1 / beta) / len(values)
        assert mean < actual < mean + math.sqrt(2 * second * per_sample) + 1.1 * per_sample
    assert bet_against(np.ones(64), 1e-3) == 1.0
    # a mean above every observed value cannot be excluded: nothing seen in n samples
    nothing = bet_against(np.zeros(1600), 0.05)
    assert nothing == pytest.approx(math.log(20) / 1500, rel=0.01)


# --- machines and memory -------------------------------------------------------------------------


def test_sample_counts_are_rounded_up_never_down():
    size = chunked.chunk_size(SMALL.bins)
    for samples in (1000, size + 1):
        _, used = chunked.total(lambda *_: jnp.ones(()), chunked.seed_key(0), samples, SMALL.bins)
        assert samples <= used < samples + size
