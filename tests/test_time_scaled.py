"""C = diag(r) B diag(d) against its dense matrix: modes, errors, gradients, files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_query_error import every_workload
from test_strategies import dense_modes, every_strategy

from mfopt import query_error, time_scaled_error
from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.sampling import BallsInBins

SCHEME = BallsInBins(bins=7, epochs=4)
N = SCHEME.iterations


def diagonals(n, seed=0, spread=0.5):
    rng = np.random.default_rng(seed)
    return np.exp(spread * rng.normal(size=(2, n)))


def every_scaled(n, seed=0):
    """Each kind between two diagonals, and a BLT (with a gain) with one of them only."""
    rows, columns = diagonals(n, seed)
    blt = S.BLT(np.array([0.3, 0.1, 0.02]), np.array([0.5, 0.9, 0.9999]), 1.7)
    return [
        *(
            S.TimeScaled(base, rows, columns)
            for base in list(every_strategy(n, seed).values())[:10]
        ),
        S.TimeScaled(blt, rows=rows),
        S.TimeScaled(blt, columns=columns),
        S.TimeScaled(every_strategy(n, seed)["wave-blt"], rows, columns),
    ]


NAMES = [f"{s.base.kind}-{i}" for i, s in enumerate(every_scaled(4))]


@pytest.mark.ci
@pytest.mark.parametrize("kind", range(len(NAMES)), ids=NAMES)
def test_structure_matches_dense(kind):
    strategy = every_scaled(N)[kind]
    strategy.check_entries(N)
    base, (rows, columns) = strategy.base.materialize(N), strategy.diagonals(N)
    matrix = np.diag(rows) @ base @ np.diag(columns)
    np.testing.assert_allclose(strategy.materialize(N), matrix, rtol=1e-14)
    modes = dense_modes(matrix, SCHEME)
    np.testing.assert_allclose(strategy.modes(SCHEME), modes, atol=1e-12)
    np.testing.assert_allclose(strategy.gram(SCHEME), modes.T @ modes, rtol=1e-12, atol=1e-12)
    x = np.random.default_rng(1).normal(size=(N, 2))
    np.testing.assert_allclose(strategy.multiply(x), matrix @ x, atol=1e-10)
    np.testing.assert_allclose(matrix @ strategy.solve(x), x, atol=1e-9)
    np.testing.assert_allclose(matrix @ strategy.solve(x[:, 0]), x[:, 0], atol=1e-9)
    assert strategy.column_bands(N) == strategy.base.column_bands(N)
    np.testing.assert_allclose(strategy.rescaled(2.5).materialize(N), 2.5 * matrix, rtol=1e-14)
    restored = S.from_description(strategy.describe(), strategy.arrays())
    assert restored == strategy
    np.testing.assert_array_equal(restored.materialize(N), strategy.materialize(N))


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1), (3, 70)])
def test_modes_at_the_borders(shape):
    scheme = BallsInBins(*shape)
    strategy = every_scaled(scheme.iterations)[3]
    modes = dense_modes(strategy.materialize(scheme.iterations), scheme)
    np.testing.assert_allclose(strategy.modes(scheme), modes, atol=1e-12)


@pytest.mark.release
@pytest.mark.parametrize("kind", range(len(NAMES)), ids=NAMES)
@pytest.mark.parametrize("n", [1, N])
def test_row_variances_match_the_dense_product(kind, n):
    strategy = every_scaled(n)[kind]
    for workload in every_workload(n):
        product = workload.materialize(n) @ np.linalg.inv(strategy.materialize(n))
        found = query_error.row_variances(workload, strategy, n)
        np.testing.assert_allclose(found, np.sum(product**2, axis=1), rtol=1e-8)


@pytest.mark.ci
def test_short_ways_exist_and_agree_at_length():
    """On a long run: covariances of a BLT, lag by lag for the same B as a Toeplitz, and dense."""
    n = 300
    rows, columns = diagonals(n, spread=1.0)
    blt = S.BLT(np.array([0.05, 0.02, 0.01]), np.array([0.6, 0.95, 0.999]), 0.3)
    forms = [
        S.TimeScaled(blt, rows, columns),
        S.TimeScaled(S.Toeplitz(blt.toeplitz_coefs(n)), rows, columns),
    ]
    for workload, short in zip(every_workload(n), (True, False, True, False), strict=True):
        product = workload.materialize(n) @ np.linalg.inv(forms[0].materialize(n))
        for strategy in forms:
            with jax.enable_x64(True):
                found = time_scaled_error.row_variances(workload, strategy, n)
            assert (found is not None) == short
            if found is not None:
                np.testing.assert_allclose(found, np.sum(product**2, axis=1), rtol=1e-9)


def moved(strategy, step, seed=4):
    """A strategy along a random direction of all its numbers."""
    leaves, tree = jax.tree.flatten(strategy)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [x + step * 0.1 * rng.normal(size=x.shape) for x in leaves])


@pytest.mark.release
@pytest.mark.parametrize("kind", [1, 3, 10, 11, 12], ids=[NAMES[k] for k in (1, 3, 10, 11, 12)])
def test_gradients_match_finite_differences(kind):
    strategy = every_scaled(N)[kind]
    rng = np.random.default_rng(3)
    weight, pairs = rng.uniform(size=N), rng.normal(size=(SCHEME.bins, SCHEME.bins))
    functions = [lambda s: jnp.sum(pairs * s.gram(SCHEME))]
    for workload in every_workload(N):
        functions.append(lambda s, w=workload: jnp.sum(weight * query_error.row_variances(w, s, N)))
    for function in functions:
        with jax.enable_x64(True):
            slope = float(jax.grad(lambda step, f=function: f(moved(strategy, step)))(0.0))
            numeric = float(function(moved(strategy, 1e-6)) - function(moved(strategy, -1e-6)))
        assert slope == pytest.approx(numeric / 2e-6, rel=1e-5)


def test_normalized_is_the_same_matrix_up_to_a_constant():
    strategy = every_scaled(N)[3]
    ratio = np.asarray(strategy.normalized().materialize(N))
    lower = np.tril_indices(N)
    ratio = ratio[lower] / np.asarray(strategy.materialize(N))[lower]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-12)
    again = strategy.normalized()
    for diagonal in again.diagonals(N):
        assert np.mean(np.log(diagonal)) == pytest.approx(0, abs=1e-14)


def test_constant_diagonals_change_nothing_but_the_scale():
    blt = every_strategy(N)["blt"]
    plain, scaled = blt.materialize(N), S.TimeScaled(blt, columns=np.array([2.0]))
    np.testing.assert_allclose(scaled.materialize(N), 2 * plain, rtol=1e-14)
    assert list(scaled.arrays()) == ["base/scale", "base/decay", "columns"]
    assert S.TimeScaled(blt) == S.from_description(
        S.TimeScaled(blt).describe(), S.TimeScaled(blt).arrays()
    )


def test_what_does_not_fit_is_refused():
    blt = every_strategy(N)["blt"]
    rows, columns = diagonals(N)
    with pytest.raises(UsageError, match="time-scaled already"):
        S.TimeScaled(S.TimeScaled(blt, rows), columns=columns)
    with pytest.raises(UsageError, match="equally long"):
        S.TimeScaled(blt, rows, columns[:-1])
    with pytest.raises(UsageError, match="known for 28 steps"):
        S.TimeScaled(blt, rows).materialize(N + 1)
    with pytest.raises(UsageError, match="at most that many"):
        S.TimeScaled(S.Toeplitz(np.ones(3)), rows, columns).materialize(N)
    for bad in (0.0, -1.0, np.nan, np.inf, 1e-40, 1e40):
        for name in ("rows", "columns"):
            broken = np.ones(N)
            broken[3] = bad
            with pytest.raises(UsageError, match=name):
                S.TimeScaled(blt, **{name: broken}).check_entries(N)
    negative = S.Toeplitz(np.where(np.arange(N) == 2, -0.1, 1.0))
    with pytest.raises(UsageError, match=">= 0"):
        S.TimeScaled(negative, rows, columns).check_entries(N)


@pytest.mark.release
@pytest.mark.parametrize("kind", range(len(NAMES)), ids=NAMES)
def test_noise_is_streamed_in_the_memory_of_the_base(kind):
    from test_noise_stream import make, streamed, white

    from mfopt.noise import choice

    strategy = every_scaled(N)[kind]
    noise, _ = streamed(make(strategy, N), N)
    exact = np.linalg.solve(strategy.materialize(N), white(N, seed=1))
    np.testing.assert_allclose(noise, exact, atol=1e-5 * np.max(np.abs(exact)))
    scaled, base = choice.choose(strategy, N), choice.choose(strategy.base, N)
    assert type(scaled) is type(base)
    assert (scaled.slots, scaled.draws(N)) == (base.slots, base.draws(N))
