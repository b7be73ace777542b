"""C = I with bins thrown afresh: the composed loss of the throws."""

import math

import numpy as np
import pytest
from selection import before_release

from mfopt.accounting import Mechanism, account
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.loss_distribution import allocation, assignment
from mfopt.accounting.loss_distribution.allocation import AllocationProfile
from mfopt.accounting.loss_distribution.assignment import BinAssignment
from mfopt.accounting.loss_distribution.exchange import PublicMixture
from mfopt.accounting.loss_distribution.mixture import Resolution
from mfopt.accounting.monte_carlo.free import Orthogonal, ReassignedBins
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.errors import FailureError
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import Identity


@pytest.mark.parametrize(("bins", "sigma"), [(6, 1.2), (32, 0.6)])
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_one_law_serves_many_thresholds(bins, sigma, direction, monkeypatch):
    profile = AllocationProfile(bins, sigma**-2)
    epsilons = np.linspace(0, 3, 601)
    actual = assignment.log_hinges(bins, sigma**-2, epsilons, direction)
    entry = np.array([profile.log_delta(float(e), direction) for e in epsilons[::150]])
    nearby = entry > -40  # far out a relative error of ε is a larger one of log δ
    assert np.all(np.abs(actual[::150] - entry)[nearby] < 2e-3) and np.all(np.diff(actual) < 0)
    if direction == "remove":  # the larger one, which the lower bound is of
        assert actual[300] > profile.log_delta_below(float(epsilons[300]))
    monkeypatch.setattr(allocation, "_SUMMED", 1e-9)  # what running sums round is counted
    assert (assignment.log_hinges(bins, sigma**-2, epsilons, direction) > actual).all()


def test_the_pair_on_the_grid_dominates_a_throw_and_is_one():
    bins, sigma = 6, 1.1
    part = BinAssignment(bins).discretize(sigma, 0.05, Resolution(0.0, -30.0))
    profile = AllocationProfile(bins, sigma**-2)
    forward, backward = part, part.reverse()
    for pair, direction in ((forward, "remove"), (backward, "add")):
        mass_q = pair.mass * np.exp(-pair.losses)
        assert pair.mass.sum() + pair.infinite == pytest.approx(1, abs=1e-12)
        assert mass_q.sum() + pair.reverse_infinite == pytest.approx(1, abs=1e-12)
        for epsilon in (0.0, 0.13, 0.5, 1.7):
            above = np.maximum(pair.mass - math.exp(epsilon) * mass_q, 0).sum() + pair.infinite
            true = math.exp(profile.log_delta_below(epsilon)) if direction == "remove" else 0
            log_delta = math.exp(profile.log_delta(epsilon, direction))
            assert above >= true and log_delta * (1 - 1e-4) < above < 1.1 * log_delta + 1e-12


@pytest.mark.parametrize("epochs", before_release([1, 3], 1))
def test_one_throw_is_balls_in_bins(epochs):
    loss = FreshBinsLaw(FreshBins(8, epochs, epochs)).loss(Identity())
    assert loss.free_bounds()[0] == Orthogonal(8, loss.free_bounds()[0].squared_norm)
    fresh, kept = (
        account(Mechanism(s), epsilon=1.0, delta=1e-5).noise_multiplier
        for s in (FreshBins(8, epochs, epochs), BallsInBins(8, epochs))
    )
    assert fresh == pytest.approx(kept, rel=1e-6)


def test_rounds_without_a_lower_bound_say_so():
    coin = PublicMixture(BinAssignment(4), BinAssignment(8), 0.5)
    cut = Resolution(0.1, -50.0, (-1.0, 1.0))
    with pytest.raises(FailureError, match="no lower bound is known for truncated batches"):
        coin.discretize_below(1.0, 1e-3, cut, add=True, rounds=1)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(("bins", "sigma"), [(6, 1.1), (40, 0.8)])
def test_a_pair_from_below_is_dominated_and_near(bins, sigma, add):
    """Its profile against bounds of one assignment. Control: a law of less noise is not below."""
    cut, direction = Resolution(0.0, -30.0, (-2.0, 2.5)), "add" if add else "remove"
    part, louder = (
        BinAssignment(bins).discretize_below(noise, 2e-3, cut, add=add, rounds=4)
        for noise in (sigma, 0.99 * sigma)
    )
    profile = AllocationProfile(bins, sigma**-2)
    for epsilon in (0.0, 0.3, 0.8):
        upper = math.exp(profile.log_delta(epsilon, direction))

        def attained(pair, epsilon=epsilon):
            far = max(pair.infinite - math.exp(epsilon) * pair.infinite_q, 0.0)
            return pair.mass @ np.maximum(-np.expm1(epsilon - pair.losses), 0) + far

        assert (1 - 3e-3) * upper < attained(part) <= upper
        assert attained(louder) > upper


@pytest.mark.parametrize(
    ("scheme", "question"),
    [
        (FreshBins(8, 4), {"noise_multiplier": 1.1, "delta": 1e-6}),
        (FreshBins(4, 2), {"noise_multiplier": 2.0, "epsilon": 1.0}),
        (FreshBins(8, 4), {"epsilon": 2.0, "delta": 1e-5}),
        # rare large losses that one transform of all bins rounds away
        (FreshBins(1000, 10), {"noise_multiplier": 0.8167, "delta": 1e-10}),
    ],
)
def test_an_account_of_independent_noise_is_exact(scheme, question):
    guarantee = account(Mechanism(scheme), **question)
    (name,) = {"noise_multiplier", "epsilon", "delta"} - set(question)
    assert guarantee.status == "exact" and guarantee.failure_probability == 0
    assert guarantee.lower_bound > 0.999 * getattr(guarantee, name)


def test_so_little_noise_that_bins_are_told_apart_is_accounted_without_amplification():
    thrown, norm = ReassignedBins(8, 4, 1.0), 2.0
    for sigma in (1e-9, 0.03):
        plain = gaussian.epsilon(norm / sigma, 1e-5)
        assert thrown.epsilon(sigma, 1e-5) == pytest.approx(plain, rel=1e-9)
        assert thrown.epsilon(sigma, 1e-5) >= plain
        assert max(thrown.log_deltas(sigma, 1.0)) <= 0
    plain = norm / gaussian.largest_mu(2000.0, 1e-5)
    assert plain <= thrown.noise_multiplier(2000.0, 1e-5) <= plain * (1 + 1e-5)
    with pytest.raises(FailureError, match="Use more noise"):
        BinAssignment(8).nodes(0.03, -50.0)


def test_so_much_noise_that_nothing_is_left_is_answered_at_once():
    thrown = ReassignedBins(128, 16, 1.0)
    for sigma in (1e9, 1e200):  # squares of the second are below all floats
        assert thrown.epsilon(sigma, 1e-5) == 0
        assert max(thrown.log_deltas(sigma, 0.0)) < math.log(1e-5)  # it is checked again


@pytest.mark.release
def test_losses_of_little_noise_stay_within_floats():
    sigma = 0.1
    guarantee = account(Mechanism(FreshBins(2, 2)), noise_multiplier=sigma, delta=1e-6)
    epsilon = AllocationProfile(2, sigma**-2).epsilon(1e-6)  # one throw of the two
    assert epsilon < guarantee.epsilon <= gaussian.epsilon(math.sqrt(2) / sigma, 1e-6) * (1 + 1e-9)
    # further out floats would not hold e^loss
    assert max(np.abs(assignment._reach(2, sigma, -700.0))) <= 600
