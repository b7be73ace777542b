"""Sensitivities against brute force over participation patterns and over contribution vectors."""

import itertools

import bench_truth
import numpy as np
import pytest

from mfopt import strategies
from mfopt.accounting import Mechanism, account, unamplified
from mfopt.accounting.loss_distribution import poisson
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins, CyclicPoisson, FixedOrder, MinSeparation, Poisson


def brute_force(matrix, scheme):
    """Largest |C x| over patterns, with scalar contributions of the best signs."""
    signs = np.array([*itertools.product((-1, 1), repeat=len(matrix))])
    patterns = [steps for law in bench_truth.laws(scheme, 1) for steps in law]
    return max(np.linalg.norm(signs * steps @ matrix.T, axis=1).max() for steps in patterns)


def random_dense(n, rng, negative=False):
    matrix = np.tril(rng.uniform(-1 if negative else 0, 1, (n, n)))
    matrix[np.diag_indices(n)] = rng.uniform(0.5, 1.5, n)
    return matrix


def test_fixed_order_is_the_largest_mode_norm_whole_and_block_by_block(monkeypatch):
    rng = np.random.default_rng(8)
    scaled = strategies.TimeScaled(
        strategies.SquareRoot(), rng.uniform(0.5, 2, 35), rng.uniform(0.5, 2, 35)
    )
    for strategy in (strategies.SquareRoot(), scaled, strategies.Dense(random_dense(35, rng))):
        dense = strategy.materialize(35)
        largest = max(np.linalg.norm(dense[:, i::7].sum(axis=1)) for i in range(7))
        for size in (8192, 10):  # all bins, two at a time
            monkeypatch.setattr(unamplified, "_LARGEST_DENSE", size)
            sensitivity = unamplified.fixed_order(strategy, FixedOrder(7, 5))
            assert sensitivity.exact and sensitivity.value == pytest.approx(largest, rel=1e-9)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("scheme", "norm"),
    [
        (FixedOrder(10**9, 2), 2**0.5),
        (MinSeparation(10**9, 1000, 5), 5**0.5),
        pytest.param(Poisson(1e-4, 10**9), None, marks=pytest.mark.release),
    ],
)
def test_independent_noise_takes_no_array_of_all_iterations(scheme, norm, monkeypatch):
    monkeypatch.setattr(strategies.Identity, "toeplitz_coefs", None)
    if norm is None:
        guarantee = account(Mechanism(scheme), noise_multiplier=6.0, epsilon=2)
        # 2.718e-5 to 2.722e-5, on a grid for parts of the rounds; one for all is 2% above
        below, above = guarantee.details["bracket"]
        assert below <= 2.722e-5 and 2.718e-5 <= above == guarantee.delta <= 2.8e-5
        assert guarantee.status == "bound"
    else:
        guarantee = account(Mechanism(scheme), epsilon=2, delta=1e-5)
        plain = account(Mechanism(FixedOrder(1, 1)), epsilon=2, delta=1e-5)
        assert guarantee.noise_multiplier == pytest.approx(norm * plain.noise_multiplier, rel=1e-9)


@pytest.mark.parametrize(
    "scheme",
    [
        *(MinSeparation(10, *each) for each in ((1, 2), (3, 2), (3, 9), (4, 3), (10, 2))),
        FixedOrder(2, 5),
    ],
)
def test_sensitivity_covers_every_pattern_also_of_negative_entries(scheme):
    rng, n = np.random.default_rng(1), 10
    cases = {
        "dense": strategies.Dense(random_dense(n, rng)),
        "negative": strategies.Dense(random_dense(n, rng, negative=True)),
        "banded": strategies.Banded(rng.uniform(0.1, 1, (3, n))),
        "sqrt": strategies.SquareRoot(),
        "increasing": strategies.Toeplitz(np.linspace(0.2, 1, n)),
    }
    for name, strategy in cases.items():
        dense = strategy.materialize(n)
        truth = brute_force(dense, scheme)
        sensitivity = unamplified.sensitivity(strategy, scheme)
        assert sensitivity.value >= truth * (1 - 1e-12), name
        if sensitivity.exact:
            assert sensitivity.value == pytest.approx(truth, rel=1e-9), name
        if scheme.kind == "fixed-order":
            assert sensitivity.exact == (name != "negative"), name
        else:
            disjoint = scheme.separation >= n or (name == "banded" and scheme.separation >= 3)
            assert sensitivity.exact == (name == "sqrt" or disjoint), name
        assert 0.7 * truth < unamplified.attained(strategy, scheme) <= truth * (1 + 1e-12), name


