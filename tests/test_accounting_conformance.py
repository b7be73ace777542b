"""One suite over all accountants: what any account of any mechanism must satisfy."""

from typing import NamedTuple

import numpy as np
import pytest
from test_strategies import EVERY_KIND, every_strategy

from mfopt.accounting import Mechanism, account, analysis
from mfopt.accounting.account import registered
from mfopt.accounting.closed_form.gaussian import GaussianProfile
from mfopt.errors import UsageError
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
from mfopt.strategies import BandedSquareRoot, Dense, SquareRoot
from mfopt.testing import check_accountant

DELTA = 1e-5


class Case(NamedTuple):
    """A mechanism, a σ, the same mechanism for longer, and what its account is called."""

    sigma: float
    mechanism: Mechanism
    longer: Mechanism
    status: str = "exact"
    tolerance: float = 1e-4
    samples: int = 2**14


ROOT, BANDED = SquareRoot(), BandedSquareRoot(3)
CASES = {
    "fixed order": Case(9.0, Mechanism(FixedOrder(8, 3), ROOT), Mechanism(FixedOrder(8, 4), ROOT)),
    "fixed order, replace": Case(
        7.0, *(Mechanism(FixedOrder(8, n), adjacency="replace") for n in (3, 4))
    ),
    "min separation": Case(
        9.0, *(Mechanism(MinSeparation(n, 8, m), ROOT) for n, m in ((40, 4), (60, 5)))
    ),
    "poisson": Case(1.2, *(Mechanism(Poisson(0.05, n)) for n in (100, 200))),
    "poisson, group of 5": Case(
        2.0, *(Mechanism(Poisson(0.02, n), group_size=5) for n in (200, 300))
    ),
    "poisson users": Case(
        8.0, Mechanism(Poisson(1.0, 20), privacy_unit="user"), Mechanism(Poisson(1.0, 30))
    ),
    "cyclic poisson": Case(1.5, *(Mechanism(CyclicPoisson(0.2, 3, n), BANDED) for n in (60, 90))),
    "cyclic poisson, pairs": Case(
        3.0,
        *(Mechanism(CyclicPoisson(0.2, 3, n), BANDED, group_size=2) for n in (60, 90)),
        "bound",
        2e-2,
    ),
    "fixed batch": Case(
        4.0, *(Mechanism(FixedBatch(20, 400, n), group_size=3) for n in (100, 150))
    ),
    "truncated poisson": Case(
        1.5, *(Mechanism(TruncatedPoisson(0.05, 24, 400, n)) for n in (60, 120)), "bound"
    ),
    "balls in bins, C = I": Case(1.6, *(Mechanism(BallsInBins(16, n)) for n in (4, 6))),
    "balls in bins, C = I, group of 3": Case(
        4.0, *(Mechanism(BallsInBins(16, n), group_size=3) for n in (4, 6)), "bound", 6e-2
    ),
    "balls in bins": Case(
        2.5,
        *(Mechanism(BallsInBins(16, n), BandedSquareRoot(4)) for n in (2, 4)),
        "certified",
        3e-2,
    ),
    "fresh bins": Case(
        2.0, *(Mechanism(FreshBins(8, n), BANDED) for n in (2, 3)), "certified", 3e-2, 2**16
    ),
    "b-min-sep": Case(
        2.0, *(Mechanism(BMinSep(8, n, 5), BANDED) for n in (2, 3)), "certified", 3e-2, 2**16
    ),
    "random partition": Case(
        2.0,
        *(Mechanism(RandomPartition(8, n, 3), BANDED) for n in (2, 3)),
        "certified",
        3e-2,
        2**16,
    ),
}
EXACT = {name: case for name, case in CASES.items() if case.tolerance < 1e-3}
# certificates of many compiled parts
SLOW = {
    "b-min-sep",
    "random partition",
    "fresh bins",
    "cyclic poisson, pairs",
    "balls in bins, C = I",
    "balls in bins, C = I, group of 3",
}
LATER = dict.fromkeys(SLOW, pytest.mark.release) | dict.fromkeys(
    ("balls in bins", "truncated poisson", "fixed batch"), pytest.mark.ci
)
everyone = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=LATER.get(name, ())) for name, case in CASES.items()]
)


def patterns(mechanism):
    """Where the participations are not drawn: all that there are of one unit in fixed order, or
    the densest one; of a unit that is one of K, all K alike."""
    scheme, steps = mechanism.sampling, np.arange(mechanism.iterations)
    separate = getattr(scheme, "bins", None) or scheme.separation
    limit = 3 if scheme.kind == "fixed-order" else scheme.participations
    participated = (steps % separate == 0) & (steps < limit * separate)
    return np.tile(participated * float(mechanism.group_size), (2, 1))


@pytest.mark.ci
@everyone
def test_an_account_satisfies_what_holds_for_all(case):
    mechanism, effort = case.mechanism, {"samples": case.samples, "seed": 1}
    public = mechanism.sampling.kind in ("fixed-order", "min-separation")
    check_accountant(
        mechanism,
        noise_multiplier=case.sigma,
        delta=DELTA,
        longer=case.longer,
        patterns=patterns(mechanism) if public else None,
        tolerance=case.tolerance,
        **effort,
    )
    guarantee = account(mechanism, noise_multiplier=case.sigma, delta=DELTA, **effort)
    assert guarantee.status == case.status


