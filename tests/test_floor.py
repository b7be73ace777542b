"""The lower bound of the error at epochs' ends: its proof, its maximum, and who is above it."""

import dataclasses
import math

import numpy as np
import pytest
import scipy
from commands import failure, invoked, printed
from sources import ROOT

import mfopt
from mfopt import floor, sampling, strategies
from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.unamplified import sensitivity
from mfopt.errors import FailureError
from mfopt.factorization import proofs
from mfopt.guarantee import Guarantee
from mfopt.workloads import Momentum, PrefixSums

EPSILON, DELTA = 2.0, 1e-5
FILES = sorted((ROOT / "artifacts" / "factorizations").glob("*.npz"))
SCHEMES = {  # with a σ that is just above the least at (ε, δ), which a search takes seconds for
    "balls-in-bins": (sampling.BallsInBins(8, 4), 2.191),
    "fresh-bins": (sampling.FreshBins(8, 4), 1.5895),
    "fresh-bins, kept for two epochs": (sampling.FreshBins(8, 4, 2), 1.8035),
    "fixed-order": (sampling.FixedOrder(8, 4), 3.988),
}
WITHOUT = [
    sampling.Poisson(0.25, 8),
    sampling.CyclicPoisson(0.5, 2, 8),
    sampling.FixedBatch(3, 12, 8),
    sampling.TruncatedPoisson(0.25, 40, 20, 8),
    sampling.MinSeparation(8, 4, 2),
]


def stated(**changes):
    return Guarantee(**{"epsilon": EPSILON, "delta": DELTA, "noise_multiplier": 1.0, **changes})


@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({}, 1),
        ({"adjacency": "zero-out"}, 1),
        ({"adjacency": "replace"}, 2),
        ({"group_size": 3}, 3),
    ],
)
def test_full_batches_with_independent_noise_attain_it(epochs, changes, times):
    scheme = sampling.FixedOrder(1, epochs)
    weights = np.arange(epochs, 0, -1.0) ** 0.25
    strategy = strategies.Dense(np.diag(weights))
    sigma = times * sensitivity(strategy, scheme).value / gaussian.largest_mu(EPSILON, DELTA)
    guarantee = stated(noise_multiplier=sigma, **changes)
    actual = floor.epoch_ends(PrefixSums(), strategy, scheme, guarantee)
    assert 0 <= actual.above < 1e-8
    # a control: any less noise is below
    less = stated(noise_multiplier=(1 - 1e-6) * sigma, **changes)
    assert floor.epoch_ends(PrefixSums(), strategy, scheme, less).above < 0


@pytest.mark.parametrize("signed", [False, True])
def test_the_one_adversary_alone_keeps_every_c_above(signed):
    """Whatever C: noise that hides the V of the proof has at least this error at epochs' ends."""
    rng, bins, epochs = np.random.default_rng(7), 3, 5
    n = bins * epochs
    ends = np.arange(bins - 1, n, bins)
    lower = np.tril(np.ones((epochs, epochs)))
    root = np.real(scipy.linalg.sqrtm(lower.T @ lower))
    rows = root / np.linalg.norm(root, axis=1, keepdims=True)
    mu, bound = gaussian.largest_mu(EPSILON, DELTA), floor.lower_bound(epochs, stated())
    for _ in range(20):
        c = np.tril(rng.normal(size=(n, n)) / (1 + np.arange(n)[:, None] - np.arange(n)).clip(1))
        c = c if signed else np.abs(c)
        np.fill_diagonal(c, 1)
        half = (np.tril(np.ones((n, n))) @ np.linalg.inv(c))[ends]
        covariance = half @ half.T
        moved = np.trace(rows.T @ lower.T @ np.linalg.solve(covariance, lower @ rows))
        sigma = math.sqrt(moved) / mu
        assert sigma * math.sqrt(np.trace(covariance) / epochs) >= bound


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_committed_mechanism_is_below(path):
    factorization = mfopt.load(path)
    position = factorization.workload, factorization.strategy, factorization.sampling
    actual = floor.epoch_ends(*position, factorization.guarantee)
    assert actual.rmse <= factorization.max_error and 0 < actual.above < 1
    less = dataclasses.replace(
        factorization.guarantee,
        noise_multiplier=factorization.noise_multiplier / (1 + actual.above) * 0.9999,
    )
    assert floor.epoch_ends(*position, less).above < 0  # a control that is found


