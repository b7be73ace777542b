"""Samples over devices and processes: the same answers, whatever there is to compute them with."""

import dataclasses
import json
import os
import sys

import jax
import numpy as np
import pytest
from processes import finish, free_port, python, start, with_devices
from questions import searched

from mfopt._runtime import _float64
from mfopt.accounting import Effort, over_processes
from mfopt.accounting.monte_carlo import chunked, processes
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import release
from mfopt.errors import FailureError
from mfopt.optimize import kinds
from mfopt.optimize.objective import AmplifiedObjective, log_rmse
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import BLT, BandedToeplitz
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(bins=4, epochs=2)
SIGMA, EPSILON, DELTA = 1.5, 1.0, 1e-3
C = BLT([0.3], [0.7])
LARGE, SMALL = [(SCHEME, C, 30_000)], [(SCHEME, C, 8192)]  # four chunks, and one for two processes
THROWN_AFRESH = FreshBins(bins=4, epochs=2), BandedToeplitz([1.0, 0.4, 0.2]), 9000


def certified(cases):
    """Of bounds on chunks of samples: what no mesh may change at all."""
    sums = []
    for scheme, strategy, samples in cases:
        loss, point = law(scheme).loss(strategy), Point(SIGMA, EPSILON)
        for direction in ("remove", "add"):
            counted = []
            with chunked.counting(counted.append, "sampling"):
                tilt = loss.least(direction, point)
                pilot = loss.pilot(tilt, point, samples, chunked.seed_key(2))
            sums += [*pilot.sums[:2], pilot.samples, counted[-1].done]
    return sums


def searches(cases):
    """Values and gradients on frozen samples."""
    collected = []
    for scheme, strategy, _ in cases:
        mapping = kinds.find(strategy.kind).parameterize(strategy, scheme.iterations)
        loss = log_rmse(PrefixSums(), scheme.iterations)
        target = AmplifiedObjective(loss, mapping, law(scheme), (EPSILON, DELTA), 256, 0)
        position = target(mapping.start)
        collected += [position.value, *position.gradient, position.noise_multiplier]
    return collected


def test_the_default_device_may_be_named_by_its_platform():
    with jax.default_device("cpu"):
        assert [*_float64.devices()] == jax.devices()[:1]


def ends():
    """Where a search ends."""
    best = searched(SCHEME, EPSILON, DELTA, strategy="blt", buffers=1, samples=256, seed=0)
    return [best.loss, best.noise_multiplier, len(best.history)]


def answers(every_scheme):
    """The number of devices, what no mesh may change, and what one may in its rounding."""
    cases = [*LARGE, THROWN_AFRESH][: 1 + every_scheme]
    rounded = searches(cases) + ends() if every_scheme else []
    exact = certified(cases)
    return [
        jax.local_device_count(),
        *([float(x) for x in numbers] for numbers in (exact, rounded)),
    ]


def in_a_process(devices, every_scheme):
    """The answers of a process with so many devices."""
    environment = with_devices(devices)
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    program = f"import json, test_devices; print(json.dumps(test_devices.answers({every_scheme})))"
    return json.loads(python("-c", program, env=environment))


@pytest.mark.parametrize(
    "every_scheme",
    [
        pytest.param(False, marks=pytest.mark.ci, id="balls-in-bins"),
        pytest.param(True, marks=pytest.mark.release, id="all"),
    ],
)
def test_answers_do_not_depend_on_the_number_of_devices(every_scheme):
    (small, exact, rounded), (large, *actual) = answers(every_scheme), in_a_process(4, every_scheme)
    assert large == 4 != small
    assert actual[0] == exact  # to the last bit
    np.testing.assert_allclose(actual[1], rounded, rtol=1e-12, atol=1e-12)


def together(program, count=2):
    """What each of so many processes printed last, with jax.distributed on this machine."""
    port = free_port()
    environment = with_devices(1)
    environment["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    started = [
        start("-c", program, f"127.0.0.1:{port}", count, index, env=environment)
        for index in range(count)
    ]
    return [json.loads(printed.splitlines()[-1]) for printed in finish(*started)]


PROGRAM = """
import json, sys, jax
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
import test_devices
print(json.dumps(test_devices.as_one_of_several()))
"""


def as_one_of_several():
    """Of a process among others."""
    with over_processes():
        large, small = certified(LARGE), certified(SMALL)
        keys = [jax.random.key_data(chunked.seed_key(None)).tolist() for _ in range(2)]
        released = dataclasses.asdict(
            release(law(SCHEME).loss(C), EPSILON, DELTA, effort=Effort(seed=3))
        )
        try:
            certified((SMALL, LARGE)[jax.process_index()])
            refused = ""
        except FailureError as error:
            refused = str(error)
    looked = large[3::4] + small[3::4]
    return [[float(x) for x in large + small], sum(looked), keys, released, refused]


@pytest.mark.release
def test_two_processes_answer_as_one():
    first, second = together(PROGRAM)
    assert first == second
    actual, looked, keys, released, refused = first
    assert actual == [float(x) for x in certified(LARGE) + certified(SMALL)]
    assert looked == 2 * (4 + 1) * 8192
    assert keys[0] != keys[1]
    assert released == dataclasses.asdict(
        release(law(SCHEME).loss(C), EPSILON, DELTA, effort=Effort(seed=3))
    )
    assert "asked for different things" in refused


def _normal(key, size):
    return jax.random.normal(key, ())


@pytest.mark.parametrize(("chunks", "count"), [(1, 2), (9, 2), (3, 4), (9, 4)])
def test_what_several_processes_draw_is_what_one_draws(monkeypatch, chunks, count):
    """Without the exchange itself, of which only two processes can tell."""
    drawn = []
    monkeypatch.setattr(processes, "joined", lambda own, *_: (drawn.append(own), own)[1])
    key, sizes = chunked.seed_key(0), (64 * chunks, 10**9)
    whole, used = chunked.total(_normal, key, *sizes)
    monkeypatch.setattr(processes, "count", lambda: count)
    for index in range(count):
        monkeypatch.setattr(jax, "process_index", lambda place=index: place)
        assert chunked.total(_normal, key, *sizes)[1] == used == 64 * chunks
    np.testing.assert_array_equal(np.concatenate(drawn[1:]), drawn[0])
    assert drawn[0].sum() == whole


def test_a_device_that_the_caller_chose_is_the_only_one():
    chosen = jax.local_devices()[0]
    with jax.default_device(chosen):
        assert _float64.devices() == (chosen,)
