"""A run's batches: what the accounted scheme draws, whoever asks for them, from any step on."""

import pickle

import numpy as np
import pytest
from statements import stated
from test_sampling import EXAMPLES

from mfopt import sampling
from mfopt.accounting import sensitivity
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, FixedBatch, FixedOrder, Owners, UnitSampler, Users
from mfopt.strategies import Identity

EXECUTABLE = {k: v for k, v in EXAMPLES.items() if v[0].executable}


def record(scheme, adjacency="add-remove"):
    """A factorization of C = I at a σ that nobody proves anything with here."""
    return stated(Identity(), scheme, adjacency=adjacency)


@pytest.mark.parametrize("kind", EXECUTABLE)
def test_every_way_to_the_batches_gives_the_draws_of_the_scheme(kind):
    scheme, population = EXECUTABLE[kind]
    sampler = UnitSampler(scheme, population, seed=4)
    drawn = [scheme.sample(t, population, 4) for t in range(scheme.length)]
    parts = [sampler.part(rank, 3) for rank in range(3)]
    parsed = pickle.loads(pickle.dumps(sampler))
    ways = {
        "indexed": [sampler[t] for t in range(len(sampler))],
        "iterated": list(sampler),
        "resumed": [*(sampler[t] for t in (0, 1)), *parsed.steps(2)],
        "padded": [units[mask] for units, mask in sampler.padded(4)],
        "parts": [np.sort(np.concatenate([p[t] for p in parts])) for t in range(len(sampler))],
        "state": list(UnitSampler.from_state(sampler.state_dict())),
    }
    for variant, batches in ways.items():
        assert len(batches) == len(drawn)
        for batch, two in zip(batches, drawn, strict=True):
            np.testing.assert_array_equal(batch, two, err_msg=variant)
    assert [len(p[0]) for p in parts] == [len(drawn[0][r::3]) for r in range(3)]
    assert sampler.expected_batch == parts[1].expected_batch == scheme.expected_batch(population)
    # a factorization's sampler is one of its scheme
    if kind not in ("fixed-batch", "truncated-poisson"):
        recorded_sampler = record(scheme).sampler(population, seed=4)
        np.testing.assert_array_equal(recorded_sampler[1], drawn[1])


def test_a_seed_is_secret_and_new_unless_it_is_pinned():
    scheme = BallsInBins(8, 2)
    first, second = (record(scheme).sampler(200) for _ in "12")
    assert not np.array_equal(first[0], second[0])
    secret = first.state_dict()["seed"]
    assert secret not in repr(first) and "secret" in repr(first)
    assert len(secret) > 50  # of 64 hexadecimal digits
    pinned = record(scheme).sampler(200, seed=3)
    assert "not private" in repr(pinned) and pinned.pinned
    assert "secret" in repr(UnitSampler.from_state(first.state_dict()))


def test_padded_batches_have_one_shape_and_a_mask():
    scheme = BallsInBins(40, 1)  # some bins are empty
    sampler = UnitSampler(scheme, 50, seed=0)
    sizes = [len(units) for units in sampler]
    assert 0 in sizes and max(sizes) > 2
    for (units, mask), size in zip(sampler.padded(2), sizes, strict=True):
        assert units.shape == mask.shape == (max(1, -(-size // 2)), 2)
        assert mask.sum() == size and units.min() >= 0 and not units[~mask].any()


def test_an_epoch_is_as_many_steps_as_draw_each_unit_once_on_average():
    expected = {"balls-in-bins": 7, "fixed-order": 7, "poisson": 3, "cyclic-poisson": 6}
    for kind, steps in expected.items():
        scheme, population = EXAMPLES[kind]
        assert UnitSampler(scheme, population, 0).steps_per_epoch == steps, kind


STATE = UnitSampler(BallsInBins(3, 2), 9, 0).state_dict()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: UnitSampler(sampling.MinSeparation(9, 3, 3), 40), "not a random choice"),
        (lambda: UnitSampler(BallsInBins(3, 2), 0), "population"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9.5), "population"),
        (lambda: UnitSampler("balls-in-bins", 9), "spec of mfopt.sampling"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9, seed=-1), "seed"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9, ranks=2), "same seed"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9, 0, rank=2, ranks=2), "rank"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9, 0).part(0, 2).part(0, 2), "part itself"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9)[6], "ends after 6"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9)[-1], "step"),
        (lambda: UnitSampler(FixedBatch(2, 9, 4), 8)[0], "9 units"),
        (lambda: UnitSampler(BallsInBins(3, 2), 9).padded(0), "microbatch"),
        (lambda: UnitSampler.from_state({}), "state_dict"),
        (lambda: UnitSampler.from_state({**STATE, "scheme": None}), "scheme = 'NoneType'"),
        (lambda: UnitSampler.from_state({**STATE, "pinned": "no"}), "pinned = 'str'"),
        (lambda: record(FixedBatch(2, 9, 4)).sampler(9), "does not cover a run"),
        (lambda: Users([]), "user_of_record"),
        (lambda: Users([1, None]), "several types"),
        (lambda: Users(["a", "b"]).records([2]), "2 users"),
        (lambda: Users([["a"], ["a", "b"]]), "see Owners"),
        (lambda: Users([["a", "b"]]), "see Owners"),
        (lambda: Owners(["a", []]), "owners of example 1"),
        (lambda: Owners([["a", None]]), "name or number"),
        (lambda: Owners("a").participations([[-1]]), "batches = -1"),
        (lambda: sensitivity(Identity(), np.ones((2, 4))), "whole"),
        (lambda: sensitivity(Identity(), [[1]]), "must be an array"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, match):
    with pytest.raises(UsageError, match=match):
        call()


def test_records_of_users_are_all_theirs_once_and_know_their_owner():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 30, size=200) * 10
    users = Users(labels)
    assert users.population == len(np.unique(labels))
    sampler = UnitSampler(FixedOrder(4, 1), users.population)
    recorded = []
    for units in sampler:
        records, owner = users.records(units)
        np.testing.assert_array_equal(labels[records], users.names[units[owner]])
        recorded.append(records)
    np.testing.assert_array_equal(np.sort(np.concatenate(recorded)), np.arange(200))
    assert [part.tolist() for part in users.records([])] == [[], []]
