"""Fresh bins: scheme, likelihood, ceilings and estimators against all patterns written out."""

import functools
import math

import bench_truth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_likelihoods import banded
from test_strategies import EVERY_KIND, every_strategy

from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import (
    band,
    likelihood,
    pattern_ceilings,
)
from mfopt.accounting.monte_carlo.calibrate import calibrate
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw, FreshBinsLoss
from mfopt.accounting.monte_carlo.pattern_ceilings import ceilings
from mfopt.accounting.monte_carlo.protocol import SampledLaw
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.accounting.verify import Engine
from mfopt.errors import UsageError
from mfopt.optimize import kinds, objective
from mfopt.sampling import FreshBins
from mfopt.strategies import BLT, Banded, BandedSquareRoot, BandedToeplitz, TimeScaled
from mfopt.training import attack
from mfopt.workloads import PrefixSums

SIGMA = 1.3


def all_patterns(matrix, scheme):
    """Every m_k as a column, (n, b^K)."""
    (law,) = bench_truth.laws(scheme, 1)
    return matrix @ np.array([*law]).T


def test_a_product_over_tiles_and_its_gradient_are_those_of_the_overlaps():
    """Of 36 columns, which tiles of 17 bands cut twice."""
    searched, coefs = FreshBinsLaw(FreshBins(18, 2)), 0.7 ** np.arange(17)
    slope = np.random.default_rng(0).normal(size=(17, 36))

    @float64
    def pair(product):
        value = lambda x: product(slope, BandedToeplitz(x))  # noqa: E731
        return jax.value_and_grad(value)(jnp.asarray(coefs))

    expected = pair(functools.partial(SampledLaw.product, searched))
    jax.tree.map(np.testing.assert_allclose, pair(searched.product), expected)


def loss_of(bands, bins, epochs):
    matrix = Banded.from_dense(banded(bins * epochs, bands), bands)
    return FreshBinsLaw(FreshBins(bins, epochs)).loss(matrix)


@pytest.mark.release
def test_a_group_is_not_answered_loosely():
    """4 units have ε = 23.5, 2 in many bins 3.1 where many more samples say 2.9."""
    c = BandedToeplitz([1.0, 0.5, 0.25])
    for scheme, units, limit in ((FreshBins(16, 16), 4, 24.2), (FreshBins(128, 16), 2, 3.3)):
        guarantee = account(
            Mechanism(scheme, c, group_size=units), noise_multiplier=2.0, delta=1e-5
        )
        assert guarantee.status == "certified" and guarantee.epsilon < limit


def test_chords_bound_what_is_not_found(monkeypatch):
    """Every R_l against the chords: never below, and by little. Control: a concave R_l."""
    scaled = loss_of(4, 6, 4).likelihood.scaled(SIGMA)
    sparse, collected = ceilings(scaled), []

    def entry(log_largest):
        collected.append(log_largest)
        return likelihood.summed(log_largest)

    monkeypatch.setattr(pattern_ceilings, "summed", entry)
    ceilings(scaled)
    (log_largest,), orders = collected, range(1, 41)
    exact = np.cumsum([log_largest(l) for l in orders])
    participated = np.array([sparse.chain("chain", l)[0] for l in orders])
    assert np.all(participated >= exact * (1 - 1e-12)) and np.all(participated <= exact + 0.05)
    assert np.all(participated[:8] == exact[:8])
    concave = likelihood.summed(math.sqrt)
    assert concave(9)[0] < sum(map(math.sqrt, range(1, 10)))


@pytest.mark.release
def test_a_large_epsilon_has_the_sigma_of_other_seeds():
    """Where one proposal for all σ serves at none, and a ceiling falls more slowly than δ."""
    scheme, c = FreshBins(16, 8), BandedSquareRoot(4)
    model = OneUnit(FreshBinsLaw(scheme).loss(c))
    sigma = Engine(model, 1).noise_multiplier(64.0, 1e-4)
    assert sigma.method == model.method and sigma.noise_multiplier < 0.36


def test_more_bands_than_bins_negative_entries_and_subclasses_are_refused():
    scheme, blt = FreshBins(4, 3), BLT([0.4], [0.6])
    wide, question = BandedToeplitz(np.ones(5)), {"noise_multiplier": 1.0, "delta": 1e-2}
    scaled, negative = TimeScaled(blt, np.ones(12), np.ones(12)), np.array([1.0, -0.1])
    for call, match in (
        (lambda: account(Mechanism(scheme, wide), **question), "at most as many bands"),
        (lambda: account(Mechanism(scheme, blt), **question), "at most as many bands"),
        (lambda: FreshBinsLaw(scheme).check_shape(scaled), "strategy = 'blt': its C is not banded"),
        (lambda: FreshBinsLaw(scheme).exact(BandedToeplitz(negative)), "entries must be >= 0"),
        (lambda: FreshBins(4, 3, 2), "must divide the number of epochs"),
    ):
        with pytest.raises(UsageError, match=match):
            call()


