"""mfopt noise: what it prints is what the stream does."""

import functools
import json

import numpy as np
import pytest
from commands import ended
from statements import stated

import mfopt
from mfopt import strategies as S
from mfopt.errors import FailureError, UsageError
from mfopt.experiments import mechanism_plot
from mfopt.factorization import load
from mfopt.noise import NoiseStream, from_factorization, measure
from mfopt.sampling import BallsInBins, Poisson


@pytest.fixture
def saved(tmp_path):
    def save(strategy):
        path = tmp_path / "factorization.npz"
        return str(stated(strategy, BallsInBins(bins=8, epochs=3)).save(path))

    return save


run = functools.partial(ended, "noise")


def test_json_gives_memory_and_time(saved, capsys):
    path = saved(S.BandedToeplitz([1.0, 0.5, 0.25]))
    assert run(path, "--params", "20k", "--repeats", "2", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["parameters"], printed["buffers"], printed["iterations"]) == (20_000, 2, 24)
    assert printed["buffer_bytes"] == 2 * 4 * 20_000
    assert 3 * 4 * 20_000 <= printed["peak_bytes"] <= 4 * 4 * 20_000 + 4096
    assert printed["run_seconds"] == pytest.approx(24 * printed["first_seconds"])
    assert not printed["extrapolated"]


def test_a_strategy_is_described_in_words_everywhere(saved, capsys):
    blt = S.BLT([0.3], [0.6])
    path = saved(S.TimeScaled(blt, np.linspace(1, 2, 24), np.ones(24)))
    words = "blt, buffers 1, time-scaled"
    assert run(path, "--params", "1e3", "--repeats", "1") == 0
    assert words in capsys.readouterr().out
    factorization = load(path)
    assert words in repr(from_factorization(factorization, clip_norm=1.0, allow_uncertified=True))
    assert words in mechanism_plot.draw(factorization).get_suptitle()


def test_a_picture_has_independent_noise_beside_the_mechanism(saved, monkeypatch):
    path = saved(S.SquareRoot())
    factorization = load(path)
    drawn = []
    monkeypatch.setattr(mechanism_plot, "plot", lambda *values: drawn.append(values))
    assert ended("plot", path) == 0
    ((_, _, (label, sigma)),) = drawn
    stated = factorization.guarantee
    poisson = mfopt.account(Poisson(1 / 8, 24), epsilon=stated.epsilon, delta=stated.delta)
    assert (label, sigma) == ("DP-SGD, Poisson", poisson.noise_multiplier)
    *_, curve = mechanism_plot.panels(factorization, (label, sigma))[2].curves
    # independent noise adds up: variance σ² more in each step
    assert curve.label == label and curve.y == pytest.approx(sigma * np.sqrt(np.arange(1, 25)))
    # a control: without a reference there is none
    curves = mechanism_plot.panels(factorization)[2].curves
    assert label not in [curve.label for curve in curves]


def test_table_says_that_a_growing_step_is_extrapolated(saved, capsys):
    path = saved(S.SquareRoot())
    assert run(path, "--params", "1e4", "--repeats", "1") == 0
    text = capsys.readouterr().out
    assert "regenerated from the key" in text and "(extrapolated)" in text and "10,000" in text
    assert run(path, "--params", "1e4", "--repeats", "1", "--past", "store") == 0
    assert "stored outputs or draws" in capsys.readouterr().out


@pytest.mark.parametrize("count", ["0", "1.5", "many", "-3"])
def test_a_bad_number_of_parameters_exits_with_2(saved, count, capsys):
    assert run(saved(S.Identity()), "--params", count) == 2
    assert "--params" in capsys.readouterr().err


def test_too_little_memory_is_said_before_it_is_taken(saved, capsys):
    assert run(saved(S.BandedToeplitz(np.ones(3))), "--params", "1e14") == 1
    assert "GiB are free" in capsys.readouterr().err


def test_memory_limits():
    stream = NoiseStream(
        S.BLT(np.ones(2), np.ones(2)), iterations=4, noise_multiplier=1.0, clip_norm=1.0
    )
    free = measure.free_bytes()
    assert free is None or free > 0
    with pytest.raises(FailureError, match="narrower"):
        measure.refuse_too_large(stream, 10**14)
    measure.refuse_too_large(stream, 10)
    with pytest.raises(UsageError, match="repeats"):
        measure.measure(stream, 10, repeats=0)


def test_secure_noise_says_what_it_costs(saved, capsys):
    path = saved(S.BandedToeplitz([1.0, 0.5, 0.25]))
    options = (path, "--params", "1e3", "--repeats", "1", "--secure")
    assert run(*options, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["secure"] and printed["buffer_bytes"] == 2 * 8 * 1000
    assert (
        2.0 < printed["secure_epsilon"] < 2.0 + 1e-4 and 1e-5 < printed["secure_delta"] < 1.001e-5
    )
    assert run(*options) == 0
    assert "secure epsilon" in capsys.readouterr().out
    assert run(*options, "--buffer-dtype", "bfloat16") == 2
    assert "float64" in capsys.readouterr().err
