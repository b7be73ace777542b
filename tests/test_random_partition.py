"""A random partition: what amplification gains, refusals. The rest is in test_likelihoods.py."""

import math

import pytest
from test_likelihoods import CELLS, EPSILON

from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.random_partition import RandomPartitionLaw
from mfopt.errors import UsageError
from mfopt.sampling import Poisson, RandomPartition
from mfopt.strategies import BandedToeplitz, Identity

CELL = CELLS["random partition"]


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
