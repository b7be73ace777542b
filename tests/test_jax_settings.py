"""What a host program sets in JAX for its own code changes nothing here."""

import contextlib
import functools
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

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
    "blt": strategies.BLT(np.array([0.9, 0.5]), np.array([0.2, 0.1])),
    "time-scaled": strategies.TimeScaled(
        strategies.BandedToeplitz(np.array([1.0, 0.5])), np.linspace(1, 2, 16)
    ),
}
SCHEME = BallsInBins(8, 2)
PARAMETERS = {"a": np.zeros((3, 2), np.float32), "b": np.zeros(5, np.float32)}


def numbers(kind):
    strategy = KINDS[kind]
    return (
        np.asarray(strategy.materialize(16)),
        np.asarray(strategy.solve(np.eye(16))),
        np.asarray(strategy.gram(SCHEME)),
        query_error.rmse(workloads.Momentum(0.9, np.ones(16)), strategy, 16, 1.0),
    )


def certified():
    mechanism = Mechanism(SCHEME, KINDS["sqrt"])
    return account(mechanism, noise_multiplier=4.0, delta=1e-5, samples=2**12, seed=1).epsilon


def noise(kind):
    stream = NoiseStream(KINDS[kind], iterations=16, noise_multiplier=1.0, clip_norm=1.0)
    state, made = stream.init(PARAMETERS, seed=3), []
    for _ in range(2):
        step, state = stream.next(state)
        made.append(step)
    return made


WORK = {
    "certified": certified,
    **{f"numbers-{kind}": functools.partial(numbers, kind) for kind in KINDS},
    **{f"noise-{kind}": functools.partial(noise, kind) for kind in KINDS},
}


@functools.cache
def usual(work):
    return jax.device_get(WORK[work]())


@pytest.mark.parametrize(
    ("setting", "work"),
    [
        # all is compiled again for each: all work under one setting in the check, and under each
        # what has most parts; certificates compile for seconds
        pytest.param(
            setting,
            work,
            marks=pytest.mark.release
            if setting != "strict dtypes" and not work.endswith("time-scaled")
            else (),
        )
        for setting, work in itertools.product(SETTINGS, WORK)
    ],
)
def test_a_setting_of_the_host_program_is_its_own(setting, work):
    expected = usual(work)
    jax.clear_caches()  # else nothing is traced
    with SETTINGS[setting]():
        found = WORK[work]()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


def test_the_scope_leaves_every_setting_as_it_was():
    names = ("enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "disable_jit")

    def settings():
        return {name: getattr(jax.config, f"jax_{name}") for name in names}

    with jax.numpy_dtype_promotion("strict"):
        before = settings()
        with contextlib.suppress(ZeroDivisionError), _float64.scope():
            inside = settings()
            raise ZeroDivisionError
        assert settings() == before != inside
    assert inside == dict(zip(names, (True, "standard", "allow", False), strict=True))


ENVIRONMENTS = (
    "JAX_NUMPY_DTYPE_PROMOTION=strict",
    "JAX_NUMPY_RANK_PROMOTION=raise",
    "JAX_TRANSFER_GUARD=disallow",
    "JAX_DISABLE_JIT=1",
    "JAX_DEBUG_NANS=True",
    "JAX_ENABLE_X64=0",
    "JAX_ENABLE_X64=1",
)
TINY = ["--epochs=2", "--iters=4"]
COMMANDS = {
    "show": ["show", "sqrt.npz"],
    "noise": ["noise", "sqrt.npz", "--params=1000"],
    "optimize": ["optimize", *TINY, "--eps=2", "--strategy=blt", "--seed=1", "--force"],
    "certify": ["certify", "sqrt.npz", "--eps=4", "--seed=1"],
    "account": [
        *("account", "balls-in-bins", *TINY, "--strategy=sqrt", "--noise-multiplier=2"),
        *("--delta=1e-3", "--seed=1"),
    ],
    "calibrate": ["calibrate", "sqrt.npz", "--eps=1", "--seed=1", "--certify-samples=1024"],
    "compare": ["compare", *TINY, "--eps=2", "--include=dpsgd,blt-2", "--samples=256"],
    "train": [
        *("train", "--sampling=balls-in-bins:bins=2,epochs=1", "--eps=8", "--delta=1e-3"),
        *("--data=store", "--width=16", "--layers=1", "--heads=2", "--length=16"),
        *("--pretrain-steps=2", "--model-seed=1"),
    ],
}
CHANGING = re.compile(r'"(?:\w*seconds\w*|\w*_per_second|date|\w*_bytes|path)": [^,\n}]+')


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a factorization and a token store."""
    made = tmp_path_factory.mktemp("settings")
    for name in "ab":
        rows = [{"user": f"{name}{n % 7}", "text": f"{name} cat sat on {n * n}"} for n in range(60)]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = ["--data=a.jsonl", "--public=b.jsonl", "--vocab-size=300"]
    command(made, ["data", "build", "store", *texts])
    command(made, ["optimize", *TINY, "--eps=2", "--strategy=sqrt", "--out=sqrt.npz"])
    return made


def command(folder, words, *settings):
    """What a command of a process of its own prints as JSON, in an environment with settings."""
    code = "import sys; from mfopt_cli.main import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | dict(setting.split("=") for setting in settings)
    found = subprocess.run(
        [sys.executable, "-c", code, *words, "--json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, (settings, found.stderr)
    assert "Traceback" not in found.stderr
    return CHANGING.sub("", found.stdout)


@pytest.fixture(scope="module")
def without(folder):
    """Answers of commands in an environment without settings, each asked once."""
    return functools.cache(lambda name: command(folder, COMMANDS[name]))


def answer(folder, name, *settings):
    words = COMMANDS[name]
    if name == "train":  # which records are drawn is a secret: it runs to its end
        command(folder, [*words, f"--out={'-'.join(settings)}"], *settings)
        return None
    return command(folder, words, *settings)


@pytest.mark.parametrize("name", [pytest.param("show", marks=pytest.mark.release), "noise"])
def test_settings_of_the_environment_change_no_answer(name, folder, without):
    assert answer(folder, name, *ENVIRONMENTS[:-1]) == without(name)


@pytest.mark.release
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("setting", ENVIRONMENTS)
def test_each_setting_of_the_environment_changes_no_answer(setting, name, folder, without):
    found = answer(folder, name, setting)
    assert found is None or found == without(name)
