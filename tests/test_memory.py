"""The least error within so many arrays of noise memory."""

import numpy as np
import pytest
from commands import failure

from mfopt import optimize, query_error
from mfopt import strategies as S
from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.calibration import Calibration, calibrate
from mfopt.errors import UsageError
from mfopt.noise.choice import choose
from mfopt.optimize import memory, starts
from mfopt.optimize.objective import Objective
from mfopt.optimize.run import InterruptedOptimization, Optimized
from mfopt.sampling import BallsInBins
from mfopt.workloads import PrefixSums

SCHEME = BallsInBins(4, 4)
N = SCHEME.iterations


def search_stub(calls, stop_at=None):
    """The first coefficients of the square root by few buffers or bands: no search at all."""

    def stub(scheme, epsilon, delta, *, strategy, buffers, bands, init, **rest):
        calls.append((strategy, bands if strategy == "banded-toeplitz" else buffers, init))
        if strategy == "blt":
            found = S.BLT(np.full(buffers, 0.06), np.linspace(0.8, 0.5, buffers))
        elif strategy == "wave-blt":
            found = starts.wave(scheme.bins)
        else:
            found = S.BandedToeplitz(np.asarray(S.SquareRoot().toeplitz_coefs(N))[:bands])
        result = Optimized(found, 0.0, 1.0, "stub", np.zeros((0, 3)), 0.0)
        if stop_at == calls[-1][:2]:
            raise InterruptedOptimization(result)
        return result

    return stub


@pytest.mark.release
def test_each_bound_is_kept_and_more_memory_is_never_worse(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "optimize", search_stub(calls))
    found = memory.options(SCHEME, 2.0, 1e-4, 9)
    assert [call[:2] for call in calls] == [
        ("blt", memory.MOST_BUFFERS),  # once: more buffers gain nothing
        ("wave-blt", starts.FEWEST_WAVE),
        ("banded-toeplitz", 9),
        ("banded-toeplitz", 10),
        ("banded-toeplitz", 11),
    ]
    assert all(isinstance(call[2], S.BLT) for call in calls[2:])
    errors = [found[bound].rmse for bound in (8, 9, 10)]
    assert errors == sorted(errors, reverse=True)
    for bound, option in found.items():
        strategy = option.found.strategy
        assert option.memory == choose(strategy, N).slots <= bound
        sigma = calibrate(dominating_pair.exact(strategy, SCHEME), 2.0, 1e-4, samples=2**14, seed=5)
        rmse = query_error.rmse(PrefixSums(), strategy, N, sigma.noise_multiplier)
        assert option.rmse == pytest.approx(float(rmse), rel=0.01)
    # and without memory there is independent noise
    calls.clear()
    none = memory.options(SCHEME, 2.0, 1e-4, 0)
    assert isinstance(none[0].found.strategy, S.Identity) and none[0].memory == 0
    assert [call[:2] for call in calls] == [("blt", 1)] and set(none) == {0, 1}
    assert none[1].rmse < none[0].rmse


def test_an_interrupt_keeps_what_fits(monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "optimize", search_stub(calls, stop_at=("blt", 3)))
    with pytest.raises(InterruptedOptimization) as stop:
        memory.options(SCHEME, 2.0, 1e-4, 2)  # 1, 2, and while 3 is looked at
    assert stop.value.best.strategy.buffers == 2
    monkeypatch.setattr(memory, "optimize", search_stub(calls, stop_at=("blt", 2)))
    with pytest.raises(InterruptedOptimization) as stop:
        memory.options(SCHEME, 2.0, 1e-4, 2)  # the one that was asked for, unfinished
    assert stop.value.best.strategy.buffers == 2


def test_what_leaves_no_choice_is_refused(capsys):
    with pytest.raises(UsageError, match="memory"):
        memory.options(SCHEME, 2.0, 1e-4, -1)
    with pytest.raises(UsageError, match="buffers"):
        optimize.factorize(SCHEME, 2.0, 1e-4, memory=2, buffers=3)
    for extra in ("--strategy toeplitz", "--buffers 4", "--steps 5"):
        words = f"optimize --epochs 2 --iters 4 --eps 2 --memory 2 {extra}"
        assert "chosen by --memory" in failure(capsys, *words.split())


@pytest.mark.ci
def test_the_command_says_what_one_array_is_worth(monkeypatch, tmp_path, capsys):
    from mfopt_cli.main import main

    import mfopt

    monkeypatch.setattr(memory, "optimize", search_stub([]))
    path = tmp_path / "m.npz"
    main(f"optimize --epochs 4 --iters 4 --eps 2 --delta 1e-4 --memory 2 --out {path}".split())
    text = capsys.readouterr().out
    assert "at most 2 noise buffers; with 1: " in text and "; with 3: " in text
    found = mfopt.load(path)
    assert found.guarantee.status == "certified" and found.strategy.buffers == 2
    errors = found.provenance["memory"]["estimated_error"]
    minimized = Objective().loss(PrefixSums(), found.iterations)
    assert set(errors) == {"1", "2", "3"} and found.provenance["memory"]["at_most"] == 2
    error = np.exp(float(minimized(found.strategy, found.noise_multiplier)))
    assert errors["2"] == pytest.approx(error, rel=0.03)


@pytest.mark.parametrize(("bins", "samples"), [(256, 2**15), (512, 2**17)])
def test_all_c_of_a_scheme_are_compared_on_as_many_samples(monkeypatch, bins, samples):
    asked = []

    def calibrated(loss, epsilon, delta, *, samples, seed):
        asked.append((samples, seed))
        noisy = 0.02 if len(asked) == 1 else 1e-6  # of two C on the same samples, one
        return Calibration(1.0, noisy, -10.0, "remove", samples)

    monkeypatch.setattr(memory, "calibrate", calibrated)
    for bands in (2, 3):
        made = Optimized(S.BandedSquareRoot(bands), 0.0, 1.0, "stub", np.zeros((0, 3)), 0.0)
        memory.scored(made, BallsInBins(bins, 1), 2.0, 1e-4, PrefixSums(), Objective())
    assert asked == [(samples, memory._SEED)] * 2
