"""The audit stays below the claim, comes near it, and catches broken trainers."""

import dataclasses

import bench_truth
import jax.numpy as jnp
import numpy as np
import pytest
from audit import with_noise, without_clipping
from scipy import special, stats
from scipy.optimize import linprog
from selection import before_release
from test_train_planted import Wrong, by_number
from train_fixtures import layered_model

from mfopt import sampling
from mfopt.errors import UsageError
from mfopt.mechanism import Mechanism
from mfopt.noise import NoiseStream
from mfopt.strategies import BLT, BandedToeplitz, Identity
from mfopt.training import recovered
from mfopt.training.attack import attack_on
from mfopt.training.audit import audit, epsilon_from_guesses, guesses_p_value
from mfopt.training.privacy import solved

ORDERED = Mechanism(sampling.FixedOrder(3, 2), BLT([0.3], [0.7]))
SAMPLED = Mechanism(sampling.Poisson(0.4, 3), Identity())
CANARIES = 3000


def run(mechanism, **options):
    options = {"canaries": CANARIES, "seed": 1, "microbatch": 250, "confidence": 0.99} | options
    options = {"model": layered_model(), "length": 8} | options
    return audit(solved(mechanism, 3.0, 1e-6), **options)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mechanism", "factor"), before_release([(ORDERED, 1.6), (SAMPLED, 3.0)], 0)
)
def test_the_bound_is_below_the_claim_and_within_a_factor_of_it(mechanism, factor):
    result = run(mechanism)
    assert result.passed
    assert 3.0 / factor < result.epsilon_profile < 3.0
    assert 0 < result.epsilon_lower <= result.epsilon_curve < result.epsilon_profile
    error = np.sqrt(0.25 / CANARIES)
    assert abs(result.accuracy - result.accuracy_claimed) < 4 * error


@pytest.mark.ci
@pytest.mark.parametrize(
    "mechanism", before_release([ORDERED, SAMPLED], 0), ids=["fixed-order", "poisson"]
)
@pytest.mark.parametrize(
    "fault", [with_noise(0.5), without_clipping(100.0)], ids=["noise halved", "clipping skipped"]
)
def test_a_broken_trainer_is_caught(mechanism, fault):
    result = run(mechanism, alter=fault, normalized=False)
    assert not result.passed
    assert "right guesses" in faults(result)
    assert result.epsilon_profile > 3.0


class Repeated(NoiseStream):
    """Draws again from step 3 on what it drew before."""

    def next(self, state):
        earlier_state = dataclasses.replace(
            state, step=jnp.where(state.step < 3, state.step, state.step - 3)
        )
        noise, next_state = super().next(earlier_state)
        return noise, dataclasses.replace(next_state, step=state.step + 1)


@pytest.mark.release
def test_noise_beyond_the_steps_of_the_own_model_is_tested(monkeypatch):
    monkeypatch.setattr(recovered, "_STEPS", 3)
    reports = []
    result = run(ORDERED, alter=with_noise(kind=Repeated), canaries=500, progress=reports.append)
    assert faults(result) == ["noise of different steps, of canaries"]
    stages = list(dict.fromkeys(progress.stage for progress in reports if progress.total))
    # what may be refused comes before what takes long
    assert stages == ["taking users in and out", recovered._STAGE, "training on canaries"]


@pytest.mark.release
def test_too_much_noise_is_a_fault_too():
    result = run(ORDERED, alter=with_noise(1.5))
    assert "size of the noise" in faults(result)
    assert result.epsilon_profile < 3.0


BANDED = BandedToeplitz([1.0, 0.6])
ATTACKED = [  # scheme, C, units, how far the mean over drawn places of a group may be off
    (sampling.BallsInBins(2, 2), BANDED, 1, 1e-9),
    (sampling.BallsInBins(2, 2), BANDED, 2, 0.15),
    (sampling.FreshBins(3, 4, 2), BandedToeplitz([1.0, 0.6, 0.3]), 1, 1e-6),
    (sampling.BMinSep(4, 2, 2), BANDED, 1, 1e-6),
    (sampling.Poisson(0.3, 4), Identity(), 1, 1e-9),
    (sampling.Poisson(0.3, 4), Identity(), 2, 1e-9),
]


@pytest.mark.parametrize(("scheme", "strategy", "units", "tolerance"), ATTACKED)
def test_the_attack_is_the_likelihood_ratio_of_all_patterns(scheme, strategy, units, tolerance):
    (law,) = bench_truth.laws(scheme, units)
    white = np.random.default_rng(2).normal(size=(scheme.iterations, 6))
    modes = np.array([*law]) @ strategy.materialize(scheme.iterations).T / 0.9
    mixture = modes, np.log([*law.values()])
    expected, _ = bench_truth.log_density(white.T / 0.9, mixture)
    actual = attack_on(scheme, strategy, units)(white, 0.9)
    np.testing.assert_allclose(actual, expected, atol=tolerance)
    assert np.max(np.abs(attack_on(scheme, strategy, units)(white, 1.0) - expected)) > 0.15


