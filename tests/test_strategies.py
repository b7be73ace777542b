"""Every structured strategy against its own dense matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release

from mfopt import strategies as S
from mfopt.errors import UsageError
from mfopt.strategies import series
from mfopt.strategies.fixed import power_coefs


def every_strategy(n, seed=0):
    """One of each kind, by name, with random non-negative parameters, defined for n."""
    rng = np.random.default_rng(seed)
    lower = np.tril(rng.uniform(0.0, 1.0, (n, n)))
    np.fill_diagonal(lower, 1 + rng.uniform(0, 1, n))
    decaying = np.concatenate([[1.0], rng.uniform(0, 0.5, max(n - 1, 0)) / np.arange(1, max(n, 1))])
    bands = max(1, min(4, n))
    examples = [
        S.Identity(),
        S.Toeplitz(decaying),
        S.BandedToeplitz(decaying[:bands]),
        S.BLT([0.3, 0.1, 0.02], [0.5, 0.9, 0.9999]),
        S.Banded.from_dense(lower, bands),
        S.Dense(lower),
        S.SquareRoot(),
        S.BandedSquareRoot(bands),
        S.BandedInverseSquareRoot(bands),
        S.BandedInverseRoot(0.7, bands),
        S.Tree(),
        S.ClearedBLT(  # of three blocks of the second one has one step
            [0.3, 0.1], [0.5, 0.9], periods=(3, 5), blocks=(1, 3), gain=1.3
        ),
        S.WaveBLT([0.3], [0.5], 0.2, 0.9, 0.8, 0.7, -3.0, 1.3),
        S.TimeScaled(
            S.BLT([0.3, 0.1], [0.5, 0.9]),
            rng.uniform(0.5, 2.0, n),
            rng.uniform(0.5, 2.0, n),
        ),
    ]
    return {example.kind: example for example in examples}


# every kind of mfopt by name: one that is added must have an example above
EVERY_KIND = [kind for kind, cls in S.registered().items() if cls.__module__.startswith("mfopt.")]
# for tests that compile much: one kind for each recursion of noise, the others at a release
EACH_RECURSION = ("toeplitz", "banded", "blt", "banded-inverse-sqrt", "tree", "time-scaled")
SOME_KINDS = [
    pytest.param(kind, marks=[pytest.mark.release] * (kind not in EACH_RECURSION))
    for kind in EVERY_KIND
]


def dense_modes(matrix, scheme):
    """The definition, one column at a time."""
    modes = np.zeros((scheme.iterations, scheme.bins))
    for j in range(scheme.epochs):
        for i in range(scheme.bins):
            modes[:, i] += matrix[:, scheme.bins * j + i]
    return modes


def test_kinds_differ_in_their_tree_structure():
    # compiled code is found by structure: two kinds that compare equal would share it
    structures = [jax.tree.structure(strategy) for strategy in every_strategy(8).values()]
    for i, structure in enumerate(structures):
        assert [structure == other for other in structures] == [
            i == j for j in range(len(structures))
        ]


def test_a_wave_is_never_negative_and_what_could_be_is_refused():
    """Its trough touches 0; with a depth above 1 it would be below."""
    values = {"weight": 1.0, "damping": 1.0, "depth": 1.0, "frequency": np.pi / 4, "phase": 0.0}
    nothing = np.zeros(1)
    wave = S.WaveBLT(nothing, nothing, **values)
    coefs = wave.toeplitz_coefs(14)
    np.testing.assert_allclose(coefs[[1, 5, 9, 13]], [2, 0, 2, 0], atol=1e-15)
    wave.check_entries(14)
    for name, value in (("depth", 1.01), ("depth", np.nan), ("damping", -0.1), ("weight", -1.0)):
        with pytest.raises(UsageError, match=r"must lie in|must be"):
            S.WaveBLT(nothing, nothing, **{**values, name: value}).check_entries(14)
    with pytest.raises(UsageError, match="equally long"):
        S.WaveBLT(np.ones(2), np.ones(1), **values)


def test_a_cleared_blt_is_a_blt_until_its_blocks_begin_again():
    """Each exponential ends with the period of its own block, and is whole until then."""
    n, (scale, decay) = 30, ([0.3, 0.2], [0.5, 0.9])
    periods, blocks = (4, 10), (2, 3)
    actual = S.ClearedBLT(np.array(scale), np.array(decay), periods, blocks, np.array(2.0))
    expected = 2 * np.eye(n)
    for i, period in enumerate(periods):
        length = -(-period // blocks[i])
        for s in range(n):
            begin = s // period * period + s % period // length * length
            for t in range(s + 1, min(begin + period, n)):
                expected[t, s] += 2 * scale[i] * decay[i] ** (t - s - 1)
    np.testing.assert_allclose(actual.materialize(n), expected, atol=1e-15)
    assert actual.column_bands(n) == 10 and actual.buffers == 5
    assert expected[9, 0] > 0 and not np.any(np.tril(expected, -10))
    parameters = np.ones(1), np.ones(1)
    for periods, blocks, why in (
        ((4, 4), (1,), "equally long"),
        ((4,), (5,), "at most its period"),
        (4, (1,), "list"),
        ((0,), (1,), "at least 1"),
    ):
        with pytest.raises(UsageError, match=why):
            S.ClearedBLT(*parameters, periods, blocks)


def test_blt_inverse_is_a_blt_also_for_coinciding_decays():
    for scale, decay in [
        ([0.2, 0.1, 0.05], [0.4, 0.9, 0.999]),
        ([0.2, 0.1, 0.05], [0.9, 0.9, 0.9]),
        ([0.2, 0.1, 0.05], [0.9, 0.9 + 1e-13, 0.9 - 1e-13]),
        ([0.2, 0.0, 0.05], [0.3, 0.9, 1.0]),
    ]:
        blt = S.BLT(np.array(scale), np.array(decay))
        scale_inverse, decay_inverse = blt.inverse()
        powers = decay_inverse[None, :] ** np.arange(199)[:, None]
        coefs = np.concatenate([[1.0], powers @ scale_inverse])
        np.testing.assert_allclose(coefs, np.linalg.inv(blt.materialize(200))[:, 0], atol=1e-12)
        assert np.all(scale_inverse <= 0)


def test_fixed_coefficients_are_square_roots():
    n = 300
    root, inverse = (power_coefs(power, n, n) for power in (-0.5, 0.5))
    squared = series.convolve(jnp.asarray(root), jnp.asarray(root))
    np.testing.assert_allclose(squared, np.ones(n), rtol=1e-5)
    product = np.convolve(root, inverse)[:n]
    np.testing.assert_allclose(product, np.eye(n)[0], atol=1e-13)


def test_tree_has_the_covariance_of_all_nodes_released():
    n = 11  # not a power of two: incomplete dyadic intervals are left out
    nodes = []
    for level in range(4):
        width = 2**level
        for start in range(0, n - width + 1, width):
            row = np.zeros(n)
            row[start : start + width] = 1
            nodes.append(row)
    tree = np.array(nodes)
    matrix = S.Tree().materialize(n)
    np.testing.assert_allclose(matrix.T @ matrix, tree.T @ tree, atol=1e-12)
    assert np.all(matrix >= 0)


@pytest.mark.parametrize(
    "strategy",
    [
        S.Toeplitz([1.0, -0.5, 0.1]),
        S.Toeplitz([0.0, 0.5, 0.1]),
        S.Toeplitz([1.0, np.nan, 0.1]),
        S.BLT([-0.1], [0.5]),
        S.BLT([0.1], [1.5]),
        S.Dense([[1.0, 0, 0], [-0.1, 1, 0], [0, 0, 1]]),
        S.Dense([[1.0, 0.5, 0], [0.1, 1, 0], [0, 0, 1]]),
        S.Banded([[1.0, 1, 1], [0.5, -0.5, 0]]),
    ],
)
def test_matrices_without_a_dominating_pair_are_refused(strategy):
    with pytest.raises(UsageError):
        strategy.check_entries(3)


def test_n_beyond_the_stored_size_is_refused():
    for strategy in (S.Toeplitz(np.ones(3)), S.Dense(np.eye(3)), S.Banded(np.ones((2, 3)))):
        with pytest.raises(UsageError, match="at most that many iterations"):
            strategy.materialize(4)


@pytest.mark.ci
@pytest.mark.parametrize("second", before_release([1.3, 0.999, 5.0], 1, 2))
def test_inverse_coefficients_that_grow(second):
    # 1/(1 + a x) = Σ (-a)^t x^t; by FFTs alone the first of 256 terms came out as 3.4e10
    n = 256
    strategy = S.Toeplitz(np.concatenate([[1.0, second], np.zeros(n - 2)]))
    exact = (-second) ** np.arange(n, dtype=float)
    np.testing.assert_allclose(strategy.inverse_coefs(n), exact, rtol=1e-12)
    y = np.random.default_rng(0).normal(size=(n, 2))
    row = np.zeros(2)
    expected = np.array([row := y[t] - second * row for t in range(n)])
    np.testing.assert_allclose(strategy.solve(y), expected, rtol=1e-9)
    gradient = jax.grad(lambda a: S.Toeplitz(a).inverse_coefs(n)[3])
    with jax.enable_x64(True):
        actual = gradient(jnp.asarray(strategy.coefs))
    # d(1/a)_3 = -((1/a)² da)_3
    square = np.convolve(exact[:4], exact[:4])[:4]
    np.testing.assert_allclose(actual[:4], -square[::-1], rtol=1e-9)
