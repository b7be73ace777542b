"""The benchmark of accounts against the truth: its oracle, some cells, and what it must refute."""

import dataclasses
import math

import bench_truth
import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

from mfopt.sampling import BMinSep, FreshBins, Poisson, RandomPartition

NOTHING = np.zeros((1, 1)), np.zeros(1)
MIXTURE = np.array([[0.0], [1.5]]), np.log([0.9, 0.1])


def density(mixture):
    means, log_chances = mixture
    return lambda x: np.exp(log_chances) @ norm.pdf(x, loc=means[:, 0])


@pytest.mark.parametrize("pair", [(MIXTURE, NOTHING), (NOTHING, MIXTURE)])
@pytest.mark.parametrize("epsilon", [0.1, 0.5])
def test_delta_of_a_mixture_is_that_of_quadrature(pair, epsilon):
    first, second = map(density, pair)

    def hockey_stick(x):
        return max(first(x) - math.exp(epsilon) * second(x), 0.0)

    expected, _ = integrate.quad(hockey_stick, -12, 12, limit=1000, points=[-1, 0, 1, 2])
    actual, error = bench_truth.delta(*pair, epsilon, np.random.default_rng(0))
    assert expected == pytest.approx(0, abs=1e-12) or error < 0.021 * actual
    assert abs(actual - expected) < 5 * error + 1e-12


@pytest.mark.parametrize("distance", [1.0, 6.0])
@pytest.mark.parametrize("target", [1e-2, 1e-10])
def test_delta_of_a_gaussian_is_the_closed_form(distance, target):
    shift = np.full((1, 4), distance / 2), np.zeros(1)
    nothing = np.zeros((1, 4)), np.zeros(1)
    epsilon = distance**2 / 2 + distance * norm.isf(target)
    first, second = (
        norm.sf(epsilon / distance - distance / 2),
        norm.sf(epsilon / distance + distance / 2),
    )
    expected = first - math.exp(epsilon) * second
    actual, error = bench_truth.delta(shift, nothing, epsilon, np.random.default_rng(0))
    assert error < 0.021 * expected and abs(actual - expected) < 5 * error


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (FreshBins(3, 2), "fresh-bins"),
        (BMinSep(3, 2, 2), "b-min-sep"),
        (RandomPartition(4, 1, 2), "random-partition"),
        (Poisson(0.25, 4), "poisson"),
    ],
)
def test_patterns_have_the_rates_of_the_sampler(scheme, kind):
    units = 4000
    (law,) = bench_truth.laws(scheme, 1)
    drawn = scheme.draws(units, seed=3)
    taken = np.zeros((units, scheme.iterations), int)
    for step in range(scheme.iterations):
        taken[drawn(step), step] = 1
    assert {*map(tuple, taken)} <= {*law}
    for pattern, chance in law.items():
        count = (taken == pattern).all(axis=1).sum()
        assert abs(count - units * chance) < 5 * math.sqrt(units * chance) + 1


CELLS = [8, 11]  # balls-in-bins, and min-separation


@pytest.mark.ci
@pytest.mark.parametrize("number", CELLS)
def test_an_account_is_right(number):
    assert bench_truth.cell(1, number)["wrong"] == []


@pytest.mark.release
@pytest.mark.parametrize("number", range(1000, 1040))
def test_a_random_account_is_right(number):
    report = bench_truth.cell(1, number)
    assert not (report or {}).get("wrong")


def smaller_epsilon(answer):
    return dataclasses.replace(answer, epsilon=0.95 * answer.epsilon)


def higher_lower_end(answer):
    bracket = [1.05 * answer.epsilon, 1.05 * answer.epsilon]
    return dataclasses.replace(answer, details={**answer.details, "bracket": bracket})


@pytest.mark.ci
@pytest.mark.parametrize(
    ("changed", "wrong"), [(smaller_epsilon, ["epsilon"]), (higher_lower_end, ["lower end"])]
)
def test_a_false_account_is_refuted(monkeypatch, changed, wrong):
    honest = bench_truth.account
    monkeypatch.setattr(
        bench_truth, "account", lambda *given, **more: changed(honest(*given, **more))
    )
    assert bench_truth.cell(1, CELLS[0])["wrong"] == wrong
