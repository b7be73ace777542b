"""One suite over all accountants: what any account of any mechanism must satisfy."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from mfopt.accounting import Mechanism, account, analysis
from mfopt.accounting.account import registered
from mfopt.accounting.closed_form.gaussian import GaussianProfile
from mfopt.errors import UsageError
from mfopt.sampling import (
    BallsInBins,
    CyclicPoisson,
    FixedBatch,
    FixedOrder,
    FreshBins,
    MinSeparation,
    Poisson,
    TruncatedPoisson,
)
from mfopt.strategies import BandedSquareRoot, Identity, SquareRoot
from mfopt.testing import check_accountant

DELTA = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """A mechanism, a σ, how to make it longer, and what its account is called; ``projection``
    gives means and weights of the released sum along one direction, for a lower bound."""

    mechanism: Mechanism
    sigma: float
    longer: Mechanism
    status: str
    projection: object
    tolerance: float = 1e-4
    samples: int = 2**14

    @property
    def options(self):
        return {"samples": self.samples, "seed": 1}

    @property
    def sampled(self):
        return self.status == "certified"


def binomial_projection(rounds, probability, group_size, norm=1.0):
    """Mean of the rounds' sum over √rounds, in clip norms."""
    counts = np.arange(group_size * rounds + 1)
    weights = stats.binom.pmf(counts, group_size * rounds, probability)
    return counts * norm / math.sqrt(rounds), weights


def mode_projection(mechanism):
    """Means of the ways to fall along the mean mode, for one unit or K in the same direction."""
    scheme = BallsInBins(mechanism.sampling.bins, mechanism.sampling.epochs)
    modes = np.asarray(mechanism.strategy.modes(scheme))
    direction = modes.mean(axis=1)
    means = direction @ modes / np.linalg.norm(direction)
    if mechanism.group_size == 1:
        return means, np.full(scheme.bins, 1 / scheme.bins)
    assert np.ptp(means) < 1e-9  # orthogonal modes: every way to fall has the same projection
    return means[:1] * mechanism.group_size, np.ones(1)


def pattern_projection(mechanism):
    """Means along the mean of all patterns of two independent bins."""
    bins = mechanism.sampling.bins
    columns = np.asarray(mechanism.strategy.materialize(mechanism.iterations))
    means = columns.mean(axis=1) @ columns / np.linalg.norm(columns.mean(axis=1))
    both = means[:bins, None] + means[None, bins:]
    return both.ravel(), np.full(bins**2, 1 / bins**2)


def fixed_batch_projection(scheme, group_size):
    counts = np.arange(group_size + 1)
    law = stats.hypergeom(scheme.population, group_size, scheme.batch_size)
    return 2.0 * counts, law.pmf(counts)


