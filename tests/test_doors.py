"""The command line and Python: the same mechanism, or the same refusal, for the same question."""

import dataclasses
import functools
import itertools
import os
import pkgutil
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from commands import failure
from mfopt_cli.main import cli

import mfopt
from mfopt import _api, errors
from mfopt._runtime import _files, _sizes
from mfopt.accounting import Effort
from mfopt.factorization import proofs
from mfopt.optimize import Search, closed_form, kinds, pipeline
from mfopt.progress import Progress, ambient, listening
from mfopt.sampling import BallsInBins, MinSeparation
from mfopt.sampling.named import NAMES
from mfopt.strategies import Identity
from mfopt.workloads import PrefixSums

SAMPLINGS = (*NAMES, "auto")
SHAPES = ((1, 4), (2, 8), (3, 5), (2, 1))
# options of the command line -> the argument in Python
ARGUMENTS = {
    "--reassign-every": "reassign_every",
    "--separation": "separation",
    "--max-participations": "max_participations",
    "--strategy": "strategy",
    "--buffers": "buffers",
    "--bands": "bands",
    "--memory": "memory",
    "--objective": "objective",
    "--schedule": "schedule",
    "--delta": "delta",
    "--unit": "privacy_unit",
    "--seed": "seed",
    "--certify-samples": "certify_samples",
    "--certificate": "certificate",
}
SEARCHES = {"--samples": "samples", "--steps": "steps"}
VALUES = {
    "--reassign-every": (1, 2, 3),
    "--separation": (1, 2, 4, 9),
    "--max-participations": (1, 2, 50),
    "--strategy": (*kinds.all_names(), None),
    "--buffers": (0, 1, 3, 4, 100),
    "--bands": (0, 1, 2, 4, 8, 40),
    "--memory": (0, 1, 4),
    "--objective": ("robust", "final", "rmse", "max"),
    "--schedule": ("constant", "cosine"),
    "--delta": (1e-3, 1e-9, 2.0, 0.0),
    "--unit": ("user",),
    "--seed": (0, 7),
    "--certify-samples": (16, 512),
    "--certificate": ("monte-carlo", "deterministic"),
    "--samples": (2, 128),
    "--steps": (0, 5),
    "--time-scale": (True, False),
}


@pytest.fixture
def work(monkeypatch):
    """What the library would work on, recorded in place of the work."""
    calls = []

    def ended(*facts):
        calls.append(facts)
        raise errors.FailureError("stub")

    def described(name, *arguments, progress=None, provenance=None):
        ended(name, arguments)

    def searched(scheme, question, progress):
        ended("search", scheme, question)

    def proved(mechanism, *target, effort, **_):
        ended("proof", mechanism.digest(1.0), mechanism.privacy_unit, target, effort)

    monkeypatch.setattr(_api, "least_error", functools.partial(described, "auto"))
    monkeypatch.setattr(pipeline, "optimize", searched)
    monkeypatch.setattr(closed_form, "search_first_of", searched)
    monkeypatch.setattr(proofs, "calibrated", proved)
    return calls


def questions(count, seed):
    """Random options of ``optimize``, with one or two beyond sampling, strategy and shape."""
    rng = random.Random(seed)
    for sampling, shape in itertools.islice(
        itertools.cycle(itertools.product(SAMPLINGS, SHAPES)), count
    ):
        options = {"--sampling": sampling}
        for name in rng.sample(sorted(VALUES), rng.randint(0, 3)):
            value = rng.choice(VALUES[name])
            if value is not None:
                options[name] = value
        yield shape, rng.choice((0.5, 2.0, 8.0)), options


def words(shape, epsilon, options):
    line = ["optimize", "--epochs", shape[0], "--iters", shape[1], "--eps", epsilon]
    for name, value in options.items():
        if name == "--time-scale":
            line.append(name if value else "--no-time-scale")
        else:
            line += [name, value]
    return [*map(str, line), "--quiet"]


def called(shape, epsilon, options):
    keywords = {ARGUMENTS[name]: value for name, value in options.items() if name in ARGUMENTS}
    searched = {SEARCHES[name]: value for name, value in options.items() if name in SEARCHES}
    scale = options.get("--time-scale")
    size = {"epochs": shape[0], "iterations_per_epoch": shape[1], "epsilon": epsilon}
    sampling = options["--sampling"]
    search = Search(time_scale=scale, **searched)
    return mfopt.factorize(
        **size, sampling=sampling, search=search, workload=PrefixSums(), **keywords
    )


