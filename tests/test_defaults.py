"""What is searched where no form of C is asked for, and which of several forms is kept."""

import functools

import numpy as np
import pytest
from questions import factorized
from questions import searched as optimized
from selection import before_release

import mfopt
from mfopt import query_error
from mfopt import strategies as S
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.calibration import calibrate
from mfopt.errors import UsageError
from mfopt.optimize import auto, defaults, run, starts
from mfopt.sampling import BallsInBins, BMinSep, FreshBins
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(4, 4)
BOTH = ("wave-blt", "blt")


def test_a_wave_is_tried_where_it_pays():
    scheme, large = BallsInBins(128, 2), BallsInBins(129, 2)
    assert defaults.kinds(scheme, defaults.WAVE_FROM, 4) == BOTH
    assert defaults.kinds(scheme, np.nextafter(defaults.WAVE_FROM, 0), 4) == ("blt",)
    assert defaults.kinds(scheme, 16.0, starts.FEWEST_WAVE - 1) == ("blt",)
    assert defaults.kinds(large, 16.0, 4) == ("blt",)
    assert defaults.kinds(BallsInBins(2, 129), 16.0, 4) == ("blt",)
    assert defaults.kinds(FreshBins(128, 2), 16.0, 4) == ("cleared-blt",)
    # a band of an epoch keeps no more
    assert defaults.kinds(FreshBins(5, 2), 16.0, 4) == ("banded-toeplitz",)
    assert defaults.kinds(BMinSep(128, 2, 64), 16.0, 4) == ("banded-toeplitz",)


def searched(strategy=BOTH, **options):
    options = {"samples": 256, "steps": 3, "seed": 0, **options}
    return optimized(SCHEME, 8.0, 1e-4, strategy=strategy, **options)


@functools.cache
def best():
    """What is found where both forms are searched, and what was reported meanwhile."""
    steps = []
    return searched(progress=steps.append), steps


def rmse(strategy):
    loss = dominating_pair.exact(strategy, SCHEME)
    sigma = calibrate(loss, 8.0, 1e-4, samples=2**15, seed=5).value
    return float(query_error.rmse(PrefixSums(), strategy, SCHEME.iterations, sigma))


@pytest.mark.parametrize("iters", before_release([1, 3], 0))
def test_runs_of_a_few_iterations_have_as_few_buffers(iters, tmp_path):
    from mfopt_cli.main import main

    scheme = BallsInBins(iters, 1)
    assert defaults.buffers(scheme) == iters and defaults.buffers(BallsInBins(4, 2)) == 4
    assert max(candidate.size for candidate in auto.candidates([scheme], 2.0, 15)) <= iters
    optimum = optimized(scheme, 2.0, 1e-3, samples=64, steps=1, seed=1)
    assert optimum.strategy.buffers == iters
    path = tmp_path / "few.npz"
    words = f"--epochs 1 --iters {iters} --eps 8 --samples 64 --steps 1 --seed 1 --quiet"
    main(["optimize", *words.split(), "--out", str(path)])
    assert mfopt.load(path).strategy.base.buffers == iters
    with pytest.raises(UsageError, match=f"Use at most {iters}"):
        optimized(scheme, 2.0, 1e-3, buffers=4)


@pytest.mark.release
def test_the_better_form_is_kept_whichever_comes_first():
    actual, steps = best()
    assert set(actual.forms) == set(BOTH) and actual.strategy.kind in BOTH
    assert actual.loss == actual.forms[actual.strategy.kind] == min(actual.forms.values())
    optimum = searched(BOTH[::-1])
    assert optimum.strategy.kind == actual.strategy.kind and optimum.forms == actual.forms
    assert searched([actual.strategy.kind]).forms == {}  # nothing to choose from
    # one count over both searches, which never passes its ceiling
    assert [step.done for step in steps] == list(range(1, len(steps) + 1))
    assert all(step.done <= step.total for step in steps)
    totals = [step.total for step in steps]
    assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize("better", BOTH)
def test_fresh_samples_decide(monkeypatch, better):
    real = run._Job._afresh

    def judged(job, points, samples, *sigma):
        recorded = real(job, points, samples, *sigma)
        if len({point.build for point in points}) < 2:  # ends and starts of one kind
            return recorded
        return [
            position._replace(value=float("nan") if kind != better else position.value)
            for kind, position in zip(BOTH, recorded, strict=True)
        ]

    monkeypatch.setattr(run._Job, "_afresh", judged)
    assert searched().strategy.kind == better


@pytest.mark.parametrize("steps_before", [1, 6])
def test_an_interrupt_keeps_the_better_so_far(steps_before):
    recorded = []

    def progress(step):
        recorded.append(step)
        if len(recorded) == steps_before:
            raise KeyboardInterrupt

    with pytest.raises(run.InterruptedOptimization) as stop:
        searched(BOTH, progress=progress)
    assert len(recorded) == steps_before  # nothing went on behind the user's back
    best = stop.value.best
    assert best.forms == {} and np.exp(best.loss) == pytest.approx(rmse(best.strategy), rel=0.1)
    lowest = min(recorded, key=lambda step: step.trace.best_value).stage.removeprefix(
        "optimizing, "
    )
    assert best.strategy.kind == ("wave-blt" if steps_before == 1 else lowest)


def test_a_start_says_which_forms_are_searched():
    blt = S.BLT([0.3, 0.2, 0.1, 0.1], [0.9, 0.5, 0.3, 0.1])
    optimum = searched(init=blt, steps=1)
    assert optimum.strategy.kind == "blt" and optimum.forms == {}
    assert searched(init=starts.wave(4), steps=1).strategy.kind == "wave-blt"
    with pytest.raises(UsageError, match="cannot start a wave-blt or blt strategy of this size"):
        searched(init=S.Identity())
    with pytest.raises(UsageError, match="names no kind"):
        searched(())
    with pytest.raises(UsageError, match="strategy = 'nonsense'"):
        searched(("blt", "nonsense"))


def test_the_library_takes_the_usual_form(monkeypatch):
    requests = []

    def stub(scheme, question, progress):
        requests.append((scheme.kind, question.form.strategy))
        raise UsageError("enough")

    monkeypatch.setattr("mfopt.optimize.pipeline.optimize", stub)
    for scheme, epsilon, options in (
        (SCHEME, 2.0, {}),
        (SCHEME, 8.0, {}),
        (SCHEME, 8.0, {"strategy": "blt"}),
        (FreshBins(16, 2), 8.0, {}),
    ):
        with pytest.raises(UsageError, match="enough"):
            factorized(scheme, epsilon, 1e-4, **options)
    assert requests == [
        ("balls-in-bins", ("blt",)),
        ("balls-in-bins", BOTH),
        ("balls-in-bins", ("blt",)),
        ("fresh-bins", ("cleared-blt",)),
    ]


@pytest.mark.release
def test_the_command_names_the_form_that_it_kept(tmp_path, work_folder, monkeypatch, capsys):
    from mfopt_cli.main import main

    monkeypatch.setattr("mfopt.optimize.pipeline.optimize", lambda *_, **__: best()[0])
    main(["optimize", "--epochs", "4", "--iters", "4", "--eps", "8", "--certify-samples", "4096"])
    text = capsys.readouterr().out
    (path,) = tmp_path.iterdir()
    factorization = mfopt.load(path)
    kept = factorization.strategy.kind
    (other,) = set(BOTH) - {kept}
    assert path.name == f"mfopt-{kept}-4x4-eps8.npz"
    assert f"{kept} is better; {other}: +" in text and set(
        factorization.provenance["forms"]
    ) == set(BOTH)
