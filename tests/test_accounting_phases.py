"""Phases that compose, against dp_accounting, closed forms and single phases."""

import dataclasses
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from selection import before_release

from mfopt.accounting import Mechanism, account, events, phases
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.phases import Phase
from mfopt.errors import UsageError
from mfopt.sampling import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    Poisson,
)
from mfopt.strategies import BandedSquareRoot, Tree

POISSON = Phase(Mechanism(Poisson(0.02, 200)), 1.1)
SECOND = Phase(Mechanism(Poisson(0.05, 100)), 1.6)


def agreed(parts, delta, interval, relation="ADD_OR_REMOVE_ONE"):
    """(what parts compose to, whose ε is that of dp_accounting, their event there)"""
    event = events.to_event(parts)
    accountant = pld_privacy_accountant.PLDAccountant(
        dp_accounting.NeighboringRelation[relation], value_discretization_interval=interval
    )
    theirs = accountant.compose(event).get_epsilon(delta)
    composed = phases.compose(parts, delta=delta)
    assert composed.epsilon == pytest.approx(theirs, rel=1e-3)
    return composed, event


def test_two_phases_agree_with_dp_accounting_and_come_back_from_its_events():
    pair = [POISSON, SECOND]
    composed, event = agreed(pair, 1e-6, 1e-4)
    assert composed.status == "bound"
    stated = phases.compose(pair, epsilon=composed.epsilon)
    assert stated.delta == pytest.approx(1e-6, rel=2e-3)
    assert 0.99e-6 < stated.lower_bound < stated.delta
    assert events.from_event(event) == pair
    repeated = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([event, event]), 3)
    assert sum(phase.mechanism.iterations for phase in events.from_event(repeated)) == 6 * 300
    with pytest.raises(UsageError, match="LaplaceDpEvent"):
        events.from_event(dp_event.LaplaceDpEvent(1.0))


def test_one_phase_is_its_own_account_and_order_does_not_matter():
    epsilon = account(POISSON.mechanism, noise_multiplier=1.1, delta=1e-6).epsilon
    assert phases.compose([POISSON], delta=1e-6).epsilon == pytest.approx(epsilon, rel=1e-4)
    forward, other = (
        phases.compose(order, delta=1e-6).epsilon
        for order in ([POISSON, SECOND], [SECOND, POISSON])
    )
    assert forward == pytest.approx(other, rel=1e-9)


def test_gaussians_compose_to_a_gaussian_and_banded_phases_count():
    order = Phase(Mechanism(FixedOrder(4, 3)), 5.0)
    exact = gaussian.epsilon(math.sqrt(2 * 3 / 25), 1e-5)
    assert phases.compose([order, order], delta=1e-5).epsilon == pytest.approx(exact, rel=1e-4)
    banded = Phase(Mechanism(CyclicPoisson(0.2, 3, 60), BandedSquareRoot(3)), 2.0)
    epsilon = account(banded.mechanism, noise_multiplier=2.0, delta=1e-5).epsilon
    assert epsilon < phases.compose([banded, order], delta=1e-5).epsilon < epsilon + exact


@pytest.mark.ci
def test_groups_and_replacement_go_to_dp_accounting_and_back():
    group = Phase(Mechanism(Poisson(0.05, 20), group_size=3), 2.0)
    _, event = agreed([group], 1e-5, 1e-3)
    (back,) = events.from_event(event)
    assert back.mechanism.group_size == 3
    assert back.mechanism.sampling.probability == pytest.approx(0.05)
    other = dp_event.MixtureOfGaussiansDpEvent(2.0, [0, 1, 3], [0.8, 0.1, 0.1])
    with pytest.raises(UsageError, match="binomially"):
        events.from_event(other)

    replaced = Phase(Mechanism(Poisson(0.05, 20), adjacency="replace"), 1.5)
    composed, event = agreed([replaced], 1e-5, 1e-3, "REPLACE_ONE")
    assert composed.adjacency == "replace"
    assert events.from_event(event, adjacency="replace") == [replaced]
    fixed = dp_event.SampledWithoutReplacementDpEvent(100, 5, dp_event.GaussianDpEvent(1.0))
    with pytest.raises(UsageError, match="SampledWithoutReplacement"):
        events.from_event(fixed, adjacency="replace")
    zeroed = Phase(Mechanism(FixedBatch(5, 100, 20), adjacency="zero-out"), 1.5)
    with pytest.raises(UsageError, match="zero-out"):
        events.to_event([zeroed])


@pytest.mark.ci
def test_a_sampled_phase_composes_with_rounds():
    bins = Phase(Mechanism(BallsInBins(4, 2)), 3.0)
    effort = {"samples": 8192, "seed": 1}
    epsilon = account(bins.mechanism, noise_multiplier=3.0, delta=1e-3).epsilon
    rounds = phases.compose([POISSON], delta=1e-3).epsilon
    composed = phases.compose([POISSON, bins], delta=1e-3, **effort)
    assert composed.status == "certified" and composed.failure_probability > 0
    assert max(epsilon, rounds) < composed.epsilon < epsilon + rounds
    # bins that are not random are worse, and sampling as much as bins of one epoch do is close
    reference = Phase(Mechanism(FixedOrder(4, 2)), 3.0)
    assert composed.epsilon < phases.compose([POISSON, reference], delta=1e-3).epsilon
    back = phases.compose([POISSON, bins], epsilon=composed.epsilon, **effort)
    assert back.delta == pytest.approx(1e-3, rel=0.1)
    with pytest.raises(UsageError, match="only one phase"):
        phases.compose([bins, bins], delta=1e-3)