class BandedInverse(strategies.ToeplitzStrategy):
    """A user's own kind: C⁻¹ has ``bands`` bands, C has all of them."""

    kind = "test-banded-inverse"
    bands: int = strategies.setting()

    def toeplitz_coefs(self, n):
        return strategies.BandedInverseSquareRoot(self.bands).toeplitz_coefs(n)


class Boasting(strategies.Strategy):
    """A strategy that states two bands, whatever its matrix has."""

    kind = "test-boasting"
    matrix: strategies.Array = strategies.parameter(dimensions=2)

    def materialize(self, n):
        return self.matrix[:n, :n]

    def column_bands(self, n):
        return 2


def test_cyclic_poisson_believes_the_matrix_and_not_a_name():
    # a unit's columns overlap in C x where C has more bands than groups, whatever is called bands
    scheme = CyclicPoisson(0.5, 4, 16)
    with pytest.raises(UsageError, match="C has 16 bands"):
        account(Mechanism(scheme, BandedInverse(4)), epsilon=2.0, delta=1e-5)
    banded = Mechanism(scheme, strategies.BandedSquareRoot(4))
    assert account(banded, epsilon=2.0, delta=1e-5).noise_multiplier > 0
    lower = random_dense(16, np.random.default_rng(0))
    with pytest.raises(UsageError, match="contradicts its own matrix"):
        account(Mechanism(scheme, Boasting(lower)), epsilon=2.0, delta=1e-5)
    two = Boasting(np.eye(16) + 0.5 * np.eye(16, k=-1))
    assert account(Mechanism(scheme, two), epsilon=2.0, delta=1e-5).noise_multiplier > 0


def test_bands_and_norms_of_a_matrix_that_does_not_fit(monkeypatch):
    entries = np.random.default_rng(1).uniform(0.1, 1, (4, 50))
    for strategy, bands in ((strategies.Banded(entries), 4), (Boasting(np.eye(50)), 1)):
        whole = unamplified.column_norms(strategy, 50)
        with monkeypatch.context() as patch:
            patch.setattr(unamplified, "_LARGEST_DENSE", 20)  # blocks of 8 columns
            assert unamplified.bands(strategy, 50) == bands
            np.testing.assert_allclose(unamplified.column_norms(strategy, 50), whole, rtol=1e-12)


class Short(strategies.ToeplitzStrategy):
    """A Toeplitz strategy that states two bands, whatever its coefficients are."""

    kind = "test-short"
    coefs: strategies.Array = strategies.parameter(dimensions=1)

    def toeplitz_coefs(self, n):
        return strategies.BandedToeplitz(self.coefs).toeplitz_coefs(n)

    def column_bands(self, n):
        return 2


def test_a_time_scaled_band_has_no_dust_behind_it_however_long():
    rng = np.random.default_rng(5)
    for n in (60, 8193):  # a dense matrix, and products by FFT
        rows, columns = rng.uniform(0.5, 2.0, (2, n))
        base = strategies.BandedToeplitz(0.5 ** np.arange(4.0))
        scaled = strategies.TimeScaled(base, rows, columns)
        assert unamplified.bands(scaled, n) == 4
        entries = scaled.banded_columns(n, 4)
        norms = unamplified.column_norms(scaled, n)
        np.testing.assert_allclose(norms, np.linalg.norm(entries, axis=0), rtol=1e-12)
        boast = strategies.TimeScaled(Short(0.5 ** np.arange(4.0)), rows, columns)
        with pytest.raises(UsageError, match="contradicts its own matrix"):
            unamplified.bands(boast, n)


