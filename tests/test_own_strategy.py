"""A strategy that is added from outside (:mod:`fading_strategy`) goes all the way."""

import math

import numpy as np
import pytest
from fading_strategy import Fading, Plateau

from mfopt import load, optimize, query_error
from mfopt.accounting import Mechanism, account
from mfopt.errors import UsageError
from mfopt.noise import NoiseStream, from_factorization
from mfopt.sampling import BallsInBins
from mfopt.strategies import Identity
from mfopt.testing import check_strategy
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(bins=4, epochs=2)


def test_it_conforms_and_says_what_is_dense():
    dense = check_strategy(Fading(0.4, 0.9, 0.05, gain=0.7))
    assert dense == ("multiply", "solve", "modes", "gram", "error")


@pytest.mark.ci
def test_without_a_recursion_its_noise_is_dense_where_that_is_asked_for():
    assert "noise" in check_strategy(Plateau(0.3), past="dense")
    with pytest.raises(UsageError, match="past='dense'"):
        check_strategy(Plateau(0.3))
    with pytest.raises(UsageError, match="must be one of"):
        optimize.factorize(SCHEME, 2.0, 1e-4, strategy="plateau")


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    """Optimized from its own start, certified, saved and loaded."""
    found = optimize.factorize(
        SCHEME, 2.0, 1e-4, strategy="fading", samples=256, seed=1, steps=25, certify_samples=2**13
    )
    return load(found.save(tmp_path_factory.mktemp("own") / "fading.npz"))


def test_it_is_optimized_certified_saved_and_loaded(certified):
    strategy, n = certified.strategy, SCHEME.iterations
    assert isinstance(strategy, Fading) and certified.guarantee.status == "certified"
    norms = np.linalg.norm(strategy.modes(SCHEME), axis=0)
    assert np.max(norms) == pytest.approx(1, rel=1e-12)
    # it was worth it: against independent noise, whose σ is exact
    alone = account(Mechanism(SCHEME, Identity()), epsilon=2.0, delta=1e-4)
    identity = float(query_error.rmse(PrefixSums(), Identity(), n, alone.noise_multiplier))
    assert certified.rmse < identity


def test_both_streams_make_the_same_noise(certified):
    def streamed(past):
        stream = from_factorization(certified, clip_norm=1.0, past=past)
        assert isinstance(stream, NoiseStream)
        state, rows = stream.init(np.zeros(5, np.float32), seed=3), []
        for _ in range(SCHEME.iterations):
            row, state = stream.next(state)
            rows.append(np.asarray(row))
        return stream.recursion.slots, np.array(rows)

    (one, own), (none, dense) = streamed("auto"), streamed("dense")
    assert (one, none) == (1, 0)
    np.testing.assert_allclose(own, dense, atol=1e-5 * math.sqrt(SCHEME.iterations))
