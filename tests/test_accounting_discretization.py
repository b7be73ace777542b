"""Each inequality of a discretization from below, and powers of a transform."""

import numpy as np
import pytest

from mfopt.accounting.loss_distribution import distribution
from mfopt.accounting.loss_distribution.convolution import _power


def shares_step_by_step(excess, deficit, mode):
    """What :func:`.distribution.upward` says, one point after the other."""
    size, share = excess.size, np.zeros(excess.size)
    for k in range(mode + 1):
        previous = share[k - 1] * deficit[k - 1] if k else 0.0
        value = 1 - previous / excess[k] if excess[k] > 0 else 0.0
        limit = excess[k + 1] / deficit[k] if k + 1 < size and deficit[k] > 0 else 1.0
        share[k] = max(0.0, min(value, limit, 1.0))
    forward, share[-1] = share[mode], 0.0
    for k in range(size - 1, mode, -1):
        room = (1 - share[k]) * excess[k]
        share[k - 1] = min(1.0, room / deficit[k - 1]) if deficit[k - 1] > 0 else 0.0
    share[mode] = min(share[mode], forward)
    return share


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize("faint", [0.0, 0.2])
def test_shares_are_those_of_the_recursion_and_never_too_large(size, faint):
    rng = np.random.default_rng(size)
    for decay in (0.0, 1.0, 4.0):
        mass = np.exp(-decay * np.linspace(-4, 4, size) ** 2)
        below = rng.random(size)
        excess = mass * below * (rng.random(size) >= faint)
        deficit = mass * (1 - below) * (rng.random(size) >= faint)
        for mode in sorted({0, int(np.argmax(mass)), size // 3, size - 1}):
            actual = distribution.upward(excess, deficit, mode)
            expected = shares_step_by_step(excess, deficit, mode)
            np.testing.assert_allclose(actual, expected, atol=1e-9)
            assert actual.min() >= 0 and actual.max() <= 1
            remainder = (1 - actual[1:]) * excess[1:] - actual[:-1] * deficit[:-1]
            assert np.all(remainder >= -2e-15 * excess[1:])


def test_powers_by_squaring_keep_their_digits():
    count, size = 1_000_003, 4096
    angle = np.arange(size)
    base = np.exp(2j * np.pi * angle / size)
    exact = np.exp(2j * np.pi * (angle * count % size) / size)
    assert np.max(np.abs(_power(base.copy(), count) - exact)) < 4 * count * np.finfo(float).eps
    small = _power(np.array([0.5 + 0j, 0.9]), 100)
    assert small[0] == 0 and small[1] == pytest.approx(0.9**100, rel=1e-12)
