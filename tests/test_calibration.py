"""Calibration: the root finder's promises, σ against exact values, and what is released."""

import math
from functools import partial

import jax
import numpy as np
import pytest
from commands import printed
from selection import before_release
from test_strategies import every_strategy
from test_verify import words_of

from mfopt import strategies as S
from mfopt.accounting import Effort, Mechanism, solve, verify
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.monte_carlo import (
    chunked,
    dominating_pair,
    evidence,
    importance,
    protocol,
    sampled,
)
from mfopt.calibration import calibrate, certify, guarantee_of, release
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import BallsInBins
from mfopt.training import privacy

SMALL = BallsInBins(bins=5, epochs=3)
ONE_BIN = BallsInBins(bins=1, epochs=3)


@pytest.fixture(scope="module")
def pair():
    return dominating_pair.exact(every_strategy(15)["blt"], SMALL)


@pytest.fixture(scope="module")
def one_bin():
    """Without amplification the smallest σ is known: norm of the one mode over μ(ε, δ)."""
    strategy = every_strategy(3)["blt"]
    return dominating_pair.exact(strategy, ONE_BIN), np.linalg.norm(
        strategy.materialize(3).sum(axis=1)
    )


# --- σ -------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(("epsilon", "delta"), [(0.2, 1e-3), (2.0, 1e-8), (8.0, 1e-12)])
def test_one_bin_has_the_gaussian_mechanisms_sigma(one_bin, epsilon, delta):
    pair, norm = one_bin
    truth = norm / gaussian.largest_mu(epsilon, delta)
    calibration = calibrate(pair, epsilon, delta, samples=2**15, seed=1)
    assert abs(calibration.value / truth - 1) < 5 * calibration.error + 1e-5 < 0.01
    # from a σ that is known about, no other is searched for
    repeated = calibrate(pair, epsilon, delta, samples=2**15, seed=1, near=1.05 * truth)
    assert repeated.value == pytest.approx(calibration.value, rel=0.004)


def by_effort(prover):
    """A prover that is asked with samples and seed beside its numbers, as ``calibrate`` is."""
    return lambda pair, samples=None, seed=None, **numbers: prover(
        pair, effort=Effort(samples, seed), **numbers
    )


@pytest.mark.parametrize(
    "call",
    [calibrate, by_effort(release), by_effort(partial(certify, noise_multiplier=3.0))],
    ids=["calibrate", "release", "certify"],
)
def test_what_is_out_of_range_is_refused(pair, call):
    bad = [("epsilon", value) for value in (0.0, -1.0, math.nan, math.inf, "two")]
    bad += [("delta", value) for value in (0.0, 1.0, 2.0, -1e-5, math.nan)]
    bad += [("samples", 10), ("seed", -1), ("seed", 1.5), ("seed", "one")]
    for name, value in bad:
        with pytest.raises(UsageError, match=name):
            call(pair, **{"epsilon": 1.0, "delta": 1e-5, name: value})
    for sigma in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="noise_multiplier"):
            certify(pair, sigma, 1.0, 1e-5)


# --- release -------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(
    ("epsilon", "delta"), before_release([(1.0, 1e-5), (4.0, 1e-12), (0.3, 1e-3)], 1)
)
def test_released_sigma_is_a_little_above_the_estimate(pair, epsilon, delta):
    certificate = release(pair, epsilon, delta, effort=Effort(samples=2**17, seed=4))
    ratio = certificate.noise_multiplier / certificate.estimate.value
    assert 1 - 4 * certificate.estimate.error < ratio < 1.01
    assert max(certificate.bounds.both) + certificate.beta <= delta
    assert certificate.beta == delta / 1000
    guarantee = guarantee_of(certificate, 4, "user")
    assert (guarantee.epsilon, guarantee.delta) == (epsilon, delta)
    assert (guarantee.status, guarantee.privacy_unit) == ("certified", "user")
    assert guarantee.failure_probability == certificate.beta
    assert guarantee.noise_multiplier == certificate.noise_multiplier
    assert guarantee.details["seed"] == 4


@pytest.mark.parametrize(
    ("delta", "samples", "limit"),
    [
        (1e-3, 2**14, 1.1),
        (1e-10, 2**14, 1.1),
        # too few fail or inflate, but never lie
        (1e-5, 256, math.inf),
        (1e-200, 256, math.inf),
    ],
)
def test_release_is_never_below_the_truth_where_it_is_known(one_bin, delta, samples, limit):
    pair, norm = one_bin
    truth = norm / gaussian.largest_mu(2.0, delta)
    for seed in range(5):
        try:
            certificate = release(pair, 2.0, delta, effort=Effort(samples=samples, seed=seed))
        except FailureError:
            assert samples == 256
        else:
            assert truth < certificate.noise_multiplier < limit * truth


