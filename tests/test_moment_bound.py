"""Certificates without samples: bounds by moments against the truth and enumeration."""

import dataclasses
import itertools
import math

import bench_truth
import numpy as np
import pytest
from sources import ROOT

import mfopt
from mfopt import strategies as S
from mfopt._runtime._float64 import scope
from mfopt.accounting import Effort, Mechanism
from mfopt.accounting.monte_carlo import (
    dominating_pair,
    evidence,
    importance,
    kept_bins,
    moment_bound,
)
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.evidence import Point
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.calibration import certify, release
from mfopt.errors import FailureError, UsageError
from mfopt.factorization import proofs
from mfopt.sampling import BallsInBins, FreshBins

SMALL = BallsInBins(bins=6, epochs=3)
SQRT = S.BandedSquareRoot(6)
DEFAULT = ROOT / "artifacts/factorizations/optimize-blt-16x128-eps2.npz"


def small():
    return BallsInBinsLoss(dominating_pair.exact(SQRT, SMALL))


def bounds(loss, sigma, epsilon):
    return np.exp(moment_bound.MomentBound(loss).log_deltas(sigma, epsilon))


def two_modes(gram, sigma, epsilon):
    """[δ of removing, of adding] for two modes with this Gram matrix, by quadrature."""
    z = np.linspace(-9, 10, 2001)
    weight = np.exp(-(z**2) / 2)
    weight /= weight.sum()
    factor = np.linalg.cholesky(gram) / sigma
    first = factor[0, 0] * z[:, None] + 0 * z
    second = factor[1, 0] * z[:, None] + factor[1, 1] * z
    square = np.diagonal(gram) / sigma**2 / 2
    ratio = (np.exp(first - square[0]) + np.exp(second - square[1])) / 2
    above = ratio - math.exp(epsilon), 1 - math.exp(epsilon) * ratio
    return np.array([weight @ np.maximum(excess, 0) @ weight for excess in above])


@pytest.mark.parametrize(
    ("overlap", "sigma", "epsilon"), [(0.0, 1.0, 1.5), (0.3, 0.7, 3.0), (0.8, 3.0, 0.3)]
)
def test_two_modes_by_quadrature(overlap, sigma, epsilon):
    gram = np.array([[1.0, overlap], [overlap, 0.8]])
    loss = BallsInBinsLoss(dominating_pair.DominatingPair(gram, np.linalg.cholesky(gram)))
    truth = two_modes(gram, sigma, epsilon)
    actual = bounds(loss, sigma, epsilon)
    assert np.all(actual >= truth * (1 - 1e-6))
    assert np.all(actual <= 2.5 * truth + 1e-12)
    # a control: with a tenth more noise the bound is no bound of this
    assert np.any(bounds(loss, 1.1 * sigma, epsilon) < truth)


def test_moments_are_sums_over_tuples():
    overlaps = np.array([[0.9, 0.4, 0.1], [0.4, 0.7, 0.3], [0.1, 0.3, 0.8]])
    for places, actual in enumerate(kept_bins.tuples(overlaps), 2):
        total = sum(
            math.exp(sum(overlaps[a, b] for a, b in itertools.combinations(bins, 2)))
            for bins in itertools.product(range(3), repeat=places)
        )
        assert actual == pytest.approx(total / 3**places, rel=1e-13)
    assert places == 4


@pytest.mark.ci
def test_the_second_moment_of_reassigned_bins():
    scheme, strategy = FreshBins(bins=3, epochs=3), S.BandedSquareRoot(3)
    (steps,), sigma = bench_truth.laws(scheme, 1), 1.3
    modes = np.array([*steps]) @ strategy.materialize(9).T / sigma
    expected = np.mean(np.exp(modes @ modes.T - 0.1))
    actual = law(scheme).loss(strategy).tuples(sigma, 0.1)
    assert actual == (pytest.approx(expected, rel=1e-12),)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_the_polynomial_is_above_the_payoff_everywhere(direction):
    with scope():
        moments = small().moments(Point(1.7, 1.0))
        tilts = importance.remove_tilts(moments.ceilings, moments.point)
        if direction == "add":
            tilts = [importance.mean_tilt(moments.ceilings, moments.point)]
        problem = moment_bound._Problem.of(moments, direction, tilts[0])
        nodes = np.linspace(moment_bound._LOW, problem.highest, 400)
        weights = problem._weights(nodes, np.zeros_like(nodes))
        cells = np.linspace(moment_bound._LOW, problem.highest, 20_000)
        missing, elsewhere = problem._missing(weights, cells)
        theta = max(float(np.max(missing)), elsewhere, 0.0)
        y = np.random.default_rng(0).uniform(-15, problem.highest + 1, 50_000)
        unit = problem._unit(y)
        above = weights @ (problem.terms.values(y) / unit) - problem.payoff(y) / unit
        assert theta < 1 and np.min(above) >= -theta * (1 + 1e-6)
        # a control: lowered, it is seen to be below
        lower, _ = problem._missing(weights - 0.01 * np.eye(len(weights))[0], cells)
        assert np.max(lower) > theta + 1e-4
        # a leading term below 0 is not taken for one that outweighs the payoff
        bent = np.where(np.arange(len(weights)) < problem.terms.signed, weights, 0.0)
        bent[problem.terms.signed - 1] = -1.0
        assert problem._missing(bent, cells)[1] == math.inf