CASES = {
    "fixed order": Case(
        Mechanism(FixedOrder(8, 3), SquareRoot()),
        9.0,
        Mechanism(FixedOrder(8, 4), SquareRoot()),
        "exact",
        lambda m: (
            np.linalg.norm(np.asarray(m.strategy.modes(BallsInBins(8, 3))), axis=0)[:1],
            np.ones(1),
        ),
    ),
    "fixed order, replace": Case(
        Mechanism(FixedOrder(8, 3), adjacency="replace"),
        7.0,
        Mechanism(FixedOrder(8, 4), adjacency="replace"),
        "exact",
        lambda m: (np.array([2 * math.sqrt(3)]), np.ones(1)),
    ),
    "min separation": Case(
        Mechanism(MinSeparation(40, 8, 4), SquareRoot()),
        9.0,
        Mechanism(MinSeparation(60, 8, 5), SquareRoot()),
        "exact",
        lambda m: (np.ones(1), np.ones(1)),
    ),
    "poisson": Case(
        Mechanism(Poisson(0.05, 100)),
        1.2,
        Mechanism(Poisson(0.05, 200)),
        "exact",
        lambda m: binomial_projection(100, 0.05, 1),
    ),
    "poisson, group of 5": Case(
        Mechanism(Poisson(0.02, 200), group_size=5),
        2.0,
        Mechanism(Poisson(0.02, 300), group_size=5),
        "exact",
        lambda m: binomial_projection(200, 0.02, 5),
    ),
    "poisson users": Case(
        Mechanism(Poisson(1.0, 20), privacy_unit="user"),
        8.0,
        Mechanism(Poisson(1.0, 30)),
        "exact",
        lambda m: binomial_projection(20, 1.0, 1),
    ),
    "cyclic poisson": Case(
        Mechanism(CyclicPoisson(0.2, 3, 60), BandedSquareRoot(3)),
        1.5,
        Mechanism(CyclicPoisson(0.2, 3, 90), BandedSquareRoot(3)),
        "exact",
        lambda m: binomial_projection(20, 0.2, 1),
    ),
    "cyclic poisson, pairs": Case(
        Mechanism(CyclicPoisson(0.2, 3, 60), BandedSquareRoot(3), group_size=2),
        3.0,
        Mechanism(CyclicPoisson(0.2, 3, 90), BandedSquareRoot(3), group_size=2),
        "bound",
        lambda m: binomial_projection(20, 0.2, 1),
        tolerance=2e-2,
    ),
    "fixed batch": Case(
        Mechanism(FixedBatch(20, 400, 100), group_size=3),
        4.0,
        Mechanism(FixedBatch(20, 400, 150), group_size=3),
        "exact",
        lambda m: fixed_batch_projection(m.sampling, 3),
    ),
    "truncated poisson": Case(
        Mechanism(TruncatedPoisson(0.05, 24, 400, 60)),
        1.5,
        Mechanism(TruncatedPoisson(0.05, 24, 400, 120)),
        "bound",
        # with others that give nothing
        lambda m: binomial_projection(
            60, (1 - m.sampling.full) * 0.05 + m.sampling.full * m.sampling.kept, 1
        ),
    ),
    "balls in bins, C = I": Case(
        Mechanism(BallsInBins(16, 4)),
        1.6,
        Mechanism(BallsInBins(16, 6)),
        "exact",
        mode_projection,
    ),
    "balls in bins, C = I, group of 3": Case(
        Mechanism(BallsInBins(16, 4), group_size=3),
        4.0,
        Mechanism(BallsInBins(16, 6), group_size=3),
        "bound",
        mode_projection,
        tolerance=6e-2,
    ),
    "balls in bins": Case(
        Mechanism(BallsInBins(16, 2), BandedSquareRoot(4)),
        2.5,
        Mechanism(BallsInBins(16, 4), BandedSquareRoot(4)),
        "certified",
        mode_projection,
        tolerance=3e-2,
    ),
    "fresh bins": Case(
        Mechanism(FreshBins(8, 2), BandedSquareRoot(3)),
        2.0,
        Mechanism(FreshBins(8, 3), BandedSquareRoot(3)),
        "certified",
        pattern_projection,
        tolerance=3e-2,
        samples=2**16,
    ),
}
EXACT = {name: case for name, case in CASES.items() if case.tolerance < 1e-3}
# certificates of many compiled parts
SLOW = {
    "fresh bins",
    "cyclic poisson, pairs",
    "balls in bins, C = I",
    "balls in bins, C = I, group of 3",
}
everyone = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.release] * (name in SLOW))
        for name, case in CASES.items()
    ],
)


def lower_bound(means, weights, sigma, epsilon):
    """Largest P(x > t) - e^ε Q(x > t) over half-lines, at or below δ(ε) in either direction."""
    t = np.linspace(-6, 6 + float(np.max(means)) / sigma, 4001)
    upper = weights @ stats.norm.sf(t[None, :] - means[:, None] / sigma)
    lower = weights @ stats.norm.cdf(t[None, :] - means[:, None] / sigma)
    remove = upper - math.exp(epsilon) * stats.norm.sf(t)
    add = stats.norm.cdf(t) - math.exp(epsilon) * lower
    return max(float(remove.max()), float(add.max()))


def patterns(mechanism):
    """Where the participations are not drawn: all that there are of one unit in fixed order, or
    the densest one; of a unit that is one of K, all K alike."""
    scheme, steps = mechanism.sampling, np.arange(mechanism.iterations)
    apart = getattr(scheme, "bins", None) or scheme.separation
    most = 3 if scheme.kind == "fixed-order" else scheme.participations
    taken = (steps % apart == 0) & (steps < most * apart)
    return np.tile(taken * float(mechanism.group_size), (2, 1))


@pytest.mark.ci
@everyone
def test_an_account_satisfies_what_holds_for_all(case):
    public = case.mechanism.sampling.kind in ("fixed-order", "min-separation")
    check_accountant(
        case.mechanism,
        noise_multiplier=case.sigma,
        delta=DELTA,
        longer=case.longer,
        patterns=patterns(case.mechanism) if public else None,
        population=case.mechanism.sampling.describe().get("population"),
        runs=4000 if case.mechanism.sampling.independent else 200,
        tolerance=max(case.tolerance, 1e-4),
        **case.options,
    )
    found = account(case.mechanism, noise_multiplier=case.sigma, delta=DELTA, **case.options)
    assert found.status == case.status


