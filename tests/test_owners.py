"""Examples of several owners: which are kept, who takes part when, and sensitivity."""

import itertools

import numpy as np
import pytest

from mfopt import strategies
from mfopt.accounting import sensitivity
from mfopt.errors import UsageError
from mfopt.sampling import Owners


def test_no_owner_has_more_than_the_limit_and_nothing_else_would_fit():
    rng = np.random.default_rng(0)
    for limit in (1, 2, 3) * 10:
        owns = rng.random((30, 8)) < 0.3  # example, owner
        owns[:, 0] |= ~owns.any(1)
        selected = Owners([np.flatnonzero(row) for row in owns]).bounded(limit)
        counts = owns[selected].sum(0)
        assert counts.max() == limit
        assert all((counts[row] == limit).any() for row in np.delete(owns, selected, 0))


def test_removing_an_owner_moves_what_is_kept_of_all_others():
    """Control: why contents are protected, and presence is not."""
    chain = [[0], [0, 1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert Owners(chain).bounded(1).tolist() == [0, 2, 4]
    assert (Owners([[1], *chain[2:]]).bounded(1) + 1).tolist() == [1, 3, 5]


def test_participations_count_the_examples_of_each_pattern_once():
    table = Owners([["ann", "bob"], "ann", ["bob", "bob"], 1, "1"])
    counts = table.participations([[0, 1], [], [2, 0], np.array([3])])
    assert sorted(counts.tolist()) == [[0, 0, 0, 1], [1, 0, 2, 0], [2, 0, 1, 0]]
    assert table.bounded(1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("negative", [False, True])
def test_sensitivity_of_owners_is_the_largest_move_of_any(negative):
    rng = np.random.default_rng(5)
    matrix = np.tril(rng.uniform(-negative, 1, (6, 6))) + np.eye(6)
    table = Owners(rng.integers(0, 5, (9, 2)))
    batches = rng.permuted(np.tile(table.bounded(2), (6, 1)), axis=1)[:, :2]
    counts, strategy = table.participations(batches), strategies.Dense(matrix)
    largest_move = max(
        np.linalg.norm(np.repeat(matrix, row, axis=1) @ signs)
        for row in counts
        for signs in itertools.product((-1, 1), repeat=row.sum())
    )
    found = sensitivity(strategy, counts)
    assert found.value >= largest_move and found.exact is not negative
    if not negative:
        assert found.value == pytest.approx(largest_move, rel=1e-12)
        # control: two examples in a batch counted as one
        assert sensitivity(strategy, np.minimum(counts, 1)).value < largest_move


@pytest.mark.parametrize("table", [5, [[]], [None], [1.5]])
def test_what_names_no_owner_is_refused(table):
    with pytest.raises(UsageError, match="owner"):
        Owners(table)


@pytest.mark.parametrize("batches", [5, [5], [[2]], [[-1]], [[True]]])
def test_what_is_no_batch_of_examples_is_refused(batches):
    with pytest.raises(UsageError, match="batches"):
        Owners(["ann", "bob"]).participations(batches)
    assert Owners(["ann", "bob"]).participations([]).shape == (0, 0)
