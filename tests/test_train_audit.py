"""The audit stays below the claim, comes near it, and catches broken trainers."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.strategies import BLT, BandedToeplitz, Identity
from mfopt.training.audit import (
    audit,
    epsilon_from_guesses,
    guesses_p_value,
    log_likelihood_ratios,
)
from mfopt.training.clipping import Clipping
from mfopt.training.privacy import Account

ORDERED = Mechanism(sampling.FixedOrder(3, 2), BLT(np.array([0.3]), np.array([0.7])))
SAMPLED = Mechanism(sampling.Poisson(0.4, 3), Identity())
CANARIES = 3000


def account_for(mechanism):
    return Account.solve(mechanism, 3.0, 1e-6)


def run(mechanism, **options):
    options = {"canaries": CANARIES, "seed": 1, "microbatch": 250, "confidence": 0.99} | options
    return audit(account_for(mechanism), **options)


@pytest.mark.parametrize(("mechanism", "factor"), [(ORDERED, 1.6), (SAMPLED, 3.0)])
def test_the_bound_is_below_the_claim_and_within_a_factor_of_it(mechanism, factor):
    result = run(mechanism)
    assert result.passed
    assert 3.0 / factor < result.epsilon_profile < 3.0
    assert 0 < result.epsilon_lower < result.epsilon_profile
    error = np.sqrt(0.25 / CANARIES)
    assert abs(result.accuracy - result.accuracy_claimed) < 4 * error


def with_noise(execution, factor):
    noise = execution.noise
    other = NoiseStream(
        noise.strategy,
        iterations=noise.iterations,
        sampling=noise.sampling,
        noise_multiplier=factor * noise.noise_multiplier,
        clip_norm=noise.clip_norm,
    )
    return dataclasses.replace(execution, noise=other)


class Unclipped(Clipping):
    """Says that it clips."""

    def __call__(self, gradient):
        return super().__call__(gradient)._replace(gradient=gradient)


@pytest.mark.parametrize("mechanism", [ORDERED, SAMPLED], ids=["fixed-order", "poisson"])
@pytest.mark.parametrize(
    "fault",
    [
        lambda execution: with_noise(execution, 0.5),
        lambda execution: dataclasses.replace(execution, clipping=Unclipped(1.0)),
    ],
    ids=["noise halved", "clipping skipped"],
)
def test_a_broken_trainer_is_caught(mechanism, fault):
    result = run(mechanism, alter=fault, normalized=False)
    assert not result.passed
    assert result.epsilon_profile > 3.0


def test_too_much_noise_is_no_fault():
    assert run(ORDERED, alter=lambda execution: with_noise(execution, 2.0)).passed


def test_the_attack_is_the_likelihood_ratio():
    # against densities written out, for two bins and a dense C
    strategy, scheme, sigma = BandedToeplitz(np.array([1.0, 0.6])), sampling.BallsInBins(2, 2), 0.8
    releases = np.random.default_rng(0).normal(size=(4, 5))
    matrix = strategy.materialize(4)
    inverse = np.linalg.inv(matrix)
    covariance = sigma**2 * inverse @ inverse.T
    absent = stats.multivariate_normal(np.zeros(4), covariance)
    expected = []
    for sequence in releases.T:
        places = [np.array([1.0, 0, 1, 0]), np.array([0, 1.0, 0, 1])]
        there = [stats.multivariate_normal(x, covariance).pdf(sequence) for x in places]
        expected.append(np.log(np.mean(there)) - absent.logpdf(sequence))
    found = log_likelihood_ratios(releases, strategy, scheme, sigma)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # Poisson sampling with independent noise
    found = log_likelihood_ratios(releases, Identity(), sampling.Poisson(0.3, 4), sigma)
    each = np.log(0.7 + 0.3 * np.exp((releases - 0.5) / sigma**2)).sum(axis=0)
    np.testing.assert_allclose(found, each, rtol=1e-6)


def test_p_values_against_their_definition_and_randomized_response():
    m, guesses, correct, epsilon, delta = 50, 20, 16, 0.7, 1e-3
    tail = [stats.binom.sf(v - 1, guesses, 1 / (1 + np.exp(-epsilon))) for v in range(21)]
    slope = max((tail[correct - i] - tail[correct]) / i for i in range(1, correct + 1))
    expected = tail[correct] + 2 * m * delta * slope
    assert guesses_p_value(m, guesses, correct, epsilon, delta) == pytest.approx(expected)
    assert guesses_p_value(m, guesses, 0, epsilon, 0.0) == 1.0
    # randomized response at ε = 1 is as guessable as (1, 0)-DP allows: the bound must be true
    # about as often as it says, and not by being trivial
    rng = np.random.default_rng(3)
    rights = rng.binomial(400, 1 / (1 + np.exp(-1.0)), size=300)
    bounds = np.array([epsilon_from_guesses(400, 400, int(r), 0.0, 0.1) for r in rights])
    wrong = np.mean(bounds > 1.0)
    assert wrong <= 0.1 + 4 * np.sqrt(0.09 / 300)
    assert np.median(bounds) > 0.6
    assert np.mean(bounds > 0.8) > 0.1  # control: a smaller claim would be refuted


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(UsageError, match="canaries"):
        run(ORDERED, canaries=10)
    with pytest.raises(UsageError, match="confidence"):
        run(ORDERED, confidence=1.0)
    group = Account.solve(Mechanism(sampling.Poisson(0.1, 3), group_size=2), 3.0, 1e-6)
    with pytest.raises(UsageError, match="one unit"):
        audit(group)
