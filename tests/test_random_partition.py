"""A random partition: its own proposal, draws and refusals. The rest is in test_likelihoods.py."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp
from test_likelihoods import CELLS, EPSILON

from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.random_partition import RandomPartitionLaw
from mfopt.errors import UsageError
from mfopt.sampling import Poisson, RandomPartition
from mfopt.strategies import BandedToeplitz, Identity

CELL = CELLS["random partition"]
CHANCES = CELL.patterns[1]
GROUPS = slice(0, 8), slice(8, 12)  # patterns of three steps, and of two


def log_ratio(x, modes, chances):
    return logsumexp(x @ modes.T - np.sum(modes**2, axis=1) / 2, axis=1, b=chances)


def log_densities(x, order):
    """log e^((1+s) Y_γ)/M_γ of both groups, M_γ by all tuples of patterns; and the largest M_γ."""
    densities, log_moments = [], []
    for group in GROUPS:
        modes, chances = CELL.modes[group], 2 * CHANCES[group]
        tuples = np.array([*itertools.product(range(len(modes)), repeat=1 + order)])
        squares = np.sum(modes[tuples].sum(axis=1) ** 2, axis=1)
        halves = (squares - np.sum(modes[tuples] ** 2, axis=(1, 2))) / 2
        log_moments.append(logsumexp(halves, b=np.prod(chances[tuples], axis=1)))
        densities.append((1 + order) * log_ratio(x, modes, chances) - log_moments[-1])
    return logsumexp(densities, axis=0) - math.log(2), max(log_moments)


@pytest.mark.parametrize("order", [1, 2])
@float64
def test_powers_are_drawn_from_their_density_and_no_value_is_above_its_ceiling(order):
    size, exact = 2**15, CELL.loss.likelihood
    key = jax.random.key(order)
    noise = exact.noise(jax.random.normal(key, (size, exact.dimension)))
    drawn = exact.draw(jax.random.split(key), noise, jnp.asarray(float(order)), None)
    x = np.linalg.solve(CELL.matrix.T, np.asarray(drawn.products + noise).T).T
    log_density, log_largest = log_densities(x, order)
    loss = log_ratio(x, CELL.modes, CHANCES)
    actual = exact.log_density(jnp.asarray(x[:40] @ CELL.matrix), float(order))
    assert actual == pytest.approx(log_density[:40], rel=1e-9, abs=1e-9)
    ceiling, _ = CELL.loss.ceilings(exact, 0.0).chain("powers", order)
    assert ceiling == pytest.approx(log_largest, rel=1e-9)
    room = ceiling + log_density - (1 + order) * loss
    assert -1e-9 <= np.min(room) < 0.5  # where one group decides
    for logs in (np.zeros(size), loss):  # Q, and P, over the proposal
        weights = np.exp(logs - log_density)
        assert weights.mean() == pytest.approx(1, abs=4 * weights.std() / math.sqrt(size))
    other = np.exp(loss - log_densities(x, 3 - order)[0])
    assert abs(other.mean() - 1) > 6 * other.std() / math.sqrt(size)  # a control


def test_a_known_group_protects_less():
    for direction, log_delta in zip(
        ("remove", "add"), CELL.loss.free_bounds()[0].log_deltas(CELL.sigma, EPSILON), strict=True
    ):
        assert math.exp(log_delta) > 1.05 * CELL.truth[direction][0]
    assert (
        RandomPartition(8, 2, 2)
        .words()
        .endswith("in a random one of as many groups, which stays secret")
    )


def test_one_group_is_poisson_sampling_and_what_is_not_known_is_refused():
    position = {"noise_multiplier": 1.0, "epsilon": 1.0}
    one_group = account(Mechanism(RandomPartition(8, 3, 1)), **position)
    exact = account(Mechanism(Poisson(1 / 8, 24)), **position)
    assert (one_group.delta, one_group.status) == (exact.delta, "exact")

    class Other(RandomPartition):
        kind = "random-partition-test-of-subclass"

    three = BandedToeplitz([1.0, 0.5, 0.3])
    refusals = (
        (lambda: RandomPartition(8, 2, 8), "balls-in-bins"),
        (lambda: law(RandomPartition(8, 2, 2)).check(three), r"as many bands as groups \(2\)"),
        (lambda: RandomPartitionLaw(Other(8, 2, 3)).check(Identity()), "only"),
    )
    for call, match in refusals:
        with pytest.raises(UsageError, match=match):
            call()
