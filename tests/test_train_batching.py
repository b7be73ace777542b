"""Which records of a unit are read, and the random streams of a run."""

import numpy as np
import pytest
import training_runs
from scipy import stats
from train_fixtures import synthetic_store, tokens_of

from mfopt.errors import UsageError
from mfopt.training.secrets import RunSecret, uniform_hash
from mfopt.training.units import RecordUnits, UserUnits, select


@pytest.mark.parametrize("rule", ["longest", "shortest", "highest-perplexity", "lowest-perplexity"])
def test_records_by_content_against_sorting_one_user_at_a_time(rule):
    store = synthetic_store(num_users=12, max_records=8, empty_users=(4,), seed=2)
    losses = np.random.default_rng(0).normal(size=store.num_records)
    key = {
        "longest": lambda r: -len(tokens_of(store, r)),
        "shortest": lambda r: len(tokens_of(store, r)),
        "highest-perplexity": lambda r: -losses[r],
        "lowest-perplexity": lambda r: losses[r],
    }[rule]
    chosen = training_runs.selected(store, rule, 3, 9, losses)
    assert chosen.num_users == store.num_users
    for user in range(store.num_users):
        first = sorted(store.records_of(user), key=key)[:3]
        expected = [tokens_of(store, record).tolist() for record in first]
        actual = [tokens_of(chosen, record).tolist() for record in chosen.records_of(user)]
        assert sorted(map(len, actual)) == sorted(map(len, expected))
        if "perplexity" in rule:  # without ties
            assert actual == expected


def test_selection_one_user_at_a_time():
    store = synthetic_store(num_users=12, max_records=8, empty_users=(4,), seed=2)
    users = np.array([5, -1, 4, 0, 11, 7])
    chosen = select(store, users, 3, (9, 2))
    assert chosen.shape == (6, 3)
    for user, row in zip(users, chosen, strict=True):
        mine = list(store.records_of(int(user))) if user >= 0 else []
        kept = row[row >= 0]
        assert len(kept) == len(set(kept)) == min(3, len(mine)) and set(kept) <= set(mine)
        assert np.all(row[len(kept) :] == -1)
        # no other user changes the choice
        if user >= 0:
            selected_alone = select(store, np.array([user]), 3, (9, 2))
            np.testing.assert_array_equal(selected_alone[0], row)


def test_random_selection_is_uniform_and_fresh_at_each_step():
    store = synthetic_store(num_users=3, max_records=8, seed=4)
    user = int(np.argmax(store.records_per_user()))
    count = int(store.records_per_user()[user])
    first = store.records_of(user)[0]
    picks = np.zeros(count)
    steps = 3000
    for step in range(steps):
        picks[select(store, np.array([user]), 2, key=(1, step))[0] - first] += 1
    expected = steps * 2 / count
    deviation = np.abs(picks - expected) / np.sqrt(expected * (1 - 2 / count))
    assert count > 3 and np.all(deviation < 4)
    # the control: always the same step gives one fixed pair, far outside
    fixed = np.zeros(count)
    fixed[select(store, np.array([user]), 2, key=(1, 0))[0] - first] += steps
    assert np.max(np.abs(fixed - expected)) / np.sqrt(expected) > 4


def test_selected_once_is_bounded_per_user():
    store = synthetic_store(num_users=12, max_records=8, empty_users=(4,), seed=2)
    chosen = RecordUnits(store, group_size=3, length=8, seed=5).selected
    per_user = np.histogram(chosen, store.user_offsets)[0]
    np.testing.assert_array_equal(per_user, np.minimum(store.records_per_user(), 3))


@pytest.mark.parametrize("kind", [UserUnits, training_runs.ChunkUnits])
def test_a_users_rows_do_not_depend_on_the_other_units(kind):
    store = synthetic_store(empty_users=(3,))
    units = kind(store, records=2, length=8, seed=6)
    tokens, mask = units.fetch(np.array([3, 5, -1, 9]), step=4)
    assert tokens.shape == mask.shape == (4, 2, 8)
    assert not mask[0].any() and not mask[2].any()  # no records; nobody
    rows_alone, _ = units.fetch(np.array([9]), step=4)
    np.testing.assert_array_equal(tokens[3], rows_alone[0])
    if kind is training_runs.ChunkUnits:
        other, _ = units.fetch(np.array([9]), step=5)
        assert not np.array_equal(other, rows_alone)
        begin, end = store.record_offsets[store.user_offsets[[9, 10]]]
        joined = store.tokens[begin:end].tolist()
        windows = [joined[i : i + 8] for i in range(max(1, len(joined) - 7))]
        for row, is_there in zip(other[0], mask[3], strict=True):
            assert row[is_there].tolist() in windows


def test_record_units_are_single_rows_of_the_selected_records():
    store = synthetic_store(empty_users=(3,))
    units = RecordUnits(store, group_size=2, length=8, seed=6)
    assert units.population == np.sum(np.minimum(store.records_per_user(), 2))
    tokens, mask = units.fetch(np.array([0, -1, 5]), step=1)
    assert tokens.shape == (3, 1, 8) and not mask[1].any()
    expected, _ = store.batch([units.selected[5]], 8)
    np.testing.assert_array_equal(tokens[2], expected)


def test_streams_of_a_run_are_independent_and_reproducible():
    secret = RunSecret.fresh()
    repeated = RunSecret.from_bytes(secret.to_bytes())
    assert repeated.to_bytes() == secret.to_bytes() != RunSecret.fresh().to_bytes()
    damaged = bytearray(secret.to_bytes())
    damaged[5] ^= 1
    with pytest.raises(UsageError, match="damaged"):
        RunSecret.from_bytes(bytes(damaged))
    assert len({secret.seed(p) for p in ("sampling", "noise", "selection")}) == 3
    assert secret.derive("noise").hex() not in repr(secret) == "RunSecret(...)"
    with pytest.raises(UsageError, match="32 bytes"):
        RunSecret(b"short")
    numbers = np.arange(100_000)
    hashed = uniform_hash(5, 3, numbers) / 2.0**64
    assert len(np.unique(hashed)) == len(numbers)
    assert stats.kstest(hashed, "uniform").pvalue > 1e-3
    shifted = uniform_hash(5, 4, numbers) / 2.0**64
    assert abs(np.corrcoef(hashed, shifted)[0, 1]) < 4 / np.sqrt(len(numbers))
