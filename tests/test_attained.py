"""Lower ends of bounds: attacks against quadrature and exact profiles; answers have them."""

import math
import sys

import bench_truth
import numpy as np
import pytest
from commands import printed

from mfopt.accounting import Mechanism, account, attained, phases
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.assignment import BinAssignment
from mfopt.accounting.loss_distribution.rounds import RoundsProfile
from mfopt.accounting.monte_carlo import chunked
from mfopt.accounting.monte_carlo.evidence import Trial
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.accounting.monte_carlo.sampled import OneUnit
from mfopt.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    RandomPartition,
    TruncatedPoisson,
)
from mfopt.strategies import BandedSquareRoot, Dense, Identity

MIXED = Dense(np.tril(np.random.default_rng(0).normal(size=(40, 40))) + 3 * np.eye(40))


@pytest.mark.parametrize("epsilon", [0.5, 4.0, 30.0])
def test_attacks_on_bins_lie_below_the_exact_profile(epsilon):
    mechanism, sigma = Mechanism(BallsInBins(8, 4)), 0.5
    exact = AllocationProfile(8, 4 / sigma**2).log_delta(epsilon, "remove")
    below = attained.attacks(mechanism)(sigma).log_delta_below(epsilon)
    assert below <= exact
    if epsilon == 30.0:  # far out the bins hardly help, and longer modes would be seen
        assert below > exact - 1
        assert attained.attacks(mechanism)(sigma / 1.05).log_delta_below(epsilon) > exact


def test_groups_of_a_random_partition_are_attacked_within_the_truth():
    mechanism = Mechanism(RandomPartition(4, 2, 2), group_size=2)
    for epsilon in (0.5, 8.0):
        below = attained.attacks(mechanism)(1.2).log_delta_below(epsilon)
        rng = np.random.default_rng(1)
        truth, error = bench_truth.largest_delta(mechanism, 1.2, epsilon, rng, 0.0)
        assert 0.3 * truth < math.exp(below) < truth + 5 * error


def test_epsilon_and_delta_of_an_attack_agree():
    attack = attained.attacks(Mechanism(BallsInBins(8, 4), group_size=2))(0.5)
    for epsilon in (5.0, 40.0):
        delta = math.exp(attack.log_delta_below(epsilon))
        assert attack.epsilon_below(delta) == pytest.approx(epsilon, rel=1e-6)
    assert attack.epsilon_below(0.9999) == 0


@pytest.mark.parametrize(
    ("mechanism", "gap"),
    [
        (Mechanism(FixedBatch(50, 1000, 20), group_size=3, adjacency="zero-out"), 0.06),
        (Mechanism(FixedBatch(50, 1000, 20), group_size=3, adjacency="replace"), 0.08),
        (Mechanism(CyclicPoisson(0.2, 4, 42), BandedSquareRoot(4), group_size=2), 0.08),
        (Mechanism(CyclicPoisson(0.2, 4, 42), BandedSquareRoot(4), 2, adjacency="replace"), 0.08),
        (Mechanism(TruncatedPoisson(0.05, 70, 1000, 20)), 0.7),
        (Mechanism(MinSeparation(40, 8, 5), MIXED), 0.3),
        (Mechanism(FixedOrder(8, 5), MIXED, group_size=2, adjacency="replace"), 0.3),
    ],
    ids=lambda value: getattr(value, "sampling", value) and type(value).__name__,
)
def test_every_bound_has_a_lower_end(mechanism, gap):
    sigma = 1.5 * mechanism.group_size
    guarantee = account(mechanism, noise_multiplier=sigma, delta=1e-5)
    below, above = guarantee.lower_bound, guarantee.epsilon
    assert guarantee.details["bracket"] == [below, above]
    assert guarantee.status == "bound" and above == guarantee.epsilon
    assert (1 - gap) * above < below < above
    delta = account(mechanism, noise_multiplier=sigma, epsilon=guarantee.epsilon)
    below, above = delta.details["bracket"]
    assert 0 < below < above == delta.delta