def test_columns_of_unlike_norms_compose_as_in_dp_accounting():
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant

    matrix = random_dense(9, np.random.default_rng(3), negative=True)
    strategy = strategies.Banded.from_dense(matrix, 2)
    norms = unamplified.column_norms(strategy, 9)

    def theirs(columns):
        accountant = PLDAccountant()
        for norm in columns:
            event = dp_event.GaussianDpEvent(3.0 / norm)
            accountant.compose(dp_event.PoissonSampledDpEvent(0.3, event))
        return accountant.get_epsilon(1e-5)

    most = max(theirs(norms[start::2]) for start in range(2))
    ours = account(Mechanism(CyclicPoisson(0.3, 2, 9), strategy), noise_multiplier=3.0, delta=1e-5)
    assert most * (1 - 1e-3) < ours.epsilon < most * 1.04
    assert ours.lower_bound == pytest.approx(most, rel=1e-3)
    # control: as if all columns were as long as the longest
    assert theirs([max(norms)] * 5) > 1.1 * ours.epsilon


def test_many_norms_are_rounded_up_for_an_account_and_down_for_an_attack():
    base, columns = strategies.BandedToeplitz([1.0, 0.5]), np.linspace(2, 1, 1000)
    scaled = strategies.TimeScaled(base, np.ones(1000), columns)
    above, below = poisson._columns(scaled, 1000, 2)
    exact = np.sum(unamplified.column_norms(scaled, 1000)[::2] ** 2)
    lengths = [sum(count * norm**2 for count, norm in part) for part in (below, above)]
    assert 0.95 * exact < lengths[0] < exact < lengths[1] < 1.05 * exact
    assert len(above) <= poisson._NORMS


def test_refusals_name_the_way_out():
    with pytest.raises(UsageError, match="FixedOrder or MinSeparation"):
        unamplified.sensitivity(strategies.Identity(), BallsInBins(2, 2))
    blt = strategies.Toeplitz(np.linspace(0.1, 1, 9000))
    with pytest.raises(UsageError, match="non-increasing"):
        unamplified.sensitivity(blt, MinSeparation(9000, 10, 2))


@pytest.mark.parametrize(
    "scheme",
    [FixedOrder(4, 2), MinSeparation(8, 4, 2), BallsInBins(4, 2), CyclicPoisson(0.5, 2, 8)],
)
@pytest.mark.parametrize(
    ("matrix", "rule"),
    [(np.eye(8) + np.eye(8, k=1), "lower triangular"), (np.eye(8, k=-1), "invertible|greater")],
)
def test_a_matrix_whose_noise_no_loop_could_add_has_no_account(scheme, matrix, rule):
    """A loop solves C y = z from the first step on: entries above the diagonal would be ignored."""
    with pytest.raises(UsageError, match=rule):
        account(Mechanism(scheme, strategies.Dense(matrix)), epsilon=2.0, delta=1e-5)


@pytest.mark.parametrize("scheme", [FixedOrder(4, 1), MinSeparation(4, 2, 2), Poisson(0.1, 4)])
@pytest.mark.parametrize("entry", [1e-169, 1e-60, 1e60, 1e169])
def test_a_c_whose_squares_floats_do_not_hold_is_refused(scheme, entry):
    """Its sensitivity would come out as 0, or as no number."""
    mechanism = Mechanism(scheme, strategies.Toeplitz(np.eye(1, 4)[0] * entry))
    with (
        pytest.raises(UsageError, match="Multiply C by a constant"),
        np.errstate(over="ignore"),
    ):
        account(mechanism, noise_multiplier=1.0, delta=1e-5)
