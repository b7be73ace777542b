"""Phases that compose, against dp_accounting, closed forms and single phases."""

import math

import pytest
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant

from mfopt.accounting import Mechanism, account, phases
from mfopt.accounting.closed_form import gaussian
from mfopt.accounting.phases import Phase
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, CyclicPoisson, FixedOrder, Poisson
from mfopt.strategies import BandedSquareRoot

POISSON = Phase(Mechanism(Poisson(0.02, 200)), 1.1)
SECOND = Phase(Mechanism(Poisson(0.05, 100)), 1.6)


def test_two_phases_agree_with_dp_accounting_and_come_back_from_its_events():
    both = [POISSON, SECOND]
    event = phases.to_event(both)
    accountant = pld_privacy_accountant.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(event)
    theirs = accountant.get_epsilon(1e-6)
    found = phases.compose(both, delta=1e-6)
    assert found.epsilon == pytest.approx(theirs, rel=1e-3) and found.status == "bound"
    assert phases.compose(both, epsilon=found.epsilon).delta == pytest.approx(1e-6, rel=2e-3)
    assert phases.from_event(event) == both
    repeated = dp_event.SelfComposedDpEvent(dp_event.ComposedDpEvent([event, event]), 3)
    assert sum(one.mechanism.iterations for one in phases.from_event(repeated)) == 6 * 300
    with pytest.raises(UsageError, match="LaplaceDpEvent"):
        phases.from_event(dp_event.LaplaceDpEvent(1.0))


def test_one_phase_is_its_own_account_and_order_does_not_matter():
    alone = account(POISSON.mechanism, noise_multiplier=1.1, delta=1e-6).epsilon
    assert phases.compose([POISSON], delta=1e-6).epsilon == pytest.approx(alone, rel=1e-4)
    one, other = (
        phases.compose(order, delta=1e-6).epsilon
        for order in ([POISSON, SECOND], [SECOND, POISSON])
    )
    assert one == pytest.approx(other, rel=1e-9)
    assert one > max(alone, account(SECOND.mechanism, noise_multiplier=1.6, delta=1e-6).epsilon)


def test_gaussians_compose_to_a_gaussian_and_banded_phases_count():
    order = Phase(Mechanism(FixedOrder(4, 3)), 5.0)
    exact = gaussian.epsilon(math.sqrt(2 * 3 / 25), 1e-5)
    assert phases.compose([order, order], delta=1e-5).epsilon == pytest.approx(exact, rel=1e-4)
    banded = Phase(Mechanism(CyclicPoisson(0.2, 3, 60), BandedSquareRoot(3)), 2.0)
    alone = account(banded.mechanism, noise_multiplier=2.0, delta=1e-5).epsilon
    assert alone < phases.compose([banded, order], delta=1e-5).epsilon < alone + exact


def test_what_does_not_compose_is_refused():
    with pytest.raises(UsageError, match="no composition of rounds"):
        Phase(Mechanism(BallsInBins(4, 2)), 1.0)
    user = Phase(Mechanism(Poisson(0.1, 3), privacy_unit="user"), 1.0)
    with pytest.raises(UsageError, match="the first phase has example"):
        phases.compose([POISSON, user], delta=1e-5)
    with pytest.raises(UsageError, match="one of"):
        phases.compose([POISSON], delta=1e-5, epsilon=1.0)


@pytest.mark.parametrize(
    ("mechanism", "sigma"),
    [
        (Mechanism(Poisson(0.02, 50)), 1.1),
        (Mechanism(BallsInBins(8, 4)), 2.0),
        (Mechanism(FixedOrder(8, 4)), 4.0),
    ],
)
def test_epsilon_grows_over_training_up_to_the_whole_account(mechanism, sigma):
    found = list(phases.over_training(mechanism, sigma, 1e-5, points=4))
    values = [guarantee.epsilon for _, guarantee in found]
    assert values == sorted(values) and len(set(values)) == 4
    assert found[-1][0] == mechanism.iterations
    whole = account(mechanism, noise_multiplier=sigma, delta=1e-5).epsilon
    assert values[-1] == whole