@pytest.mark.release
def test_an_overlap_beyond_float64_is_refused_and_the_free_bound_holds():
    mechanism = Mechanism(FreshBins(2, 2), BandedToeplitz(np.ones(2)))
    guarantee = account(mechanism, noise_multiplier=0.01, delta=1e-5)
    assert "without amplification" in guarantee.method


def test_so_much_noise_that_no_amplification_gives_zero_is_answered_without_samples(monkeypatch):
    monkeypatch.setattr(FreshBinsLoss, "pilot", None)
    mechanism = Mechanism(FreshBins(4, 3), BandedToeplitz([1.0, 0.5]))
    guarantee = account(mechanism, noise_multiplier=1e9, delta=1e-5)
    assert guarantee.epsilon == 0 and guarantee.status == "bound"


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_columns_of_a_strategy_are_those_of_its_matrix(kind):
    n, strategy = 12, every_strategy(12)[kind]
    dense, most = strategy.materialize(n), strategy.most_bands(n)
    assert strategy.column_bands(n) <= most <= n
    for bands in (3, most):
        columns = strategy.banded_columns(n, bands)
        expected = [np.pad(np.diagonal(dense, -d), (0, d)) for d in range(bands)]
        np.testing.assert_allclose(columns, expected, atol=1e-15)
        factor = float64(lambda: band.factor(band.gram(jnp.asarray(columns))))()  # noqa: B023
        np.testing.assert_allclose(factor, columns, atol=1e-7)


def test_an_audit_keeps_a_bin_until_the_next_throw():
    scheme = FreshBins(3, 4, 2)
    participated = attack.participations(scheme, 50, np.random.default_rng(5)).reshape(50, 4, 3)
    assert np.all(participated.sum(axis=2) == 1)
    np.testing.assert_array_equal(participated[:, 0], participated[:, 1])


def test_every_unit_keeps_its_bin_until_the_next_throw():
    scheme, population = FreshBins(bins=5, epochs=6, rethrow=2), 400
    draw = scheme.draws(population, 7)
    places = np.zeros((6, population), int)
    for step in range(scheme.iterations):
        epoch, index = divmod(step, 5)
        places[epoch, draw(step)] += index + 1
    np.testing.assert_array_equal(places[0::2], places[1::2])
    agree = np.mean(places[0] == places[2])
    assert abs(agree - 1 / 5) < 4 * math.sqrt(0.16 / population)
    # removing the last unit moves no other
    np.testing.assert_array_equal(scheme.sample(3, 399, 7), draw(3)[draw(3) < 399])


@pytest.mark.ci
@pytest.mark.parametrize("epsilon", before_release([0.5, 8.0], 1))
def test_a_second_moment_knows_about_sigma(epsilon):
    """Without samples, within 3%: of many assignments the privacy loss is nearly Gaussian."""
    scheme, c = FreshBins(bins=8, epochs=16), BandedToeplitz([1.0, 0.4, 0.2])
    loss = FreshBinsLoss(FreshBinsLaw(scheme).exact(c))
    start = loss.start(epsilon, 1e-5)
    sampled = calibrate(loss, epsilon, 1e-5, samples=2**12, seed=1).value
    assert start == pytest.approx(sampled, rel=0.03)
    surrogate = FreshBinsLaw(scheme).surrogate()
    rmse = objective.log_rmse(PrefixSums(), scheme.iterations)
    mapping = kinds.parameterization_of(c, scheme.iterations)
    target = objective.AmplifiedObjective(rmse, mapping, surrogate, (epsilon, 1e-5), 64, None)
    # where no σ is near, it is found all the same, and its slope is that of the value
    placed = target.placed(mapping.start, 1e3 * start)
    assert placed.evaluation.noise_multiplier == pytest.approx(start, rel=2e-3)
    step = np.array([1e-4, 0.0])
    ends = [target(mapping.start + sign * step).value for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(
        placed.evaluation.gradient[0], rel=1e-3, abs=1e-6
    )


@pytest.mark.ci
def test_an_estimate_is_near_what_is_certified():
    """Where the remove direction decides: a sample of it above its ceiling would drop out."""
    mechanism = Mechanism(FreshBins(16, 2), BandedSquareRoot(2))
    estimated, certified = (
        account(mechanism, epsilon=4.0, delta=1e-5, seed=1, certify=certify).noise_multiplier
        for certify in (False, True)
    )
    assert estimated == pytest.approx(certified, rel=0.01)
