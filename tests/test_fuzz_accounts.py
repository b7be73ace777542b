"""Random small accounts under every scheme: each ends with a sound guarantee or one line.

An account is a scheme of at most 12 iterations, a C, a group of at most 3 units, an adjacency, and
two of σ, ε and δ drawn over many orders of magnitude. It ends with a guarantee whose numbers are
finite (an ε or σ may be infinite), whose δ is a probability and whose lower end is not above the
answer; or with one line of UsageError or FailureError. Only few shapes are drawn, since each is
compiled.
"""

import math
import traceback

import numpy as np
import pytest

from mfopt.accounting import Mechanism, account
from mfopt.accounting.model import LossModel
from mfopt.errors import FailureError, UsageError
from mfopt.sampling import (
    BallsInBins,
    BMinSep,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    RandomPartition,
    TruncatedPoisson,
)
from mfopt.strategies import BandedSquareRoot, Identity, SquareRoot

QUESTIONS = ("noise_multiplier", "epsilon", "delta")
SCHEMES = {
    "balls-in-bins": (BallsInBins(4, 2), BallsInBins(2, 3), BallsInBins(1, 2)),
    "fresh-bins": (FreshBins(4, 2), FreshBins(3, 3), FreshBins(4, 2, 2)),
    "b-min-sep": (BMinSep(4, 2, 2), BMinSep(4, 2, 1), BMinSep(3, 3, 2)),
    "random-partition": (RandomPartition(4, 2, 2), RandomPartition(5, 1, 2)),
    "fixed-order": (FixedOrder(4, 2), FixedOrder(1, 1)),
    "min-separation": (MinSeparation(8, 3, 2), MinSeparation(6, 1, 6)),
    "poisson": (Poisson(0.25, 8), Poisson(0.001, 12), Poisson(1.0, 3)),
    "cyclic-poisson": (CyclicPoisson(0.5, 2, 8), CyclicPoisson(0.01, 3, 12)),
    "fixed-batch": (FixedBatch(2, 8, 8), FixedBatch(8, 8, 2)),
    "truncated-poisson": (TruncatedPoisson(0.25, 4, 8, 8), TruncatedPoisson(0.5, 1, 2, 3)),
}
STRATEGIES = (Identity(), BandedSquareRoot(2), SquareRoot())
EXACT = ("fixed-order", "min-separation", "poisson", "cyclic-poisson", "fixed-batch")


def drawn(generator, kinds):
    """(mechanism, two of three numbers and how to prove them) of a random account.

    Raises:
      UsageError: C does not fit the scheme.
    """
    schemes = SCHEMES[kinds[generator.integers(len(kinds))]]
    scheme = schemes[generator.integers(len(schemes))]
    strategy = STRATEGIES[generator.choice(len(STRATEGIES), p=(0.45, 0.45, 0.1))]
    group = int(generator.choice((1, 2, 3), p=(0.75, 0.15, 0.1)))
    adjacency = generator.choice(("add-remove", "zero-out", "replace"), p=(0.8, 0.1, 0.1))
    logs = {
        "noise_multiplier": generator.uniform(-1.5, 2.0),
        "epsilon": generator.uniform(-2.0, 1.5),
        "delta": generator.uniform(-12.0, -0.5),
    }
    sought = generator.choice(QUESTIONS, p=(0.3, 0.5, 0.2))
    question = {name: 10.0 ** float(log) for name, log in logs.items() if name != sought}
    effort = {"seed": int(generator.integers(2**32))}
    if generator.random() < 0.15:
        effort["certificate"] = "deterministic"
    elif generator.random() < 0.1:
        effort["certify"] = False
    return Mechanism(scheme, strategy, group, "example", str(adjacency)), question | effort


def fault(mechanism, question, account=account):
    """("", how it ended) of an account; (what is wrong, its question) where something is."""
    arguments = f"account({mechanism}, {question})"
    try:
        answer = account(mechanism, **question)
    except (FailureError, UsageError) as refusal:
        fits = str(refusal) and "\n" not in str(refusal)
        return ("", type(refusal).__name__) if fits else (f"message {refusal!r}", arguments)
    except Exception:
        return traceback.format_exc(), arguments
    sigma, epsilon, delta = answer.noise_multiplier, answer.epsilon, answer.delta
    (sought,) = set(QUESTIONS) - set(question)
    low = answer.lower_bound or 0.0
    fits = (
        min(sigma, epsilon) >= 0
        and 0 <= delta <= 1
        and 0 <= answer.failure_probability <= delta
        and 0 <= low <= getattr(answer, sought)
        and all(
            math.isclose(getattr(answer, name), question[name]) for name in {*QUESTIONS} - {sought}
        )
    )
    return ("", answer.status) if fits else (f"answer {answer!r}", arguments)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kinds", "accounts"),
    [
        (EXACT, 40),
        (("balls-in-bins", "b-min-sep"), 3),
        pytest.param(tuple(SCHEMES), 40, marks=pytest.mark.release),
    ],
)
def test_random_accounts_end_with_an_answer_or_one_line(kinds, accounts):
    generator = np.random.default_rng(7)
    ends = []
    while len(ends) < accounts:
        try:
            mechanism, question = drawn(generator, kinds)
        except UsageError:  # C does not fit the scheme
            continue
        wrong, said = fault(mechanism, question)
        assert not wrong, f"{said}: {wrong}"
        ends.append(said)
    assert sum(said.endswith("Error") for said in ends) < accounts / 2


def test_a_fault_is_seen():
    entry = drawn(np.random.default_rng(0), EXACT)
    assert "ZeroDivisionError" in fault(*entry, lambda *_, **__: 1 / 0)[0]


class Underflow(LossModel):
    """δ(ε) of a Gaussian release, which underflows for ε above 1."""

    method, estimator, status = "none", "none", "estimate"

    def log_estimate(self, noise_multiplier, epsilon):
        return -math.inf if epsilon > 1 else -40 * epsilon

    def guess(self, epsilon, delta):
        return 1.0

    def bounds(self, noise_multiplier, epsilon, plan, trial):
        raise NotImplementedError


@pytest.mark.parametrize("near", [1e-2, 0.0])
def test_a_search_begins_where_the_estimate_underflows(near):
    actual = Underflow().sought_epsilon(1.0, 1e-5, start=2.0, near=near)
    assert actual.value == pytest.approx(math.log(1e5) / 40, rel=2e-3)


def test_an_account_of_losses_that_are_all_infinite_from_below_ends():
    # at so little noise no lower end is found, and ε is stated without one
    mechanism = Mechanism(TruncatedPoisson(0.5, 1, 2, 3))
    guarantee = account(
        mechanism, noise_multiplier=0.037428705901769964, delta=2.341214642428598e-5
    )
    assert 700 < guarantee.epsilon < math.inf and guarantee.lower_bound is None
