"""Accept rules: what must be refused, with the bounds stubbed, and what may be accepted."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from mfopt import strategies as S
from mfopt.accounting import verify
from mfopt.accounting.monte_carlo import dominating_pair, tilted
from mfopt.calibration import certify, release
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import BallsInBins

DELTA = 1e-5
NO_BOUND = (math.nan, math.inf, -math.inf, -1e-9)
SMALL = BallsInBins(bins=5, epochs=3)


@pytest.fixture(scope="module")
def pair():
    return dominating_pair.exact(S.SquareRoot(), SMALL)


@pytest.mark.parametrize("broken", NO_BOUND)
def test_one_broken_bound_is_enough_to_refuse(broken):
    for bounds in ((broken, 0.0), (0.0, broken), (broken, broken), (broken,)):
        assert not verify.accepts(bounds, 0.0, DELTA)
        assert verify.largest(bounds) == math.inf


def test_each_bound_and_the_failure_probability_count():
    assert verify.accepts((0.9e-5, 0.5e-5), 1e-6, DELTA)  # exactly at δ is below
    assert not verify.accepts((0.9e-5, 0.5e-5), 1.1e-6, DELTA)
    assert not verify.accepts((0.5e-5, 0.9e-5), 1.1e-6, DELTA)
    assert not verify.accepts((0.5e-5, 2e-5), 0.0, DELTA)
    assert not verify.accepts((2e-5, 0.5e-5), 0.0, DELTA)
    assert not verify.accepts((), 0.0, DELTA)
    for spent in (math.nan, -1e-6, math.inf):
        assert not verify.accepts((0.0, 0.0), spent, DELTA)
    for delta in (math.nan, 0.0, 1.0, 2.0, math.inf):
        assert not verify.accepts((0.0, 0.0), 0.0, delta)
    assert verify.largest((1e-7, 3e-6)) == 3e-6
    assert verify.largest(()) == math.inf


def stub(monkeypatch, remove, add):
    """Both directions' bounds replaced; they are given at failure probability 0 extra."""

    def make(value):
        return lambda *_, **__: tilted.UpperBound(value, value, 1.0, 256, 1)

    monkeypatch.setattr(tilted, "remove_bound", make(remove))
    monkeypatch.setattr(tilted, "add_bound", make(add))


def test_certificates_look_at_both_directions(pair, monkeypatch):
    good = DELTA / 2
    stub(monkeypatch, good, good)
    assert certify(pair, 3.0, 1.0, DELTA, samples=256).remove == good  # control: stubs are used
    assert release(pair, 1.0, DELTA, samples=256, calibrate_samples=64)[0].add == good
    for bad in (*NO_BOUND, 2 * DELTA):
        for remove, add in ((good, bad), (bad, good)):
            stub(monkeypatch, remove, add)
            with pytest.raises(FailureError, match="not certified"):
                certify(pair, 3.0, 1.0, DELTA, samples=256)
            with pytest.raises(FailureError, match="not certified"):
                release(pair, 1.0, DELTA, samples=256, calibrate_samples=64)


def test_certificates_charge_their_failure_probability(pair, monkeypatch):
    stub(monkeypatch, DELTA, DELTA / 2)  # below δ, but not with β
    with pytest.raises(FailureError, match="not certified"):
        release(pair, 1.0, DELTA, samples=256, calibrate_samples=64)
    with pytest.raises(FailureError, match="not certified"):
        certify(pair, 3.0, 1.0, DELTA, samples=256)


def test_a_loss_that_is_no_number_does_not_count_as_zero():
    values = np.asarray(dominating_pair.log_hinge(jnp.array([math.nan, -1.0, 1.0, -math.inf])))
    assert math.isnan(values[0]) and values[1] == values[3] == -math.inf and values[2] < 0


# --- the pair ------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-155, 3e-154, 1e-120, 1e120, 1e155, 1e-300, 1e300])
def test_c_out_of_range_is_refused(scale):
    with pytest.raises(UsageError, match=r"Multiply C by a constant"):
        dominating_pair.exact(S.Dense(scale * np.eye(15) + 0.5 * scale * np.eye(15, k=-1)), SMALL)


@pytest.mark.parametrize("scale", [1e-90, 1e-30, 1e30, 1e90])
def test_scaling_c_scales_the_pair_to_the_last_digits(scale):
    matrix = np.tril(np.random.default_rng(0).uniform(0.1, 1, (15, 15)))
    one, other = (dominating_pair.exact(S.Dense(matrix * k), SMALL) for k in (1.0, scale))
    np.testing.assert_allclose(other.gram / scale**2, one.gram, rtol=1e-13)
    np.testing.assert_allclose(other.factor / scale, one.factor, rtol=1e-12, atol=1e-13)


def test_the_pair_is_that_of_the_stored_c_in_float64():
    matrix = np.tril(np.random.default_rng(0).uniform(0.1, 1, (15, 15))).astype(np.float32)
    pair = dominating_pair.exact(S.Dense(matrix), SMALL)
    modes = matrix.astype(np.float64).reshape(15, 3, 5).sum(axis=1)
    assert pair.gram.dtype == np.float64
    np.testing.assert_allclose(pair.gram, modes.T @ modes, rtol=1e-14)
    narrow = np.asarray(modes.astype(np.float32))  # control: single precision would show
    assert np.abs(narrow.T @ narrow / (modes.T @ modes) - 1).max() > 1e-8


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.complex64, jnp.bfloat16, bool])
def test_other_number_types_are_refused(dtype):
    # a JAX array keeps its type in a strategy; a numpy array becomes float64 or is refused there
    with pytest.raises(UsageError, match="float32 or wider"):
        dominating_pair.exact(S.Dense(jnp.eye(15, dtype=dtype)), SMALL)


def test_complex_parameters_are_refused_where_they_come_in():
    with pytest.raises(UsageError, match="real"):
        dominating_pair.exact(S.Dense(np.eye(15) * (1 + 0j)), SMALL)


def test_what_is_no_pair_is_refused():
    good = np.array([[2.0, 1.0], [1.0, 2.0]])
    factor = np.linalg.cholesky(good)
    bad = [
        (good * [[1, np.nan], [np.nan, 1]], factor),
        (good, np.full((2, 2), np.inf)),
        (good, factor * 1.01),
        (np.array([[2.0, 1.1], [1.0, 2.0]]), factor),
        (-good, factor),
        (np.zeros((2, 2)), np.zeros((2, 2))),
        (good[0], factor),
        (np.array([[2.0, -1.0], [-1.0, 2.0]]), np.linalg.cholesky(np.array([[2.0, -1], [-1, 2]]))),
    ]
    for (gram, root), call in itertools.product(bad, (certify, release)):
        arguments = (3.0, 1.0, DELTA) if call is certify else (1.0, DELTA)
        with pytest.raises(UsageError, match="pair"):
            call(dominating_pair.DominatingPair(gram, root), *arguments)
    dominating_pair.check(dominating_pair.DominatingPair(good, factor))
