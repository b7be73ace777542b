"""Closed-form Gaussian mechanism against arbitrary-precision arithmetic, and the root finder."""

import math

import mpmath
import pytest
import scipy

from mfopt.accounting import solve
from mfopt.accounting.closed_form import gaussian
from mfopt.errors import FailureError


def log_delta_exactly(mu, epsilon):
    with mpmath.workdps(400):
        mu, epsilon = mpmath.mpf(mu), mpmath.mpf(epsilon)

        def tail(x):
            return mpmath.erfc(x / mpmath.sqrt(2)) / 2

        a = epsilon / mu - mu / 2
        return float(mpmath.log(tail(a) - mpmath.exp(epsilon) * tail(a + mu)))


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 0.51, 1.0, 4.0, 30.0])
def test_log_delta_matches_high_precision_from_the_body_to_the_far_tail(mu):
    for epsilon in (0.0, 1e-6, 0.01, 0.5, 2.0, 20.0, 300.0):
        expected = log_delta_exactly(mu, epsilon)
        if expected < -1e5:
            continue
        assert gaussian.log_delta(mu, epsilon) == pytest.approx(expected, rel=1e-14, abs=1e-12)


def test_delta_is_right_at_the_smallest_floats():
    epsilon = gaussian.epsilon(1.0, 1e-300)
    assert epsilon == pytest.approx(37.44884791213948, rel=1e-12)
    assert log_delta_exactly(1.0, epsilon) == pytest.approx(math.log(1e-300), rel=1e-13)


@pytest.mark.parametrize("delta", [0.3, 1e-5, 1e-100, 1e-300])
@pytest.mark.parametrize("mu", [0.05, 1.0, 7.0])
def test_inverses_end_on_the_private_side(mu, delta):
    epsilon = gaussian.epsilon(mu, delta)
    assert gaussian.log_delta(mu, epsilon) <= math.log(delta)
    if epsilon > 0:
        assert gaussian.log_delta(mu, epsilon * (1 - 1e-9)) > math.log(delta)
        actual = gaussian.largest_mu(epsilon, delta)
        assert actual == pytest.approx(mu, rel=1e-9)
        assert gaussian.log_delta(actual, epsilon) <= math.log(delta)


def test_root_is_on_the_satisfying_side_and_tight():
    calls = []

    def excess(x):
        calls.append(x)
        return 3.0 - x

    for guess in (0.01, 2.9, 100.0):
        actual = solve.smallest(excess, guess, name="x", relative=1e-6)
        assert excess(actual) <= 0 and excess(actual * (1 - 2e-6)) > 0
        assert actual in calls


def test_root_finder_survives_jumps_and_infinities():
    step = solve.smallest(lambda x: math.inf if x < 2 else -math.inf, 1.0, name="x")
    assert 2 <= step < 2 * (1 + 2e-6)
    assert solve.smallest(lambda x: -1.0, 1.0, name="x", least=1e-3) == 1e-3
    with pytest.raises(FailureError, match="no x up to 10"):
        solve.smallest(lambda x: 1.0, 1.0, name="x", largest=10)
    with pytest.raises(FailureError, match="no number"):
        solve.smallest(lambda x: math.nan, 1.0, name="x")


@pytest.mark.parametrize("mu", [1e3, 1e50, 1e100, 1e150])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_almost_no_noise_hides_almost_nothing(mu, share):
    """δ is close to 1 while ε is below μ²/2, with no overflow on the way."""
    log_delta = gaussian.log_delta(mu, share * mu * mu)
    assert -1e-5 < log_delta <= 0.0


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [
        (lambda x: math.exp(-x) - 1e-8, 0.0, 100.0),
        (lambda x: -math.inf if x < 0.25 else x - 0.5, 0.0, 1.0),
        (lambda x: -math.inf if x < 0.25 else math.inf, 0.0, 1.0),
    ],
)
def test_root_is_that_of_bisection(function, low, high):
    tight = scipy.optimize.bisect(function, low, high, xtol=1e-300, maxiter=3000)
    for relative in (1e-14, 1e-2):
        position = solve.root(function, low, high, relative=relative)
        assert position == pytest.approx(tight, rel=1.1 * relative)


def test_a_function_without_a_root_or_without_a_number_is_refused():
    with pytest.raises(FailureError, match="no root between 0 and 1: the function is 1 and 2"):
        solve.root(lambda x: 1 + x, 0.0, 1.0)
    for broken in (lambda x: math.nan, lambda x: x - 0.5 if x in (0.0, 1.0) else math.nan):
        with pytest.raises(FailureError, match="not a number"):
            solve.root(broken, 0.0, 1.0)


def test_root_far_smaller_than_its_bracket_is_found_by_halves():
    assert solve.root(lambda x: 1 - x * 1e200, 0.0, 1.0) == pytest.approx(1e-200, rel=1e-13)


def test_lowest_is_within_a_bracket_of_the_minimum():
    calls = []

    def function(x):
        calls.append(x)
        return abs(x - 1.234) ** 1.5

    position = solve.lowest(function, -7.0, 5.0, width=1e-3)
    assert position == pytest.approx(1.234, abs=1e-3) and position in calls
    assert len(calls) <= 2 + math.ceil(math.log(12 / 1e-3) / math.log(1.618034))
    assert solve.lowest(lambda x: x, 2.0, 3.0, width=1e-4) == pytest.approx(2.0, abs=1e-4)
    assert solve.lowest(lambda x: -x, 2.0, 3.0, width=1e-4) == pytest.approx(3.0, abs=1e-4)