@pytest.mark.ci
def test_certified_answers_have_lower_ends_within_one_percent():
    mechanism = Mechanism(BallsInBins(8, 4), Dense(np.diag(np.linspace(0.2, 1.0, 32))))
    for statement in ({"noise_multiplier": 1.0}, {"epsilon": 2.0}):
        guarantee = account(mechanism, delta=1e-5, seed=1, **statement)
        below, above = guarantee.details["bracket"]
        assert above in (guarantee.epsilon, guarantee.noise_multiplier)
        assert 0.985 * above < below < above


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_samples_show_nearly_the_exact_divergence_and_no_more(epsilon):
    model = OneUnit(law(BallsInBins(8, 4)).loss(Identity()))
    exact = AllocationProfile(8, 4 / 1.5**2).log_delta(epsilon, "remove")
    for seed in range(8):
        trial = Trial(2**13, 0.01, chunked.seed_key(seed))
        assert exact - 0.1 < model.log_below(1.5, epsilon, trial) <= exact
        assert model.log_below(1.47, epsilon, trial) > exact  # a control
    assert model.log_below(1.5, epsilon, trial, enough=exact + 0.1) == -math.inf


def test_attacks_on_reassigned_bins_lie_below_the_composed_profile():
    exact = RoundsProfile(BinAssignment(8), 4, 0.7).log_delta(0.5, "remove")
    attack = attained.attacks(Mechanism(FreshBins(8, 4)))
    assert exact - 1.5 < attack(0.7).log_delta_below(0.5) <= exact
    assert attack(0.35).log_delta_below(0.5) > exact  # a control


def test_batches_that_are_always_full_have_both_ends():
    scheme = TruncatedPoisson(0.9, batch_size=3, population=200, iterations=4)
    assert scheme.full == 1
    guarantee = account(Mechanism(scheme), noise_multiplier=1.0, delta=1e-5)
    assert 0.99 * guarantee.epsilon < (guarantee.lower_bound or 0.0) <= guarantee.epsilon


@pytest.mark.ci
def test_large_groups_in_bins_are_answered_without_samples(monkeypatch):
    large = Mechanism(BallsInBins(8, 1), group_size=64)
    guarantee = account(large, noise_multiplier=40.0, delta=1e-6)
    assert guarantee.status == "bound" and len(guarantee.details["least_of"]) == 2
    assert 0.997 * guarantee.epsilon < (guarantee.lower_bound or 0.0) < guarantee.epsilon
    # a control: a bound that is not so close is not taken
    monkeypatch.setitem(sys.modules["mfopt.accounting.account"]._CLOSE, "epsilon", 1e-6)
    monkeypatch.setattr(sys.modules["mfopt.accounting.account"], "analysis", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        account(large, noise_multiplier=40.0, delta=1e-6)


def test_phases_have_the_lower_end_of_their_composition():
    def two(*, sigma, **question):
        sampled = phases.Phase(Mechanism(Poisson(0.02, 100)), sigma)
        return phases.compose(
            [sampled, phases.Phase(Mechanism(Poisson(0.02, 60)), sigma)], **question
        )

    guarantee = account(Mechanism(Poisson(0.02, 160)), noise_multiplier=1.0, delta=1e-5)
    pair = two(sigma=1.0, delta=1e-5)
    assert pair.lower_bound is not None and guarantee.lower_bound is not None
    assert (1 - 1e-3) * guarantee.lower_bound < pair.lower_bound < guarantee.epsilon
    assert (two(sigma=0.98, delta=1e-5).lower_bound or 0.0) > guarantee.epsilon  # a control
    delta = two(sigma=1.0, epsilon=guarantee.epsilon)
    assert 0.99 * delta.delta < delta.details["bracket"][0] < 1e-5
    gaussian_phases = [phases.Phase(Mechanism(FixedOrder(4, 4)), sigma) for sigma in (3.0, 4.0)]
    truth = gaussian.epsilon(math.hypot(2 / 3, 2 / 4), 1e-5)
    composed = phases.compose(gaussian_phases, delta=1e-5)
    assert 0.999 * truth < (composed.lower_bound or 0.0) < truth < composed.epsilon


@pytest.mark.parametrize("question", ["--eps 2 --delta 1e-5", "--noise-multiplier 1 --delta 1e-5"])
def test_fedavg_shows_what_its_sampled_release_attains(question):
    words = ["--probability", 0.01, "--iters", 100, *question.split()]
    actual = printed("account", "fedavg", *words)
    below, above = actual["details"]["bracket"]
    assert actual["status"] == "bound" and 0.4 * above < below < above
    exact = printed("account", "dpsgd", *words)
    assert below == exact["details"]["bracket"][0]
