"""Sampling specs: what they draw is what they say, reproducibly step by step."""

import json
import math

import numpy as np
import pytest

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.sampling import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    RandomPartition,
    TruncatedPoisson,
)
from mfopt.testing import check_scheme

# an example of every kind, with the population that it is sampled from
EXAMPLES = {
    "balls-in-bins": (BallsInBins(7, 3), 40),
    "fresh-bins": (FreshBins(7, 4, 2), 40),
    "b-min-sep": (BMinSep(7, 4, 5), 40),
    "random-partition": (RandomPartition(7, 4, 3), 40),
    "fixed-order": (FixedOrder(7, 3), 40),
    "poisson": (Poisson(0.3, 8), 40),
    "cyclic-poisson": (CyclicPoisson(0.5, 3, 8), 40),
    "fixed-batch": (FixedBatch(5, 40, 8), 40),
    "min-separation": (MinSeparation(20, 5, 3), 40),
    "truncated-poisson": (TruncatedPoisson(0.3, 12, 40, 8), 40),
}


def test_every_kind_of_the_project_has_an_example():
    project_kinds = {
        k for k, cls in sampling.registered().items() if cls.__module__.startswith("mfopt.")
    }
    assert set(EXAMPLES) == project_kinds


@pytest.mark.parametrize("kind", EXAMPLES)
def test_a_scheme_does_what_it_declares(kind):
    scheme, population = EXAMPLES[kind]
    assert scheme.kind == kind
    check_scheme(scheme, population=population)


def test_numpy_numbers_are_stored_as_plain_ones():
    scheme = Poisson(np.float32(0.5), np.int64(4))
    assert json.loads(json.dumps(scheme.describe())) == {
        "kind": "poisson",
        "probability": 0.5,
        "iterations": 4,
    }


def test_cyclic_poisson_takes_each_group_in_its_turn_only():
    scheme = CyclicPoisson(0.5, 3, 300)
    groups = scheme.assign(90, sampling.generator(8))
    recorded = set()
    for t in range(300):
        chosen = scheme.sample(t, 90, 8)
        assert np.all(groups[chosen] == t % 3)
        recorded.update(chosen.tolist())
    assert recorded == set(range(90))
    assert scheme.rounds == 100 and scheme.expected_batch(90) == 15


def test_balls_in_bins_and_fixed_order_share_one_participation_pattern():
    for scheme in (BallsInBins(4, 3), FixedOrder(4, 3)):
        used = np.zeros((12, 30), dtype=int)
        for t in range(12):
            used[t, scheme.sample(t, 30, 2)] = 1
        assert np.all(used.sum(axis=0) == 3)
        assert np.array_equal(used[:4], used[4:8]) and np.array_equal(used[:4], used[8:])


@pytest.mark.parametrize("scheme", [Poisson(0.3, 4000), FixedBatch(15, 50, 4000)])
def test_units_are_alike_and_drawn_afresh_in_each_step(scheme):
    member = np.zeros((4000, 50))
    for t in range(4000):
        member[t, scheme.sample(t, 50, 3)] = 1
    centred = member - 0.3
    assert np.all(np.abs(centred.mean(axis=0)) < 4.5 * math.sqrt(0.21 / 4000))
    assert abs(np.mean(centred[1:] * centred[:-1])) < 4 * 0.21 / math.sqrt(centred[1:].size)


def test_min_separation_checks_a_schedule():
    scheme = MinSeparation(20, 5, 3)
    scheme.check(np.array([0, 5, 19]))
    for bad in ([0, 4], [0, 5, 10, 15], [20], [-1]):
        with pytest.raises(UsageError):
            scheme.check(np.array(bad))
    assert MinSeparation(10, 4, 9).participations == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: Poisson(1.1, 5),
        lambda: Poisson(-0.1, 5),
        lambda: Poisson(math.nan, 5),
        lambda: Poisson(0.1, 0),
        lambda: CyclicPoisson(0.5, 0, 5),
        lambda: FixedBatch(6, 5, 1),
        lambda: FixedBatch(0, 5, 1),
        lambda: MinSeparation(5, 0, 1),
        lambda: FixedOrder(2, 1.5),
        lambda: BallsInBins(True, 1),
        lambda: Poisson(0.5, 3).sample(0, -1, 0),
        lambda: Poisson(0.5, 3).sample(0, 10, -1),
    ],
)
def test_bad_arguments_are_refused(make):
    with pytest.raises(UsageError):
        make()


def test_what_is_typed_is_a_scheme():
    assert sampling.parse(" balls-in-bins : bins=4, epochs=2 ") == BallsInBins(4, 2)
    for text, match in (
        ("poissn:probability=.1,iterations=3", "must be one of"),
        ("poisson:probability=.1", "lacks iterations"),
        ("poisson:probability=.1,steps=3", "probability, iterations"),
        ("poisson:probability=.1,iterations=3.5", "type int"),
        ("poisson:probability=2,iterations=3", "probability"),
        ("", "must be one of"),
    ):
        with pytest.raises(UsageError, match=match):
            sampling.parse(text)
    for kind in (None, 3, ["poisson"], "Poisson"):
        with pytest.raises(UsageError):
            sampling.from_description({"kind": kind})
