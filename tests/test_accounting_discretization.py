"""Each inequality of a discretization from below, and powers of a transform."""

import numpy as np
import pytest

from mfopt.accounting.loss_distribution import distribution
from mfopt.accounting.loss_distribution.convolution import _power


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize("faint", [0.0, 0.2])
def test_shares_are_never_too_large(size, faint):
    rng = np.random.default_rng(size)
    for decay in (0.0, 1.0, 4.0):
        mass = np.exp(-decay * np.linspace(-4, 4, size) ** 2)
        below = rng.random(size)
        excess = mass * below * (rng.random(size) >= faint)
        deficit = mass * (1 - below) * (rng.random(size) >= faint)
        for mode in sorted({0, int(np.argmax(mass)), size // 3, size - 1}):
            actual = distribution.upward(excess, deficit, mode)
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
