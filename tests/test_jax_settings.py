"""What a host program sets in JAX for its own code changes nothing here."""

import contextlib
import functools
import itertools
import os
import re

import jax
import numpy as np
import pytest
from processes import python
from sources import ROOT

from mfopt import query_error, strategies, workloads
from mfopt._runtime import _float64
from mfopt.accounting import Mechanism, account
from mfopt.noise import NoiseStream
from mfopt.sampling import BallsInBins

SETTINGS = {
    "strict dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "strict ranks": lambda: jax.numpy_rank_promotion("raise"),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "no jit": lambda: jax.disable_jit(True),
}
KINDS = {
    "sqrt": strategies.SquareRoot(),
    "blt": strategies.BLT([0.9, 0.5], [0.2, 0.1]),
    "time-scaled": strategies.TimeScaled(
        strategies.BLT([0.9, 0.5], [0.2, 0.1]), np.linspace(1, 2, 16)
    ),
}
SCHEME = BallsInBins(8, 2)
PARAMETERS = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(5, np.float32)}


def numbers(kind):
    strategy = KINDS[kind]
    return (
        strategy.materialize(16),
        np.asarray(strategy.solve(np.eye(16))),
        strategy.gram(SCHEME),
        query_error.rmse(workloads.Momentum(0.9, np.ones(16)), strategy, 16, 1.0),
    )


def certified():
    mechanism = Mechanism(SCHEME, KINDS["sqrt"])
    return account(mechanism, noise_multiplier=4.0, delta=1e-5, samples=2**12, seed=1).epsilon


def noise(kind):
    stream = NoiseStream(KINDS[kind], iterations=16, noise_multiplier=1.0, clip_norm=1.0)
    state, collected = stream.init(PARAMETERS, seed=3), []
    for _ in range(2):
        step, state = stream.next(state)
        collected.append(step)
    return collected


WORK = {
    "certified": certified,
    **{f"numbers-{kind}": functools.partial(numbers, kind) for kind in KINDS},
    **{f"noise-{kind}": functools.partial(noise, kind) for kind in KINDS},
}


@functools.cache
def by_default(work):
    return jax.device_get(WORK[work]())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("setting", "work"),
    [
        # all is compiled again for each: in the check what has most parts
        pytest.param(
            setting, work, marks=[pytest.mark.release] * (not work.endswith("time-scaled"))
        )
        for setting, work in itertools.product(SETTINGS, WORK)
    ],
)
def test_a_setting_of_the_host_program_is_its_own(setting, work):
    expected = by_default(work)
    jax.clear_caches()  # else nothing is traced
    with SETTINGS[setting]():
        actual = WORK[work]()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), expected)


def test_the_scope_leaves_every_setting_as_it_was():
    names = ("enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "disable_jit")

    def settings():
        return {name: getattr(jax.config, f"jax_{name}") for name in names}

    with jax.numpy_dtype_promotion("strict"):
        original = settings()
        with contextlib.suppress(ZeroDivisionError), _float64.scope():
            inside = settings()
            raise ZeroDivisionError
        assert settings() == original != inside
    assert inside == dict(zip(names, (True, "standard", "allow", False), strict=True))


ENVIRONMENT = {
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_TRANSFER_GUARD": "disallow",
    "JAX_DISABLE_JIT": "1",
    "JAX_DEBUG_NANS": "True",
    "JAX_ENABLE_X64": "0",
}
FILE = ROOT / "artifacts" / "factorizations" / "blt-4-8x32-eps2.npz"
CODE = "from mfopt_cli.main import main; main()"
CHANGING = re.compile(r'"(?:\w*seconds\w*|\w*_per_second|date|\w*_bytes|path)": [^,\n}]+')


@pytest.mark.ci
def test_settings_of_the_environment_change_no_answer():
    words, answers = ["noise", str(FILE), "--params=1000", "--json"], []
    for settings in ({}, ENVIRONMENT):
        answers.append(CHANGING.sub("", python("-c", CODE, *words, env=os.environ | settings)))
    assert answers[0] == answers[1]