def test_error_at_ends_is_that_of_the_dense_definition():
    scheme, strategy = sampling.BallsInBins(3, 4), strategies.BLT([0.5, 0.2], [0.9, 0.3])
    half = np.tril(np.ones((12, 12))) @ np.linalg.inv(strategy.materialize(12))
    expected = 1.5 * math.sqrt(np.mean(np.sum(half[[2, 5, 8, 11]] ** 2, axis=1)))
    actual = floor.epoch_ends(PrefixSums(), strategy, scheme, stated(noise_multiplier=1.5))
    assert actual.rmse == pytest.approx(expected, rel=1e-12)


def test_where_no_bound_is_known_there_is_none():
    identity = strategies.Identity()
    for scheme in WITHOUT:
        assert not len(scheme.epoch_ends)
        assert floor.epoch_ends(PrefixSums(), identity, scheme, stated()) is None
    bins = sampling.BallsInBins(4, 2)
    assert floor.epoch_ends(Momentum(0.9, np.ones(8)), identity, bins, stated()) is None
    for vacuous in ({"epsilon": math.inf}, {"delta": 0.0}, {"delta": 1.0}):
        assert floor.epoch_ends(PrefixSums(), identity, bins, stated(**vacuous)) is None


def test_show_says_how_far_it_is_above():
    (path,) = (path for path in FILES if path.stem == "optimize-blt-16x128-eps2")
    lines = invoked("show", path).stdout.splitlines()
    line = next(line for line in lines if "at epochs' ends" in line)
    epoch_ends = printed("show", path)["epoch_ends"]
    assert epoch_ends["floor"] == pytest.approx(22.166, abs=1e-3)
    above = 100 * (epoch_ends["rmse"] / epoch_ends["floor"] - 1)
    said = f"{above:.1f}% above the lower bound, {epoch_ends['floor']:.4f}"
    assert f"RMSE {epoch_ends['rmse']:.4f}: {said}" in line


# --- refutation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", SCHEMES)
def test_a_guarantee_below_the_floor_is_refuted(form):
    scheme, sigma = SCHEMES[form]
    answer = account(Mechanism(scheme), noise_multiplier=sigma, epsilon=EPSILON)
    assert 0.99 * DELTA < answer.delta <= DELTA
    floor.refute(strategies.Identity(), scheme, answer)
    for changes in ({"epsilon": 0.2}, {"delta": 1e-60}, {"delta": 0.0}, {"group_size": 8}):
        with pytest.raises(FailureError, match="FALSE"):
            floor.refute(strategies.Identity(), scheme, dataclasses.replace(answer, **changes))
    # an estimate is refused too, but not for the error that estimates have
    estimate = dataclasses.replace(answer, status="estimate")
    with pytest.raises(FailureError, match="FALSE"):
        floor.refute(strategies.Identity(), scheme, dataclasses.replace(estimate, epsilon=0.2))


def test_the_error_of_an_estimate_is_allowed_for():
    scheme = sampling.FixedOrder(1, 4)  # whose exact σ attains the bound at the last query
    exact = account(Mechanism(scheme), epsilon=EPSILON, delta=DELTA)
    low = dataclasses.replace(exact, noise_multiplier=0.99 * exact.noise_multiplier)
    floor.refute(strategies.Identity(), scheme, dataclasses.replace(low, status="estimate"))
    with pytest.raises(FailureError, match="FALSE"):
        floor.refute(strategies.Identity(), scheme, low)


def test_one_accurate_query_refutes_where_the_mean_error_does_not():
    # every epoch's noise is large and cancels in the last query alone
    scheme = sampling.BallsInBins(1, 4)
    inverse = np.eye(4)
    inverse[3] = [-1.0, -1.0, -1.0, 0.1]
    strategy = strategies.Dense(np.linalg.inv(inverse) / 20)
    guarantee = stated(noise_multiplier=1.0, status="bound")
    ends = floor.epoch_ends(PrefixSums(), strategy, scheme, guarantee)
    assert ends.above > 0.1
    with pytest.raises(FailureError, match="a query at an epoch's end shows δ"):
        floor.refute(strategy, scheme, guarantee)


def test_files_with_a_false_guarantee_are_refused(tmp_path, capsys, monkeypatch):
    factorization = mfopt.load(FILES[0])
    false = dataclasses.replace(
        factorization.guarantee, epsilon=factorization.guarantee.epsilon / 3
    )
    forged = dataclasses.replace(factorization, guarantee=false)
    with pytest.raises(FailureError, match="FALSE"):
        forged.save(tmp_path / "false.npz")
    with pytest.raises(FailureError, match="FALSE"):
        mfopt.certify(forged)
    with monkeypatch.context() as unchecked:
        unchecked.setattr(proofs, "refute", lambda *arguments: None)
        path = forged.save(tmp_path / "false.npz")
    for command in ("show", "certify"):
        assert "FALSE" in failure(capsys, command, path, code=1)
