"""Optimization without amplification, against slow forms and independent optima."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from mfopt import UsageError, query_error
from mfopt.accounting import sensitivity
from mfopt.optimize import Form, Search, unamplified
from mfopt.sampling import FixedOrder
from mfopt.strategies import Banded, Identity, SquareRoot
from mfopt.strategies.prefix_recursion import prefix_row_variances
from mfopt.workloads import PrefixSums

SCHEME = FixedOrder(bins=8, epochs=3)
EXACT = Search(tolerance=1e-12)
N = SCHEME.iterations


def random_band(bands, n):
    rng = np.random.default_rng(0)
    entries = rng.uniform(0.05, 0.5, (bands, n))
    entries[0] += 1
    return entries


@pytest.mark.parametrize(("bands", "n"), [(1, 1), (1, 40), (5, 38), (17, 40)])
def test_variances_of_a_band_are_those_of_the_dense_matrix(bands, n):
    entries = random_band(bands, n)
    inverse = np.tril(np.ones((n, n))) @ np.linalg.inv(Banded(entries).materialize(n))
    # what is not part of C changes nothing
    entries[np.arange(bands)[:, None] + np.arange(n) >= n] = np.nan
    with jax.enable_x64(True):
        variances = jax.jit(prefix_row_variances)(entries)
    np.testing.assert_allclose(variances, np.sum(inverse**2, axis=1), rtol=1e-12)


@pytest.mark.parametrize(
    ("bands", "equal"),
    [(3, True), (3, False), (8, False), (12, True)],  # of the last, modes
)
def test_parameters_make_columns_or_modes_of_the_norm_that_is_due(bands, equal):
    shape = unamplified.FixedBands(bands, N, SCHEME.bins, SCHEME.epochs, equal)
    entries = random_band(bands, N)
    with jax.enable_x64(True):
        actual = Banded(np.asarray(shape.build(jnp.asarray(shape.parameters(entries)))))
    assert sensitivity(actual, SCHEME).value == pytest.approx(1, rel=1e-9)
    # C but for a scale of each column
    scale = np.asarray(actual.entries(N)) / np.asarray(Banded(entries).entries(N)).clip(1e-300)
    np.testing.assert_allclose(scale[0, : N - 2], scale[1, : N - 2], rtol=1e-9)


@pytest.fixture(scope="module")
def optima():
    return {
        kind: unamplified.optimize(SCHEME, Form(kind, bands=4), search=EXACT)
        for kind in ("banded", "banded-toeplitz", "blt", "dense")
    }


def error(optimum):
    """RMSE of prefix sums per unit of (noise over sensitivity)."""
    return optimum.sensitivity * float(query_error.rmse(PrefixSums(), optimum.strategy, N))


@pytest.mark.release
def test_banded_optimum_solves_the_convex_problem(optima):
    """The same minimum from X = CᵀC with a plain BFGS: the problem is convex in X."""
    lag = np.subtract.outer(np.arange(N), np.arange(N))
    free = np.flatnonzero(((lag > 0) & (lag < 4)).ravel())
    prefix = np.tril(np.ones((N, N)))
    squares = prefix.T @ prefix

    def loss(x):
        gram = np.zeros(N * N)
        gram[free] = x
        gram = gram.reshape(N, N)
        gram = gram + gram.T + np.eye(N)
        if np.linalg.eigvalsh(gram)[0] <= 1e-9:
            return 1e9
        return float(np.log(np.trace(np.linalg.solve(gram, squares))))

    best = scipy.optimize.minimize(loss, np.zeros(len(free)), method="BFGS", options={"gtol": 1e-6})
    rmse = np.sqrt(np.exp(best.fun) * SCHEME.epochs / N)
    assert error(optima["banded"]) == pytest.approx(rmse, rel=1e-5)


@pytest.mark.ci
def test_more_freedom_never_costs(optima):
    toeplitz, banded, dense, blt = (
        error(optima[kind]) for kind in ("banded-toeplitz", "banded", "dense", "blt")
    )
    identity = float(query_error.rmse(PrefixSums(), Identity(), N)) * np.sqrt(SCHEME.epochs)
    assert dense < banded < toeplitz < identity
    for actual in optima.values():  # normalized, which its error rests on
        assert sensitivity(actual.strategy, SCHEME).value == pytest.approx(1, rel=1e-9)
        assert actual.sensitivity == pytest.approx(1, rel=1e-9)
    # four buffers against four bands: a BLT reaches over the whole run
    assert dense < blt < identity
    unequal = unamplified.optimize(SCHEME, Form("dense"), search=EXACT, equal_columns=False)
    assert error(unequal) < dense
    assert sensitivity(unequal.strategy, SCHEME).value == pytest.approx(1, rel=1e-9)


def test_columns_have_one_norm_as_cyclic_poisson_needs(optima):
    norms = np.linalg.norm(np.asarray(optima["banded"].strategy.materialize(N)), axis=0)
    np.testing.assert_allclose(norms, SCHEME.epochs**-0.5, rtol=1e-12)


def test_bad_input_is_named():
    for settings, name in [
        ({"form": Form("tree")}, "strategy"),
        ({"form": Form("dense"), "search": Search(init=SquareRoot())}, "init"),
    ]:
        with pytest.raises(UsageError, match=name):
            unamplified.optimize(SCHEME, **settings)
    with pytest.raises(UsageError, match="scheme"):
        unamplified.optimize(dataclasses.replace(SCHEME).describe(), Form("banded"))
