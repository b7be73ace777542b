"""Samples over devices: the same answers, whatever there is to compute them with."""

import json
import os
import sys

import jax
import numpy as np
import pytest
from processes import python, with_devices
from questions import searched

from mfopt.accounting.monte_carlo import chunked, sharding
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.optimize import kinds
from mfopt.optimize.objective import AmplifiedObjective, Samples, log_rmse
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import BLT, BandedToeplitz
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(bins=4, epochs=2)
SIGMA, EPSILON, DELTA = 1.5, 1.0, 1e-3
C = BLT(np.array([0.3]), np.array([0.7]))
THROWN_AFRESH = FreshBins(bins=4, epochs=2), BandedToeplitz(np.array([1.0, 0.4, 0.2])), 9000


def certified(cases):
    """Of bounds on chunks of samples: what no mesh may change at all."""
    sums = []
    for scheme, strategy, samples in cases:
        loss, point = law(scheme).loss(strategy), Point(SIGMA, EPSILON)
        for direction in ("remove", "add"):
            counted = []
            with chunked.counting(counted.append):
                tilt = loss.least(direction, point)
                pilot = loss.pilot(tilt, point, samples, chunked.seed_key(2))
            sums += [*pilot.sums[:2], pilot.samples, sum(counted)]
    return sums


def searches(cases):
    """Values and gradients on frozen samples."""
    collected = []
    for scheme, strategy, _ in cases:
        mapping = kinds.find(strategy.kind).parameterize(strategy, scheme.iterations)
        loss = log_rmse(PrefixSums(), scheme.iterations)
        target = AmplifiedObjective(loss, mapping, law(scheme), (EPSILON, DELTA), Samples(256, 0))
        position = target(mapping.start)
        collected += [position.value, *position.gradient, position.noise_multiplier]
    return collected


def ends():
    """Where a search ends."""
    best = searched(SCHEME, EPSILON, DELTA, strategy="blt", buffers=1, samples=256, seed=0)
    return [best.loss, best.noise_multiplier, len(best.history)]


def answers(every_scheme):
    """The number of devices, what no mesh may change, and what one may in its rounding."""
    cases = [(SCHEME, C, 30_000), THROWN_AFRESH][: 1 + every_scheme]
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


def test_a_device_that_the_caller_chose_is_the_only_one():
    chosen = jax.local_devices()[0]
    with jax.default_device(chosen):
        assert sharding.devices() == (chosen,)