def test_every_accountant_of_the_project_has_a_case():
    cases = {case.mechanism.sampling.kind for case in CASES.values()}
    project_kinds = {
        kind
        for kind, actual in registered().items()
        if any(type(accountant).__module__.startswith("mfopt.") for accountant in actual)
    }
    assert cases == project_kinds


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_both_directions_are_covered(case):
    bound = analysis(case.mechanism)
    # of the scheme's own accountant, without the bound that holds anyway
    profile = getattr(bound, "parts", (bound,))[-1].bound.profile(case.sigma)
    scheme = case.mechanism.sampling
    one_gaussian = scheme.kind in ("fixed-order", "min-separation")
    one_gaussian |= getattr(scheme, "probability", 0) == 1  # every unit in every batch
    assert isinstance(profile, GaussianProfile) == one_gaussian
    unchanged = one_gaussian or case.mechanism.sampling.describe().get("probability") == 1
    for epsilon in (0.05, 1.0):
        log_delta = profile.log_delta(epsilon)
        remove = profile.log_delta(epsilon, "remove")
        add = profile.log_delta(epsilon, "add")
        assert log_delta == pytest.approx(max(remove, add), abs=1e-9)
        assert (abs(remove - add) <= 1e-6) == unchanged


def test_exactly_two_of_three():
    mechanism = Mechanism(Poisson(0.1, 10))
    for arguments in (
        {},
        {"epsilon": 1.0},
        {"epsilon": 1.0, "delta": 0.1, "noise_multiplier": 1.0},
    ):
        with pytest.raises(UsageError, match="exactly two"):
            account(mechanism, **arguments)


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: Mechanism(Poisson(0.1, 20), SquareRoot()), "cyclic-poisson"),
        (lambda: Mechanism(CyclicPoisson(0.1, 2, 20), BandedSquareRoot(3)), "bands >= 3"),
        (lambda: Mechanism(FixedBatch(2, 9, 20), SquareRoot()), "balls-in-bins"),
        (lambda: Mechanism(BallsInBins(5, 2), adjacency="replace"), "add-remove.*FixedOrder"),
        (lambda: Mechanism(FixedBatch(2, 9, 20), group_size=10), "9 units"),
        (lambda: Mechanism(FixedBatch(5, 9, 20), group_size=5), "4 units are left"),
        (lambda: Mechanism(Poisson(0.1, 20), group_size=0), "at least 1"),
        (lambda: Mechanism(Poisson(0.1, 20), adjacency="other"), "one of"),
        (lambda: Mechanism("poisson"), "mfopt.sampling"),
    ],
)
def test_what_has_no_analysis_is_refused_with_the_nearest_that_has(make, nearest):
    with pytest.raises(UsageError, match=nearest):
        account(make(), noise_multiplier=1.0, delta=1e-5)


def test_zero_out_is_the_same_pair_as_add_remove():
    for scheme in (Poisson(0.1, 20), BallsInBins(5, 2)):
        values = [
            account(Mechanism(scheme, adjacency=a), noise_multiplier=1.0, delta=1e-5).epsilon
            for a in ("add-remove", "zero-out")
        ]
        assert values[0] == values[1]


def test_scaling_c_scales_sigma():
    """σ is for C as stored: half of C needs half of σ."""
    from mfopt.strategies import BandedToeplitz

    scheme = CyclicPoisson(0.2, 2, 40)
    whole = account(Mechanism(scheme, BandedToeplitz([1.0, 0.6])), epsilon=1.0, delta=1e-5)
    half = account(Mechanism(scheme, BandedToeplitz([0.5, 0.3])), epsilon=1.0, delta=1e-5)
    assert half.noise_multiplier == pytest.approx(whole.noise_multiplier / 2, rel=1e-5)


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(
    "scheme",
    [FixedOrder(4, 3), MinSeparation(12, 3, 4), CyclicPoisson(0.3, 4, 12), Poisson(0.3, 12)],
    ids=lambda scheme: scheme.kind,
)
def test_every_kind_of_c_is_accounted_as_its_dense_matrix_or_refused_as_it_is(scheme, kind):
    strategy = every_strategy(12)[kind]
    dense = Mechanism(scheme, Dense(strategy.materialize(12)))
    question = {"noise_multiplier": 3.0, "delta": 1e-5}
    try:
        guarantee = account(Mechanism(scheme, strategy), **question)
    except UsageError:
        with pytest.raises(UsageError):
            account(dense, **question)
        return
    if kind != "identity" or scheme.kind != "poisson":  # where an identity is known by its class
        oracle = account(dense, **question).epsilon
        # of columns that fall, a bound on patterns of the dense matrix is not attained
        lowest = 0.0 if scheme.kind == "min-separation" else (1 - 1e-9) * oracle
        assert lowest <= guarantee.epsilon <= (1 + 1e-9) * oracle
    assert 0 < guarantee.lower_bound <= guarantee.epsilon
    for change in ({"noise_multiplier": 3.3}, {"delta": 1e-4}):
        assert account(Mechanism(scheme, strategy), **question | change).epsilon < guarantee.epsilon