def test_a_false_statement_is_not_certified(one_bin):
    pair, norm = one_bin
    truth = norm / gaussian.largest_mu(2.0, 1e-5)
    certify(pair, 1.1 * truth, 2.0, 1e-5, effort=Effort(samples=2**16, seed=0))
    for sigma in (0.2 * truth, 0.9 * truth, 0.999 * truth):
        for seed in range(5):
            with pytest.raises(FailureError, match=r"not certified.*upper bound"):
                certify(pair, sigma, 2.0, 1e-5, effort=Effort(samples=2**16, seed=seed))


def test_a_plan_made_elsewhere_is_taken_to_the_ceiling_of_this_sigma(pair, monkeypatch):
    recorded = []

    def watch(likelihood, tilt, point, *extra):
        recorded.append((tilt, point))
        return real_total(likelihood, tilt, point, *extra)

    real_total = importance.total
    monkeypatch.setattr(importance, "total", watch)
    loss = protocol.loss_of(pair)
    model = sampled.OneUnit(loss)
    trial = evidence.Trial(2**14, 1e-8, chunked.seed_key(0))
    with jax.enable_x64(True):
        plan = model.pilot(2.0, 1.0, trial)
        recorded.clear()
        for sigma in (1.9, 2.1):
            model.bounds(sigma, 1.0, plan, trial)
    assert {point.noise_multiplier for _, point in recorded} == {1.9, 2.1}
    for tilt, paid in recorded:
        proven = loss.at(tilt, evidence.Point(paid.noise_multiplier, 1.0))
        assert tilt.log_ceiling == pytest.approx(proven.log_ceiling, rel=1e-12)


def test_pinned_seeds_reproduce_and_unpinned_do_not(pair):
    first, second = (
        release(pair, 1.0, 1e-4, effort=Effort(samples=2**14, seed=9)) for _ in range(2)
    )
    assert first == second
    third = release(pair, 1.0, 1e-4, effort=Effort(samples=2**14, seed=10))
    assert third.noise_multiplier != first.noise_multiplier
    free = [release(pair, 1.0, 1e-4, effort=Effort(samples=2**14)) for _ in range(2)]
    assert free[0].noise_multiplier != free[1].noise_multiplier


def test_estimate_and_certificate_share_no_sample(pair, monkeypatch):
    """σ is fixed before the certificate's samples are drawn: no key is used twice."""
    from mfopt.accounting.monte_carlo import chunked

    used = []
    real_total, subkey = chunked.total, chunked.subkey

    def watch(kernel, key, *arguments, **options):
        used.append(words_of(key))
        return real_total(kernel, key, *arguments, **options)

    monkeypatch.setattr(chunked, "total", watch)
    release(pair, 1.0, 1e-4, effort=Effort(samples=2**14, seed=2))
    # searches for σ look again and again at one sample each; nothing else does
    estimate = subkey(chunked.seed_key(2), verify._DOMAIN, 0)
    searches = [words_of(key) for key in (chunked.seed_key(0), estimate)]
    variants = [key for key in used if key not in searches]
    assert set(searches) <= set(used)
    assert len(variants) >= 5 and len(set(variants)) == len(variants)
    # and the optimizer's, from the same seed, are none of them
    for path in (0, 1):
        key = subkey(chunked.seed_key(2), path)
        assert words_of(key) not in used


def sigma_of(*words):
    """The one σ of a command's JSON."""
    actual = printed(*words)
    (row,) = actual.get("rows", [actual])
    return row["noise_multiplier"]


@pytest.mark.parametrize("kind", ["identity", pytest.param("sqrt", marks=pytest.mark.ci)])
def test_one_sigma_from_every_command(kind, tmp_path):
    """To the last digit, as typed; one that samples is given one seed."""
    target, length, seed = ("--eps", 2, "--delta", 1e-5), ("--epochs", 2, "--iters", 16), 3
    file = tmp_path / "made.npz"
    target_words = (*target, "--seed", seed)
    sigma = sigma_of("optimize", *length, *target_words, "--strategy", kind, "--out", file)
    assert sigma_of("calibrate", file, *target_words) == sigma
    assert sigma_of("certify", file, *target_words) == sigma
    assert sigma_of("show", file) == sigma
    for strategy in (kind, file):
        account_words = ("account", "balls-in-bins", *length, *target_words, "--strategy", strategy)
        assert sigma_of(*account_words) == sigma
    if kind == "identity":  # without samples: commands that take no seed of a certificate, too
        families = ("--include", "dpsgd+balls-in-bins", "--cache", tmp_path / "cells")
        assert sigma_of("compare", *length, *target, *families) == sigma
        mechanism = Mechanism(BallsInBins(16, 2))
        assert privacy.solved(mechanism, 2.0, 1e-5).noise_multiplier == sigma  # train's


