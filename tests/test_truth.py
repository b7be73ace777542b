"""The benchmark of accounts against the truth: its oracle, some cells, and what it must refute."""

import dataclasses
import itertools
import math

import bench_truth
import numpy as np
import pytest
from scipy import integrate
from scipy.stats import norm

from mfopt.accounting import Mechanism
from mfopt.sampling import BallsInBins, BMinSep, FixedBatch, FixedOrder, FreshBins
from mfopt.strategies import (
    BandedSquareRoot,
    BandedToeplitz,
    Dense,
    Identity,
    SquareRoot,
    TimeScaled,
)

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


TWO, THREE = BandedToeplitz([1.0, 0.5]), BandedToeplitz([1.0, 0.6, 0.3])
SCALED = TimeScaled(Identity(), np.linspace(1, 2, 12), np.ones(12))
NEGATIVE = np.eye(9) + np.tril(np.random.default_rng(2).uniform(-1, 1, (9, 9)), -1)
DETERMINISTIC = {"certificate": "deterministic"}
ONE_BIN = TimeScaled(Identity(), [1.0, 2.0, 0.5], np.ones(3))
# mechanism, σ, δ, what the account is called, and how it is proved
FIXED = [
    (Mechanism(BallsInBins(6, 2)), 1.3, 1e-3, "exact", {}),
    (Mechanism(FreshBins(4, 3)), 1.3, 1e-3, "exact", {}),
    (Mechanism(FreshBins(2, 2)), 1.0, 1e-3, "exact", {}),
    (Mechanism(FreshBins(1, 3), ONE_BIN), 3.0, 1e-5, "exact", {}),
    (Mechanism(FixedOrder(3, 3), Dense(NEGATIVE)), 3.0, 1e-5, "bound", {}),
    (Mechanism(BallsInBins(6, 3), BandedSquareRoot(6)), 3.4, 1e-3, "bound", DETERMINISTIC),
]
SAMPLED = [
    (Mechanism(BallsInBins(5, 3), SquareRoot()), 9.0, 1e-3, "certified", {}),
    (Mechanism(BallsInBins(4, 2), group_size=3), 4.0, 1e-3, "certified", {}),
    (Mechanism(BallsInBins(4, 2), THREE, 4), 9.0, 1e-5, "certified", {}),
    (Mechanism(FreshBins(4, 3), SCALED), 2.0, 1e-3, "certified", {}),
    (Mechanism(FreshBins(3, 2), THREE, 2), 5.0, 1e-3, "certified", {}),
    (Mechanism(FreshBins(3, 2), TWO, 4), 8.0, 1e-5, "certified", {}),
    (Mechanism(BMinSep(4, 2, 2), TWO), 2.0, 1e-3, "certified", {}),
    (Mechanism(BMinSep(4, 2, 2), TWO, 2), 4.0, 1e-3, "certified", {}),
]
LATER = itertools.cycle((pytest.mark.ci, pytest.mark.release))


@pytest.mark.parametrize(
    ("mechanism", "sigma", "target", "status", "effort"),
    [
        *FIXED,
        *(pytest.param(*cell, marks=mark) for cell, mark in zip(SAMPLED, LATER, strict=False)),
    ],
)
def test_an_account_is_right_and_near_the_truth(mechanism, sigma, target, status, effort):
    rng = np.random.default_rng(0)
    report = bench_truth.compared(mechanism, sigma, target, rng, seed=0, **effort)
    assert report["wrong"] == [] and report["status"] == status
    assert report["refuted if 5% smaller"] or report["negative entries"]
    assert report["lower end"] > 0.98 * report["epsilon"]


@pytest.mark.parametrize("adjacency", ["zero-out", "replace"])
def test_a_group_in_fixed_batches_has_a_right_bracket(adjacency):
    mechanism = Mechanism(FixedBatch(2, 8, 3), group_size=3, adjacency=adjacency)
    report = bench_truth.compared(mechanism, 3.6, 1e-3, np.random.default_rng(0))
    assert report["wrong"] == [] and report["lower end"] > 0.75 * report["epsilon"]


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
