"""A sample of the benchmark of random accounts, tests/benchmarks/bench_accounts.py."""

import math

import bench_accounts as fuzz
import numpy as np
import pytest

from mfopt.accounting import Mechanism, account
from mfopt.accounting.model import LossModel
from mfopt.sampling import TruncatedPoisson

EXACT = ("fixed-order", "min-separation", "poisson", "cyclic-poisson", "fixed-batch")


@pytest.mark.ci
@pytest.mark.parametrize(("kinds", "accounts"), [(EXACT, 40), (("balls-in-bins", "b-min-sep"), 3)])
def test_random_accounts_end_with_an_answer_or_one_line(kinds, accounts):
    generator = np.random.default_rng(7)
    ends = []
    while len(ends) < accounts:
        mechanism, question = fuzz.drawn(generator, kinds)
        wrong, said = fuzz.fault(mechanism, question)
        assert not wrong, f"{said}: {wrong}"
        ends.append(said)
    assert sum(said.endswith("Error") for said in ends) < accounts / 2


def test_a_fault_is_seen(monkeypatch):
    mechanism, question = fuzz.drawn(np.random.default_rng(0), EXACT)

    def broken(mechanism, **question):
        return math.log(0.0)

    monkeypatch.setattr(fuzz, "account", broken)
    assert "math domain error" in fuzz.fault(mechanism, question)[0]


class Underflow(LossModel):
    """δ(ε) of a Gaussian release, which underflows for ε above 1."""

    method, estimator, status = "none", "none", "estimate"

    def log_estimate(self, noise_multiplier, epsilon):
        return -math.inf if epsilon > 1 else -40 * epsilon

    def guess(self, epsilon, delta):
        return 1.0

    def bounds(self, noise_multiplier, epsilon, plan, trial):
        raise NotImplementedError


@pytest.mark.parametrize("coarsely", [True, False])
def test_a_search_begins_where_the_estimate_underflows(coarsely):
    actual = Underflow().sought_epsilon(1.0, 1e-5, start=2.0, coarsely=coarsely)
    assert actual.value == pytest.approx(math.log(1e5) / 40, rel=2e-3)


def test_an_account_of_losses_that_are_all_infinite_from_below_ends():
    # at so little noise no lower end is found, and ε is stated without one
    mechanism = Mechanism(TruncatedPoisson(0.5, 1, 2, 3))
    guarantee = account(
        mechanism, noise_multiplier=0.037428705901769964, delta=2.341214642428598e-5
    )
    assert 700 < guarantee.epsilon < math.inf and guarantee.lower_bound is None