@pytest.mark.release
@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (100.0, 1e-5),
        (1000.0, 1e-5),
        (2.0, 0.99),
        pytest.param(2.0, 1e-50, marks=pytest.mark.release),
        (2.0, 1e-100),
        (0.01, 1e-9),
        (1e-3, 1e-5),
        (20.0, 0.5),
        (300.0, 1e-100),
    ],
)
def test_no_sigma_is_absurd(epsilon, delta):
    """Between the Gaussian mechanism at ε + log b and the one without amplification."""
    scheme = BallsInBins(4, 2)
    pair = dominating_pair.exact(S.SquareRoot(), scheme)
    norm = math.sqrt(np.max(np.diagonal(pair.gram)))
    plain = norm / gaussian.largest_mu(epsilon, delta)
    certificate = release(pair, epsilon, delta, effort=Effort(seed=2))
    assert certificate.noise_multiplier <= plain * (1 + 1e-9)
    # one bin is met with probability 1/4: H >= (H of its mode at ε + log 4)/4
    lowest = min(np.sqrt(np.diagonal(pair.gram))) / gaussian.largest_mu(
        epsilon + math.log(4), min(4 * delta, 1 - 1e-9)
    )
    assert certificate.noise_multiplier > 0.9 * lowest


# --- orthogonal modes ----------------------------------------------------------------------------


def _identity(bins, epochs):
    return dominating_pair.exact(S.Identity(), BallsInBins(bins, epochs))


@pytest.mark.parametrize(("epsilon", "delta"), before_release([(0.5, 1e-5), (2.0, 1e-12)], 1))
def test_orthogonal_modes_need_no_samples_and_agree_with_sampling(epsilon, delta):
    pair = _identity(16, 4)
    certificate = release(pair, epsilon, delta)
    assert certificate.samples == certificate.beta == 0 and certificate.estimate is None
    assert max(certificate.bounds.both) <= delta
    guarantee = guarantee_of(certificate, None)
    assert (guarantee.status, guarantee.failure_probability) == ("certified", 0)
    sampled = calibrate(pair, epsilon, delta, samples=2**15, seed=1)
    gap = math.log(certificate.noise_multiplier / sampled.value)
    assert abs(gap) < 4 * sampled.error + 5e-5
    certify(pair, certificate.noise_multiplier, epsilon, delta)
    with pytest.raises(FailureError, match="not certified"):  # nothing is left to give away
        certify(pair, certificate.noise_multiplier * (1 - 1e-4), epsilon, delta)
    # nor does a number of samples change the answer
    requested = release(pair, epsilon, delta, effort=Effort(samples=2**16, seed=2))
    assert requested.samples == 0 and requested.noise_multiplier == certificate.noise_multiplier


def test_an_orthogonal_norm_is_never_rounded_down():
    values = np.random.default_rng(0).uniform(1, 10, 1000) * 10.0 ** np.arange(-5, 5).repeat(100)
    for value in values.tolist():
        raised = dominating_pair.rounded_norm(value)
        assert value * (1 + 0.99e-11) <= raised <= value * (1 + 2e-9)


def test_overlapping_or_unequal_modes_are_sampled(pair):
    assert dominating_pair.orthogonal_norm(_identity(8, 3)) == pytest.approx(3)
    assert dominating_pair.orthogonal_norm(_identity(8, 3)) >= 3
    assert dominating_pair.orthogonal_norm(pair) is None
    unequal = np.diag([1.0, 2.0])
    for gram in (unequal, np.eye(2) + 1e-6 * np.ones((2, 2))):
        other = dominating_pair.DominatingPair(gram, np.linalg.cholesky(gram))
        assert dominating_pair.orthogonal_norm(other) is None
    # rounding is no overlap, and the bound covers it: g·I - G has no negative eigenvalue
    gram = 3 * np.eye(50) + 1e-11
    bound = dominating_pair.orthogonal_norm(dominating_pair.DominatingPair(gram, gram))
    assert bound is not None and np.linalg.eigvalsh(bound * np.eye(50) - gram).min() >= 0
    assert release(pair, 1.0, 1e-4, effort=Effort(samples=2**14, seed=0)).samples


def test_a_root_is_found_from_where_nothing_is_seen():
    def excess(x):
        return -20 * math.log(x / 0.7) if x < 1.0 else -math.inf

    root, fall = solve.about(excess, 1.5, fall=2.0, relative=1e-4)
    assert root == pytest.approx(0.7, rel=1e-4) and fall == pytest.approx(20.0)
    assert solve.about(excess, 0.71, fall=21.0, relative=1e-3, fall_error=0.05) == pytest.approx(
        (0.7, 21.0), rel=1e-3
    )
    assert solve.about(lambda x: math.inf, 1.5, fall=2.0, relative=1e-4) is None