def test_every_accountant_of_the_project_has_a_case():
    cases = {case.mechanism.sampling.kind for case in CASES.values()}
    own = {
        kind
        for kind, found in registered().items()
        if any(type(accountant).__module__.startswith("mfopt.") for accountant in found)
    }
    assert cases == own


@everyone
def test_never_below_a_lower_bound_in_closed_form(case):
    means, weights = case.projection(case.mechanism)
    for epsilon in (0.3, 1.0, 2.5):
        found = account(
            case.mechanism, noise_multiplier=case.sigma, epsilon=epsilon, **case.options
        )
        assert found.delta >= lower_bound(means, weights, case.sigma, epsilon) * (1 - 1e-6)
    if case.mechanism.sampling.kind == "fixed-order":
        # control: the lower bound is the truth here, so that a smaller claim would be seen
        found = account(case.mechanism, noise_multiplier=case.sigma, epsilon=0.3)
        truth = lower_bound(means, weights, case.sigma, 0.3)
        assert found.delta == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("case", EXACT.values(), ids=EXACT.keys())
def test_both_directions_are_covered(case):
    found = analysis(case.mechanism)
    # of the scheme's own accountant, without the bound that holds anyway
    profile = getattr(found, "parts", (found,))[-1].profile(case.sigma)
    one_gaussian = case.mechanism.sampling.kind in ("fixed-order", "min-separation")
    assert isinstance(profile, GaussianProfile) == one_gaussian
    same = one_gaussian or case.mechanism.sampling.describe().get("probability") == 1
    for epsilon in (0.05, 1.0):
        both = profile.log_delta(epsilon)
        remove = profile.log_delta(epsilon, "remove")
        add = profile.log_delta(epsilon, "add")
        assert both == pytest.approx(max(remove, add), abs=1e-9)
        assert (abs(remove - add) <= 1e-6) == same


def test_exactly_two_of_three():
    mechanism = Mechanism(Poisson(0.1, 10))
    for given in ({}, {"epsilon": 1.0}, {"epsilon": 1.0, "delta": 0.1, "noise_multiplier": 1.0}):
        with pytest.raises(UsageError, match="exactly two"):
            account(mechanism, **given)


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: Mechanism(Poisson(0.1, 20), SquareRoot()), "CyclicPoisson"),
        (lambda: Mechanism(CyclicPoisson(0.1, 2, 20), BandedSquareRoot(3)), "bands >= 3"),
        (lambda: Mechanism(FixedBatch(2, 9, 20), SquareRoot()), "BallsInBins"),
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


def test_number_of_samples_is_checked():
    for samples in (0, -5, 1.5):
        with pytest.raises(UsageError, match="samples"):
            account(
                Mechanism(BallsInBins(4, 5), SquareRoot()),
                noise_multiplier=1.0,
                delta=1e-5,
                samples=samples,
            )


def test_scaling_c_scales_sigma():
    """σ is for C as stored: half of C needs half of σ."""
    from mfopt.strategies import BandedToeplitz

    scheme = CyclicPoisson(0.2, 2, 40)
    whole = account(
        Mechanism(scheme, BandedToeplitz(np.array([1.0, 0.6]))), epsilon=1.0, delta=1e-5
    )
    half = account(Mechanism(scheme, BandedToeplitz(np.array([0.5, 0.3]))), epsilon=1.0, delta=1e-5)
    assert half.noise_multiplier == pytest.approx(whole.noise_multiplier / 2, rel=1e-5)


def test_one_bin_is_the_gaussian_mechanism_and_many_bins_amplify():
    one = account(Mechanism(BallsInBins(1, 9)), noise_multiplier=6.0, delta=1e-6)
    plain = account(Mechanism(FixedOrder(1, 9)), noise_multiplier=6.0, delta=1e-6)
    assert one.epsilon == pytest.approx(plain.epsilon, rel=1e-4)
    assert one.epsilon >= plain.epsilon * (1 - 1e-9)
    many = account(Mechanism(BallsInBins(9, 9)), noise_multiplier=6.0, delta=1e-6)
    assert many.epsilon < 0.6 * plain.epsilon


def test_identity_by_name_and_by_one_band_agree():
    scheme = Poisson(0.1, 50)
    values = [
        account(Mechanism(scheme, strategy), noise_multiplier=1.0, delta=1e-5).epsilon
        for strategy in (Identity(), BandedSquareRoot(1))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-12)