def refusal(function, *arguments, **options):
    """The UsageError of a call; None where it ends otherwise, as calls may."""
    try:
        function(*arguments, **options)
    except mfopt.UsageError as problem:
        return problem
    except errors.FailureError:
        return None
    return None


@pytest.mark.parametrize("seed", range(4))
def test_both_doors_ask_the_library_for_the_same_or_refuse_the_same(seed, work, work_folder):
    refused = answered = 0
    for question in questions(72, seed):
        options = question[2]
        problem = refusal(called, *question)
        expected, work[:] = list(work), []
        shown = CliRunner().invoke(cli, words(*question), prog_name="mfopt")
        assert shown.exception is None or isinstance(shown.exception, SystemExit), shown.exception
        python_work, work[:] = list(work), []
        assert shown.exit_code == (1 if problem is None else 2), (question, problem, shown.output)
        if problem is None:
            answered += 1
            assert python_work == expected, question
        else:  # which of several wrong options is named may differ
            refused += 1
            typed = [*options, "--epochs", "--iters"]
            assert any(name in shown.output for name in typed), (problem, shown.output)
    assert min(refused, answered) > 15  # a control: both happen


HOSTILE = (
    *(None, True, False, 0, -1, 1, 2, 3, 2**31, 2**70, 0.5, 1.0, -0.0, 1e309, float("nan")),
    *("", "2", "blt", "x", "identity", "poisson", "\n", b"2", [], {}, (), object(), 1j),
    *(np.int64(3), np.float32(2), np.bool_(True), np.ones(3), np.array(2), np.zeros((0, 2))),
    *(["blt", 5], ("identity", "sqrt"), SimpleNamespace(), BallsInBins(4, 2), len, int),
    *("a" * 300, "a\0", "\ud800"),
)
CALLS = {
    "factorize": {
        **dict.fromkeys(("reassign_every", "separation", "max_participations", "strategy")),
        **dict.fromkeys(("buffers", "bands", "memory", "workload", "objective", "schedule")),
        **dict.fromkeys(("search", "seed", "certify_samples")),
        "epochs": 2,
        "iterations_per_epoch": 4,
        "epsilon": 2.0,
        "delta": 1e-5,
        "sampling": "balls-in-bins",
        "privacy_unit": "example",
        "certificate": "monte-carlo",
    },
    "account": {
        "mechanism": BallsInBins(4, 2),
        "noise_multiplier": None,
        "epsilon": 2.0,
        "delta": 1e-5,
        "samples": None,
        "seed": None,
        "certificate": "monte-carlo",
    },
    "certify": {"epsilon": None, "delta": None, "samples": None, "seed": None},
    "calibrate": {"epsilon": 3.0, "delta": 1e-5, "samples": None, "seed": None},
    "load": {"path": "x.npz"},
    "Mechanism": {"sampling": BallsInBins(4, 2), "strategy": Identity(), "group_size": 1},
    "sampling.Poisson": {"probability": 0.1, "iterations": 8},
    "noise.from_factorization": {"clip_norm": 1.0},
    "final_model.error": {"strategy": Identity(), "n": 8, "noise_multiplier": 1.0},
    "final_model.directions": {"n": 8},
    "final_model.learning_rates": {"schedule": "linear", "n": 8},
    "workloads.linear_cooldown": {"n": 8, "start": 1, "stop": 4, "final": 0.1},
    "query_error.row_variances": {"workload": PrefixSums(), "strategy": Identity(), "n": 8},
    "sampling.MinSeparation.check": {"steps": [1, 5]},
    "training.verification.read": {"report": "x.json"},
    "training.receipts.write_receipt": {"path": "x.json", "run": None, "state": None},
    "experiments.statement.of_factorization": {"units": None},
    "training.rounds.PrivateRounds": {"folder": "x", "clip_norm": 1.0, "cohort": 2, "seed": None},
    "Factorization.save": {"path": "x.npz", "force": True},
}
STATED = ("strategy", "noise_multiplier", "sampling", "workload", "guarantee")


@pytest.fixture(scope="module")
def factorization():
    return mfopt.factorize(epochs=2, iterations_per_epoch=4, epsilon=2.0, strategy="identity")


def with_effort(function, *, samples, seed, **options):
    return function(effort=Effort(samples=samples, seed=seed), **options)