@pytest.mark.release
def test_sigma_at_the_setting_of_the_readme():
    factorization = mfopt.load(DEFAULT)
    sigma = factorization.noise_multiplier  # certified by samples
    loss = factorization.loss()
    assert np.max(bounds(loss, 1.01 * sigma, 2.0)) <= 1e-5
    assert np.min(bounds(loss, 0.97 * sigma, 2.0)) > 1e-5  # a control: the truth is above


@pytest.mark.ci
def test_released_certified_saved_and_proved_again(tmp_path):
    sampled = mfopt.factorize(
        epochs=2, iterations_per_epoch=8, epsilon=2.0, strategy="banded-sqrt", seed=1
    )
    calibration = mfopt.calibrate(sampled, epsilon=2.0, effort=Effort(certificate="deterministic"))
    assert calibration.noise_multiplier <= 1.01 * sampled.noise_multiplier
    stated = calibration.guarantee
    assert (stated.status, stated.failure_probability) == ("certified", 0.0)
    assert stated.details["certificate"] == stated.certificate == "deterministic"
    assert sampled.guarantee.details["certificate"] == "monte-carlo"
    assert str(stated.details["samples"]) == "0" and "deterministic" in stated.method
    path = tmp_path / "found.npz"
    calibration.save(path)
    read = mfopt.load(path)
    assert read.guarantee == stated
    repeated = proofs.prove(read.mechanism, read.noise_multiplier, read.guarantee)
    assert (repeated.method, repeated.failure_probability) == (stated.method, 0.0)
    for question in ({"epsilon": 2.0}, {"noise_multiplier": calibration.noise_multiplier}):
        answer = mfopt.account(
            calibration.mechanism, delta=1e-5, certificate="deterministic", **question
        )
        assert answer.failure_probability == 0 and answer.details["certificate"] == "deterministic"
        assert answer.epsilon == pytest.approx(2.0, rel=1e-3)
        assert answer.noise_multiplier == pytest.approx(calibration.noise_multiplier, rel=1e-3)


def test_what_is_not_proved_is_refused():
    loss = small()
    sigma = release(loss, 1.0, 1e-4, effort=Effort(certificate="deterministic")).noise_multiplier
    assert certify(loss, sigma, 1.0, 1e-4, effort=Effort(certificate="deterministic")).beta == 0
    with pytest.raises(FailureError, match="without samples"):
        certify(loss, 0.97 * sigma, 1.0, 1e-4, effort=Effort(certificate="deterministic"))
    with pytest.raises(UsageError, match="no effect on a deterministic"):
        release(loss, 1.0, 1e-4, effort=Effort(samples=1000, certificate="deterministic"))
    with pytest.raises(UsageError, match="must be one of"):
        release(loss, 1.0, 1e-4, effort=Effort(certificate="proved"))
    group = dataclasses.replace(Mechanism(SMALL, SQRT), group_size=2)
    with pytest.raises(UsageError, match="no deterministic account"):
        mfopt.account(group, epsilon=1.0, delta=1e-5, certificate="deterministic")


def test_what_is_no_number_proves_nothing(monkeypatch):
    with scope():
        moments = small().moments(Point(1.7, 1.0))
        tilt = importance.mean_tilt(moments.ceilings, moments.point)
        ceiling = evidence.ceiling_alone(tilt).value
        assert moment_bound.divergence(moments, "add") < ceiling  # a control
        problem = moment_bound._Problem.of(moments, "add", tilt)
        nodes = np.linspace(moment_bound._LOW, problem.highest, 400)
        weights = problem._weights(nodes, np.zeros_like(nodes))
        for name, value in (
            ("_below", math.nan),
            ("_missing", (np.zeros(3), math.nan)),
            ("_missing", (np.array([0.0, math.nan]), 0.0)),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(moment_bound._Problem, name, lambda *_, value=value: value)
                assert problem.solved() == math.inf
        assert math.isnan(problem._below(weights, nodes[:1], math.nan))
        with monkeypatch.context() as patched:
            patched.setattr(moment_bound._Problem, "solved", lambda _: math.nan)
            assert moment_bound.divergence(moments, "add") == min(ceiling, 1.0)
            broken = evidence.UpperBound(math.nan, 0.0, math.nan, 0, 1.0)
            patched.setattr(moment_bound, "ceiling_alone", lambda _: broken)
            assert moment_bound.divergence(moments, "add") == 1.0
        with monkeypatch.context() as patched:
            costs = np.zeros(4), np.array([0.0, 0.0, math.nan, 0.0])
            patched.setattr(moment_bound, "_central", lambda *_: (1.0, costs))
            assert moment_bound._Problem.of(moments, "add", tilt) is None

    class Broken(moment_bound.MomentBound):
        def log_deltas(self, *_):
            return -1e3, math.nan

    with pytest.raises(FailureError, match="no number"):
        Broken(small()).noise_multiplier(1.0, 1e-5)


def test_a_shortfall_beyond_numerical_range_ends_the_search_for_a_better_bound():
    # raised by it, the linear program was refused, and the account ended in its error
    mechanism = Mechanism(FreshBins(64, 2), S.BandedToeplitz([1.0, 0.5, 0.3]))
    question = {"noise_multiplier": 1.57, "delta": 2.6e-8}
    guarantee = mfopt.account(mechanism, certificate="deterministic", **question)
    assert guarantee.epsilon == pytest.approx(3.174, rel=1e-3)