def test_epsilon_over_a_run_of_two_phases():
    actual = list(phases.over_training([POISSON, SECOND], delta=1e-6, points=6))
    assert [position for position, _ in actual] == [50, 100, 150, 200, 250, 300]
    values = [guarantee.epsilon for _, guarantee in actual]
    assert values == sorted(values) and len(set(values)) == 6
    assert values[-1] == phases.compose([POISSON, SECOND], delta=1e-6).epsilon
    assert values[3] == phases.compose([POISSON], delta=1e-6).epsilon


def test_the_beginning_of_a_tree_is_no_smaller_tree():
    """The first rows of C are released, whose columns are longer than those of a tree for them."""
    mechanism = Mechanism(FixedOrder(bins=4, epochs=2), Tree())
    half, whole = (actual for _, actual in phases.over_training(mechanism, 2.0, 1e-5, points=2))
    rows = Tree().materialize(8)[:4, :4]
    norm = float(np.max(np.linalg.norm(rows, axis=0)))
    exact = gaussian.epsilon(norm / 2.0, 1e-5)
    assert half.epsilon == pytest.approx(exact, rel=1e-9)
    smaller = account(Mechanism(FixedOrder(4, 1), Tree()), noise_multiplier=2.0, delta=1e-5)
    assert smaller.epsilon < 0.95 * exact and half.epsilon <= whole.epsilon


def test_what_does_not_compose_is_refused():
    with pytest.raises(UsageError, match="composed for one unit"):
        Phase(Mechanism(BallsInBins(4, 2), group_size=2), 1.0)
    pair = Mechanism(CyclicPoisson(0.2, 3, 60), BandedSquareRoot(3), group_size=2)
    with pytest.raises(UsageError, match="not a composition of rounds"):
        Phase(pair, 1.0)
    with pytest.raises(UsageError, match="replace"):
        Phase(Mechanism(BallsInBins(4, 2), adjacency="replace"), 1.0)
    with pytest.raises(UsageError, match="one of ε and δ"):
        phases.compose([POISSON])
    with pytest.raises(UsageError, match="give phases"):
        phases.compose([], delta=1e-5)
    with pytest.raises(UsageError, match="noise_multiplier"):
        next(phases.over_training(POISSON.mechanism, delta=1e-5))
    user = Phase(Mechanism(Poisson(0.1, 3), privacy_unit="user"), 1.0)
    with pytest.raises(UsageError, match="the first phase has example"):
        phases.compose([POISSON, user], delta=1e-5)
    with pytest.raises(UsageError, match="one of"):
        phases.compose([POISSON], delta=1e-5, epsilon=1.0)


@pytest.mark.parametrize(
    ("mechanism", "sigma"),
    before_release(
        [
            (Mechanism(Poisson(0.02, 50)), 1.1),
            (Mechanism(BallsInBins(8, 4)), 2.0),
            (Mechanism(FixedOrder(8, 4)), 4.0),
            (Mechanism(FreshBins(2, 8, rethrow=2)), 2.0),  # four throws
        ],
        0,
    ),
)
def test_epsilon_grows_over_training_up_to_the_whole_account(mechanism, sigma):
    actual = list(phases.over_training(mechanism, sigma, 1e-5, points=4))
    values = [guarantee.epsilon for _, guarantee in actual]
    assert values == sorted(values) and len(set(values)) == 4
    assert actual[-1][0] == mechanism.iterations
    whole = account(mechanism, noise_multiplier=sigma, delta=1e-5).epsilon
    assert values[-1] == whole


def patterns(scheme, steps):
    """Share of the units with each pattern of participations in the first steps."""
    units = 40_000
    draws, codes = scheme.draws(units, seed=7), np.zeros(units, int)
    for step in range(steps):
        codes[draws(step)] += 2**step
    return np.bincount(codes, minlength=2**steps) / units


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        (BallsInBins(4, 2), {"epochs": 1}),
        (FixedOrder(4, 2), {"epochs": 1}),
        (FreshBins(2, 3), {"epochs": 2}),
        (BMinSep(4, 2, separation=2), {"epochs": 1}),
        (BMinSep(4, 2), {"epochs": 1}),
        (Poisson(0.3, 6), {"iterations": 4}),
        (FixedBatch(10_000, 40_000, 6), {"iterations": 4}),
    ],
)
def test_a_run_is_cut_only_where_its_first_steps_are_a_shorter_run(scheme, changes):
    shorter = dataclasses.replace(scheme, **changes)
    separate = (
        np.abs(patterns(scheme, shorter.length) - patterns(shorter, shorter.length)).sum() / 2
    )
    assert separate < 0.02 if scheme.prefix_closed else separate > 0.2


def test_one_bin_leaves_nothing_to_draw():
    scheme = BMinSep(1, 3)
    with pytest.raises(UsageError, match="bins = 1: leaves nothing to draw"):
        account(Mechanism(scheme, BandedSquareRoot(1)), noise_multiplier=1.0, epsilon=1.0)
