"""Errors of A C⁻¹ against the dense definition, and their gradients."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release
from test_strategies import every_strategy

from mfopt import query_error, strategies, workloads
from mfopt.errors import UsageError

N = 24


def every_workload(n):
    rng = np.random.default_rng(5)
    lower = np.tril(rng.normal(size=(n, n))) + 2 * np.eye(n)
    return [
        workloads.PrefixSums(),
        workloads.ToeplitzWorkload(0.9 ** np.arange(n)),
        workloads.Momentum(0.95, workloads.linear_cooldown(n, n // 4, n, 0.05)),
        workloads.DenseWorkload(lower),
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind", before_release(["toeplitz", "banded-toeplitz", "blt", "banded", "dense"], 2, 3, 4)
)
def test_gradients_match_finite_differences(kind):
    strategy = every_strategy(N)[kind]
    weight = np.random.default_rng(3).uniform(size=N)
    leaves, tree = jax.tree.flatten(strategy)
    rng = np.random.default_rng(4)
    size = 0.1 if kind == "blt" else 1.0
    direction = [size * rng.normal(size=x.shape) for x in leaves]
    if kind == "dense":  # a dense C stays lower triangular
        direction = [np.tril(x) for x in direction]
    for workload in every_workload(N):

        def value(step, workload=workload):
            moved = [x + step * d for x, d in zip(leaves, direction, strict=True)]
            strategy = jax.tree.unflatten(tree, moved)
            return jnp.sum(weight * query_error.row_variances(workload, strategy, N))

        with jax.enable_x64(True):
            pair = jax.jit(jax.value_and_grad(value))
            slope = float(pair(0.0)[1])
            numeric = float(pair(1e-6)[0] - pair(-1e-6)[0]) / 2e-6
        assert slope == pytest.approx(numeric, rel=2e-5)


def test_queries_in_parts_have_the_error_and_gradient_of_all_at_once():
    """Parts of unequal size, of an A and a C without any structure."""
    n, rng = 300, np.random.default_rng(0)
    matrix, query = (np.tril(rng.random((n, n))) / n + np.eye(n) for _ in range(2))
    weight = rng.random(n)

    def in_parts(matrix):
        strategy = types.SimpleNamespace(materialize=lambda n: matrix)
        return query_error.dense(strategy, workloads.DenseWorkload(query), n)

    def whole(matrix):
        return jnp.sum((query @ jnp.linalg.inv(matrix)) ** 2, axis=1)

    def judged(error):
        return error(matrix), jax.jit(jax.grad(lambda x: weight @ error(x)))(matrix)

    with jax.enable_x64(True):
        (errors, slope), (expected, expected_slope) = judged(in_parts), judged(whole)
    np.testing.assert_allclose(errors, expected, rtol=1e-10)
    np.testing.assert_allclose(slope, np.tril(expected_slope), rtol=1e-9, atol=1e-12)


def test_workloads_round_trip_and_refuse_nonsense(tmp_path):
    for workload in every_workload(N):
        restored = workloads.from_description(workload.describe(), workload.arrays())
        np.testing.assert_array_equal(restored.materialize(N), workload.materialize(N))
    with pytest.raises(UsageError, match="lower triangular"):
        workloads.DenseWorkload(np.ones((3, 3)))
    with pytest.raises(UsageError, match="momentum"):
        workloads.Momentum(1.0, np.ones(3))
    with pytest.raises(UsageError, match="at most 3"):
        workloads.ToeplitzWorkload(np.ones(3)).materialize(4)
    np.save(tmp_path / "own.npy", np.tril(np.ones((5, 5))))
    assert isinstance(workloads.load(tmp_path / "own.npy", 5), workloads.DenseWorkload)
    with pytest.raises(UsageError, match="shape"):
        workloads.load(tmp_path / "own.npy", 6)
    (tmp_path / "text.npy").write_text("not an array")
    with pytest.raises(UsageError, match="not a readable"):
        workloads.load(tmp_path / "text.npy", 5)
    np.save(tmp_path / "pickled.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(UsageError, match="not a readable"):
        workloads.load(tmp_path / "pickled.npy", 1)


def test_what_a_workload_says_of_itself_is_what_it_is():
    """Coefficients and recurrence against the dense matrix, and errors by them against it."""
    flat = workloads.Momentum(0.6, np.full(N, 0.3))  # constant rates: Toeplitz in all but name
    cooled = workloads.linear_cooldown(N, 3, 10, 0.05)
    assert cooled[3] == 1 and cooled[10] == pytest.approx(0.05) == cooled[-1]
    rng = np.random.default_rng(0)
    for workload in [*every_workload(N), flat]:
        matrix = workload.materialize(N)
        if (coefs := workload.toeplitz_coefs(N)) is not None:
            lag = np.subtract.outer(np.arange(N), np.arange(N))
            np.testing.assert_array_equal(matrix, np.where(lag >= 0, coefs[np.abs(lag)], 0.0))
        if (running := workload.recurrence(N)) is not None:
            rates, momentum = running
            assert momentum == getattr(workload, "momentum", 0.0)
            x, velocity, total, path = rng.normal(size=N), 0.0, 0.0, []
            for t in range(N):
                velocity = momentum * velocity + x[t]
                total += rates[t] * velocity
                path.append(total)
            np.testing.assert_allclose(matrix @ x, path, rtol=1e-12)
        for kind in ("blt", "banded"):
            strategy = every_strategy(N)[kind]
            product = matrix @ np.linalg.inv(strategy.materialize(N))
            variances = query_error.row_variances(workload, strategy, N)
            np.testing.assert_allclose(variances, np.sum(product**2, axis=1), rtol=1e-9)


def test_a_workload_of_ones_own_needs_its_matrix_only():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Differences(workloads.Workload):
        kind = "test-differences"

        def materialize(self, n):
            return np.eye(n) - np.eye(n, k=-1)

    differences, strategy = Differences(), every_strategy(N)["blt"]
    product = differences.materialize(N) @ np.linalg.inv(strategy.materialize(N))
    np.testing.assert_allclose(
        query_error.row_variances(differences, strategy, N), np.sum(product**2, axis=1), rtol=1e-9
    )
    assert workloads.from_description(differences.describe(), {}) == differences
    with pytest.raises(UsageError, match="taken by another"):
        type("Other", (workloads.Workload,), {"kind": "test-differences"})
    del workloads._KINDS["test-differences"]
    with pytest.raises(UsageError, match="must be one of"):
        workloads.from_description(differences.describe(), {})


def test_a_gradient_without_float64_says_how_to_take_it():
    def error(x):
        strategy = strategies.BandedToeplitz(jnp.stack([1.0, x]))
        return query_error.rmse(workloads.PrefixSums(), strategy, N)

    with pytest.raises(UsageError, match="enable_x64"):
        jax.grad(error)(0.5)
    with jax.enable_x64(True):
        assert jax.grad(error)(0.5) < 0
