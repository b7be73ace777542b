"""What an attacker can do: bounds above the truth and near it, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
from commands import failure, invoked, printed

from mfopt.accounting import Mechanism, Tradeoff, account, tradeoff
from mfopt.errors import FailureError, UsageError
from mfopt.guarantee import Guarantee
from mfopt.sampling import BallsInBins, FixedOrder, Poisson

RATES = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 40)])
NORMAL = scipy.stats.norm


def gaussian(mu, epsilons, **changes):
    """Statements about one Gaussian release that do not say that it is one."""
    mechanism, changes = Mechanism(FixedOrder(4, 1)), {"details": {}, **changes}
    answers = (account(mechanism, noise_multiplier=1 / mu, epsilon=epsilon) for epsilon in epsilons)
    return Tradeoff(dataclasses.replace(answer, **changes) for answer in answers)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_statements_bound_a_gaussian_release_from_above(mu):
    true = NORMAL.cdf(NORMAL.ppf(RATES) + mu)
    small, large = (gaussian(mu, np.linspace(0, 5 * mu * (1 + mu), count)) for count in (3, 200))
    for curve in (small, large):
        assert np.all(curve.true_positive_rate(RATES) >= true)
        assert np.all(curve.false_negative_rate(RATES) <= NORMAL.sf(NORMAL.ppf(RATES) + mu))
        assert curve.advantage >= 2 * NORMAL.cdf(mu / 2) - 1 and curve.mu() >= mu
    position = (RATES > 1e-3) & (RATES < 1)
    assert np.max(large.true_positive_rate(RATES[position]) / true[position]) < 1.004
    assert large.advantage == pytest.approx(2 * NORMAL.cdf(mu / 2) - 1, rel=1e-9)
    assert large.mu() < mu * 1.01 and small.mu() > mu * 1.01


def test_one_statement_is_the_bound_of_its_two_numbers():
    curve = Tradeoff([Guarantee(1.0, 0.01, 1.0)])
    np.testing.assert_allclose(
        curve.true_positive_rate([0.0, 0.1, 0.9]),
        [0.01, 0.01 + 0.1 * math.e, 1 - (0.99 - 0.9) / math.e],
        rtol=1e-9,
    )
    assert curve.advantage == pytest.approx((math.e - 1 + 0.02) / (math.e + 1))
    # no test with both error rates at 0.001 is excluded: not even the smallest rate is
    assert curve.mu(1e-3) < math.inf and Tradeoff([Guarantee(9.0, 0.9, 1.0)]).mu(0.2) == math.inf


def test_a_release_of_one_gaussian_is_exact():
    curve = tradeoff(Mechanism(FixedOrder(4, 1)), 0.5, epsilons=[1.0])
    exact = NORMAL.cdf(NORMAL.ppf(RATES) + 2.0)
    np.testing.assert_allclose(curve.true_positive_rate(RATES), exact, rtol=1e-9)
    assert curve.mu() == pytest.approx(2.0) and curve.status == "exact"


@pytest.mark.release
def test_poisson_sampling_against_dp_accounting():
    from dp_accounting.pld import privacy_loss_distribution

    rounds, probability, epsilons = 100, 0.05, np.linspace(0.0, 6.0, 17)
    curve = tradeoff(Mechanism(Poisson(probability, rounds)), 1.0, epsilons=epsilons)
    theirs = privacy_loss_distribution.from_gaussian_mechanism(
        1.0,
        sampling_prob=probability,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=5e-4,
    ).self_compose(rounds)
    dense = np.linspace(0.0, 9.0, 200)
    optimistic = [
        dataclasses.replace(curve.statements[0], epsilon=position, delta=delta)
        for position, delta in zip(dense, theirs.get_delta_for_epsilon(dense), strict=True)
    ]
    below = Tradeoff(optimistic).true_positive_rate(RATES[RATES > 1e-5])
    above = curve.true_positive_rate(RATES[RATES > 1e-5])
    # between the tangents of 17 statements, where 49 lose half as much
    assert np.all(above >= below * (1 - 1e-6)) and np.max(above / below) < 1.07


def test_what_statements_have_in_common_is_checked():
    statement, other = Guarantee(1.0, 0.01, 1.0), Guarantee(2.0, 0.001, 1.0)
    for changes in ({"noise_multiplier": 2.0}, {"group_size": 2}, {"adjacency": "replace"}):
        with pytest.raises(UsageError, match=next(iter(changes))):
            Tradeoff([statement, dataclasses.replace(other, **changes)])
    for statements in ([], [Guarantee(math.inf, 0.01, 1.0)]):
        with pytest.raises(UsageError, match="statements"):
            Tradeoff(statements)
    for rate in (-0.1, 1.1, math.nan):
        with pytest.raises(UsageError, match="false_positive_rate"):
            Tradeoff([statement]).true_positive_rate([0.5, rate])
    sampled = [dataclasses.replace(entry, failure_probability=0.01) for entry in (statement, other)]
    weak = Tradeoff([sampled[0], dataclasses.replace(sampled[1], status="bound")])
    assert weak.failure_probability == 0.02 and weak.status == "estimate"
    with pytest.raises(FailureError):
        tradeoff(Mechanism(BallsInBins(4, 2)), 1.0, epsilons=[])


def test_curve_of_a_command(tmp_path, capsys):
    words = ["account", "dpsgd", "--probability=0.05", "--iters=50", "--delta=1e-5", "--curve"]
    plot = tmp_path / "curve.svg"
    actual = printed(*words, "--noise-multiplier=1", "--plot", plot)
    curve = actual["curve"]
    assert plot.stat().st_size > 1000 and actual["epsilon"] in curve["epsilons"]
    assert len(curve["epsilons"]) == 9 and curve["failure_probability"] == 0
    rates = curve["true_positive_rates"]
    assert rates == sorted(rates) and rates[-1] == 1.0
    assert "TPR at FPR 0.01" in invoked(*words, "--noise-multiplier=1").stdout
    assert "--curve" in failure(capsys, *words, "--noise-multiplier=1:3")