def test_hostile_arguments_are_refused_by_the_name_that_was_typed(
    factorization, work, work_folder, monkeypatch
):
    monkeypatch.setattr(_sizes, "free_memory", lambda: 2**34)
    rng = random.Random(1)
    outcomes = {"refused": 0, "taken": 0}
    calls = {**CALLS, "Factorization": {field: getattr(factorization, field) for field in STATED}}
    proofs_and_noise = ("certify", "calibrate", "noise.from_factorization")
    for name in (*proofs_and_noise, "experiments.statement.of_factorization"):
        calls[name] = {**calls[name], "factorization": factorization}
    rounds = dataclasses.replace(factorization, sampling=MinSeparation(8, 4, 2))
    fixed = {  # arguments beside those, which nothing hostile replaces
        "final_model.directions": {"schedules": ("linear",)},
        "sampling.MinSeparation.check": {"self": MinSeparation(8, 4, 2)},
        "Factorization.save": {"self": factorization},
        "training.rounds.PrivateRounds": {"params": [np.zeros(2)], "factorization": rounds},
    }
    for number in range(3000):
        name = sorted(calls)[number % len(calls)]
        arguments = dict(calls[name])
        for argument in rng.sample(sorted(arguments), min(rng.randint(1, 2), len(arguments))):
            arguments[argument] = rng.choice(HOSTILE)
        mechanism = (arguments.pop("mechanism"),) if name == "account" else ()
        function = pkgutil.resolve_name(f"mfopt.{name}")
        if name in ("certify", "calibrate"):
            function = functools.partial(with_effort, function)
        problem = refusal(function, *mechanism, **arguments, **fixed.get(name, {}))
        outcomes["taken" if problem is None else "refused"] += 1
        typed = {*arguments, "mechanism", "noise_multiplier", "epsilon", "delta"}
        typed.add("epochs × iterations_per_epoch")
        parts = () if problem is None else (problem.argument or "epsilon").split(", ")
        assert typed.issuperset(parts), (name, problem)
    assert outcomes["refused"] > 500 and outcomes["taken"] > 25


def test_an_argument_of_another_kind_is_refused(factorization):
    with pytest.raises(errors.UsageError, match="effort = 'int'"):
        mfopt.certify(factorization, effort=-1)


def test_no_file_takes_the_place_of_a_device(factorization, tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe.npz")
    with pytest.raises(errors.UsageError, match="is a directory or a device"):
        factorization.save(pipe, force=True)
    with pytest.raises(FileExistsError):
        _files.write(pipe, "", force=True)


def test_numbers_of_numpy_are_taken_and_can_be_saved(tmp_path):
    by_numpy = mfopt.factorize(
        epochs=np.int64(2),
        iterations_per_epoch=np.int32(4),
        epsilon=np.float32(2),
        delta=np.float64(1e-5),
        strategy="identity",
        seed=np.int64(3),
    )
    made = mfopt.load(by_numpy.save(tmp_path / "made.npz"))
    assert made.provenance["seed"] == "pinned 3" and made.guarantee.details["seed"] == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_a_full_output_says_what_is_complete(unbuffered, tmp_path):
    import subprocess

    line = "optimize --epochs 2 --iters 4 --eps 2 --sampling poisson --out made.npz --json"
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "mfopt", *line.split()],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert process.returncode == 1 and "Traceback" not in process.stderr
    assert process.stderr.endswith("made.npz is complete\n"), process.stderr
    assert mfopt.load(tmp_path / "made.npz").guarantee.status == "exact"


def test_usage_errors_have_one_style(capsys):
    for line in ("optimize --eps 2", "optimize --nothing", "account dpsgd --eps 2", "show", "nix"):
        said = failure(capsys, *line.split())
        assert said.startswith("mfopt: error: ") and said.count("\n") == 1, said


def test_progress_of_one_answer_counts_samples(monkeypatch):
    import mfopt.accounting

    def answered(mechanism, **_):
        ambient(Progress("certifying", 4096, 65536, "samples"))
        return mfopt.account(BallsInBins(4, 2), noise_multiplier=2.0, delta=1e-5)

    monkeypatch.setattr(mfopt.accounting, "account", answered)
    line = "account fixed-order --epochs 2 --iters 4 --noise-multiplier 2 --delta 1e-5"
    shown = CliRunner().invoke(cli, line.split(), prog_name="mfopt")
    assert "4,096 of 65,536 samples" in shown.stderr and "answers" not in shown.stderr
    heard = []
    with listening(heard.append):
        ambient(Progress("inside"))
    ambient(Progress("outside"))
    assert [event.stage for event in heard] == ["inside"]
