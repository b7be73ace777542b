"""What all patterns of fresh bins have in common, paid exactly: against all of them written out."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from selection import before_release
from test_fresh_bins import all_patterns, drawn, modes_of, plain_loss

from mfopt._float64 import float64
from mfopt.accounting.monte_carlo import chunked, pattern_common
from mfopt.accounting.monte_carlo import patterns as pattern
from mfopt.accounting.monte_carlo.evidence import Point, Tilt
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLoss
from mfopt.accounting.monte_carlo.hockey import Hockey
from mfopt.sampling import FreshBins
from mfopt.strategies import Banded, BandedToeplitz, TimeScaled

SIGMA, EPSILON = 2.5, 0.7
SCALED = TimeScaled(
    BandedToeplitz(np.array([1.0, 0.6, 0.3])), np.linspace(1, 1.6, 12), np.linspace(1.3, 1, 12)
)


def case(bins=4, epochs=3, rethrow=1, strategy=SCALED):
    """(patterns, every m_k as a column, M)"""
    scheme = FreshBins(bins, epochs, rethrow)
    matrix = np.asarray(strategy.materialize(scheme.iterations))
    patterns = pattern.exact(strategy, scheme)
    return patterns, all_patterns(matrix, scheme), modes_of(matrix, scheme)


CASES = [
    case(),
    pytest.param(*case(strategy=Banded.from_dense(drawn(4, 3, 4), 4)), marks=pytest.mark.ci),
    pytest.param(
        *case(epochs=4, rethrow=2, strategy=Banded.from_dense(drawn(4, 4, 3), 3)),
        marks=pytest.mark.ci,
    ),
]


@pytest.mark.parametrize(("patterns", "every", "modes"), CASES)
def test_the_common_part_is_the_distance_from_the_hull_and_leaves_one_constant(
    patterns, every, modes
):
    rest = pattern_common.split(patterns)
    products = rest.toward @ every
    np.testing.assert_allclose(products, np.sum(rest.parts))
    np.testing.assert_allclose(np.linalg.norm(rest.toward), 1)
    gram = every.T @ every
    # 1/(1ᵀG⁺1), the largest there is; with bins kept for two epochs it is not reached
    largest = 1 / np.sum(np.linalg.pinv(gram, hermitian=True))
    reached = products[0] ** 2 / largest
    assert abs(reached - 1) < 1e-6 if patterns.rethrow == 1 else 0.3 < reached < 1

    left = np.asarray(float64(lambda: rest.noise(jnp.eye(patterns.iterations)))()).copy()
    parts = math.sqrt(pattern_common._SHARE) * np.repeat(rest.parts, patterns.bins)
    np.testing.assert_allclose(left.T @ left, modes.T @ modes - np.outer(parts, parts), atol=1e-12)
    # (2): of patterns one number is missing, the same for all
    chosen = np.linalg.lstsq(modes, every, rcond=None)[0].round(9)  # the bins of each
    common = float(float64(lambda: rest.shift)()) ** 2
    inner = (left @ chosen).T @ (left @ chosen)
    np.testing.assert_allclose(inner, gram - common, atol=1e-7)


@pytest.mark.ci
@pytest.mark.parametrize(("patterns", "every", "modes"), CASES)
def test_the_rest_has_the_likelihood_and_ceilings_of_its_own_patterns(patterns, every, modes):
    rest = pattern_common.split(patterns).scaled(SIGMA)
    shift = float(float64(lambda: rest.shift)())
    along = (1 - pattern_common._LEFT) * np.sum(rest.parts)
    others = every / SIGMA - along * np.asarray(rest.toward)[:, None]
    x = 2 * np.random.default_rng(1).normal(size=(patterns.iterations, 16))
    ratio = float64(lambda power: np.asarray(rest.ratio(rest.noise(jnp.asarray(x.T)), power)))
    exact = plain_loss(others, x, 1.0)
    np.testing.assert_allclose(ratio(1.0), exact, atol=1e-12)
    np.testing.assert_allclose(ratio(1.7), plain_loss(1.7 * others, x, 1.0), atol=1e-12)
    # the control: the constant of throws that are not neighbours left out
    assert np.min(np.abs(ratio(1.0) - shift**2 / 2 - exact)) > 1e-3

    ceilings = FreshBinsLoss(patterns)._ceilings(SIGMA).without(shift**2)
    inner, total = others.T @ others, 0.0
    np.testing.assert_allclose(ceilings.largest_square, np.max(np.diagonal(inner)))
    np.testing.assert_allclose(ceilings.mean_square, np.mean(np.diagonal(inner)))
    np.testing.assert_allclose(ceilings.square_of_mean, np.mean(inner))
    for order in range(1, 4):
        total += np.max(logsumexp(order * inner, axis=0)) - math.log(len(inner))
        assert -1e-10 < ceilings.log_normalizer(order) - total < 0.2
    exact_again = FreshBinsLoss(patterns)._ceilings(SIGMA)
    assert exact_again.common == 0 and ceilings.common == shift**2


@pytest.fixture(scope="module")
def plain():
    """{direction: (H, its standard error)} by plain sampling of the whole, and without payoffs."""
    patterns, every, _ = CASES[0]
    rng = np.random.default_rng(0)
    noise = SIGMA * rng.normal(size=(patterns.iterations, 200_000))
    moved = noise + every[:, rng.integers(0, every.shape[1], noise.shape[1])]
    values = {
        "remove": np.maximum(-np.expm1(EPSILON - plain_loss(every, moved, SIGMA)), 0),
        "add": np.maximum(-np.expm1(EPSILON + plain_loss(every, noise, SIGMA)), 0),
    }
    return {key: (v.mean(), v.std() / math.sqrt(v.size)) for key, v in values.items()}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "order", "direction"),
    before_release(
        [
            ("chain", 2, "remove"),
            ("shift", 0.4, "remove"),
            ("mean", 0.6, "add"),
            ("blocks", 1.5, "add"),
        ],
        0,
    ),
)
def test_what_is_left_and_its_payoff_have_the_mean_of_the_whole(plain, kind, order, direction):
    loss, point = FreshBinsLoss(CASES[0][0]), Point(SIGMA, EPSILON)
    assert isinstance(loss._sampled(point)[2].payoff, Hockey)
    mean, error = plain[direction]

    def seen(sampled):
        tilt = sampled.at(Tilt(kind, order, 0.0), point)
        taken = sampled.pilot(tilt, point, 2**14, chunked.seed_key(3))
        found = math.exp(taken.log_mean)
        return found, found * taken.deviation / math.sqrt(taken.samples), taken.tilt.log_ceiling

    found, spread, ceiling = seen(loss)
    assert abs(found - mean) < 4 * math.hypot(spread, error) < 0.03 * mean
    # not split: the same mean, with a higher ceiling and more spread
    same = FreshBinsLoss(CASES[0][0])
    same.__dict__["_split"] = None
    other, wider, higher = seen(same)
    assert abs(other - mean) < 4 * math.hypot(wider, error)
    assert ceiling < higher and spread < wider
    # the control: a release a tenth too short is paid for
    rest, ceilings, paid = loss._sampled(point)
    wrong = paid._replace(payoff=Hockey(0.9 * paid.payoff.mu))
    loss._sampled = lambda _: (rest, ceilings, wrong)
    assert abs(seen(loss)[0] - mean) > 4 * math.hypot(spread, error)


def test_where_there_is_little_in_common_or_it_cannot_be_solved_for_nothing_is_split():
    patterns = CASES[0][0]
    assert pattern_common.split(patterns) is not None
    columns = np.array(patterns.columns)
    columns[0, 5] = 0.0  # C has no inverse
    gone = pattern.Patterns(columns, patterns.gram, patterns.bins, patterns.rethrow)
    assert pattern_common.split(gone) is None
    # a time scale over six orders: the solution's products are not even to the last digits
    steep = TimeScaled(
        BandedToeplitz(np.array([1.0, 0.99])), np.geomspace(1, 1e-9, 12), np.ones(12)
    )
    found = pattern_common.split(pattern.exact(steep, FreshBins(4, 3)))
    if found is not None:
        products = found.toward @ all_patterns(np.asarray(steep.materialize(12)), FreshBins(4, 3))
        np.testing.assert_allclose(products, np.sum(found.parts), rtol=1e-9)