def largest_chance(m, guesses, correct, epsilon, delta):
    """Of ``correct`` or more right guesses: the linear program of all that (ε, δ)-DP says."""
    numbers, rows, limits = np.arange(guesses + 1), [], []
    lines = [(delta, np.exp(epsilon)), (1 - np.exp(-epsilon) * (1 - delta), np.exp(-epsilon))]
    for a in range(1, guesses + 1):
        right = np.where(numbers >= a, numbers / m, 0)
        wrong = np.where(numbers >= a - 1, (guesses - numbers) / m, 0)
        for begin, slope in [*lines, (1, 0)]:
            rows.append(right - slope * wrong)
            limits.append(begin)
    constraints = {"A_eq": [np.ones(guesses + 1)], "b_eq": [1], "bounds": (0, 1)}
    return -linprog(-1.0 * (numbers >= correct), rows, limits, **constraints).fun


def test_p_values_are_those_of_the_linear_program_and_beat_the_former_bound():
    rng = np.random.default_rng(0)
    for _ in range(20):
        guesses = int(rng.integers(2, 25))
        m, correct = int(rng.integers(guesses, 60)), int(rng.integers(1, guesses + 1))
        case = m, guesses, correct, rng.uniform(0, 2), rng.choice([0, 1e-5, 1e-3, 1e-2])
        expected = largest_chance(*case)
        assert expected - 1e-7 <= guesses_p_value(*case) <= 1.02 * expected + 1e-7
    assert guesses_p_value(50, 20, 0, 0.7, 0.0) == 1.0
    # with δ > 0, Steinke, Nasr and Jagielski 2023 add 2 m δ max_i (f(v - i) - f(v)) / i to a tail
    m, guesses, correct, epsilon, delta = 4000, 80, 80, 2.0, 1e-5
    tail = stats.binom.sf(np.arange(-1, correct), guesses, special.expit(epsilon))
    slope = np.max((tail[::-1][1:] - tail[-1]) / np.arange(1, correct + 1))
    former = tail[-1] + 2 * m * delta * slope
    assert guesses_p_value(m, guesses, correct, epsilon, delta) < former / 10


def test_bounds_hold_as_often_as_they_say():
    # randomized response at ε = 1 is as guessable as (1, 0)-DP allows: the bound must be true
    # about as often as it says, and not by being trivial
    rng = np.random.default_rng(3)
    rights = rng.binomial(400, 1 / (1 + np.exp(-1.0)), size=300)
    counts, places = np.unique(rights, return_inverse=True)
    bounds = np.array([epsilon_from_guesses(400, 400, int(r), 0.0, 0.1) for r in counts])[places]
    wrong = np.mean(bounds > 1.0)
    assert wrong <= 0.1 + 4 * np.sqrt(0.09 / 300)
    assert np.median(bounds) > 0.6
    assert np.mean(bounds > 0.8) > 0.1  # control: a smaller claim would be refuted


def test_what_cannot_be_audited_is_refused():
    with pytest.raises(UsageError, match="canaries"):
        run(ORDERED, canaries=10)
    with pytest.raises(UsageError, match="confidence"):
        run(ORDERED, confidence=1.0)


@pytest.mark.release
def test_groups_are_audited_as_one():
    # a user with three records at Poisson sampling: the tight bound needs all three on one axis
    group = Mechanism(sampling.Poisson(0.4, 3), group_size=3, privacy_unit="record")
    whole = run(group)
    assert whole.passed and 1.0 < whole.epsilon_profile < 3.0 and whole.epsilon_claimed == 3.0
    assert not run(group, alter=with_noise(0.5)).passed


@pytest.mark.release
def test_an_audit_fails_where_the_loader_forgets_to_be_random():
    mechanism = Mechanism(sampling.BallsInBins(16, 1), Identity())
    assert run(mechanism, canaries=800).passed

    def alter(execution):
        return dataclasses.replace(execution, sampler=Wrong(execution.sampler, by_number, 0))

    fault = run(mechanism, canaries=800, alter=alter)
    # the guesses show nothing, the participations do
    assert fault.epsilon_profile <= 3.0
    assert "participations follow another secret" in faults(fault)
    assert "right guesses" not in faults(fault)


def faults(result):
    return [finding.name for finding in result.sampling if finding.fault]
