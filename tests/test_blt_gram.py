"""G from the buffers of a BLT: against the dense modes, and a certificate's pair above it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from selection import before_release

from mfopt.accounting.monte_carlo import dominating_pair
from mfopt.accounting.monte_carlo.protocol import law
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT, Strategy, TimeScaled, blt_gram, time_scaled


def _case(epochs, bins, decay):
    rng = np.random.default_rng(0)
    n = epochs * bins
    base = BLT(0.3 * rng.random(len(decay)) + 0.01, np.array(decay), 1.7)
    rows, columns = np.exp(0.3 * rng.normal(size=(2, n)))
    return TimeScaled(base, rows, columns), BallsInBins(bins=bins, epochs=epochs)


def _modes(strategy, scheme):
    dense = strategy.materialize(scheme.iterations)
    return dense.reshape(len(dense), scheme.epochs, scheme.bins).sum(axis=1)


CASES = [
    (3, 7, [0.9, 0.3, 0.0]),
    (1, 5, [1.0, 0.99]),
    (4, 33, [0.999, 0.5, 1e-9]),
    (2, 1, [0.7]),
    (2, 133, [0.99]),
    (200, 2, [0.999, 0.2]),
]


@pytest.mark.parametrize(("epochs", "bins", "decay"), before_release(CASES, 1, 3, 5))
def test_every_entry_is_within_the_stated_error(epochs, bins, decay):
    strategy, scheme = _case(epochs, bins, decay)
    modes = _modes(strategy, scheme)
    gram = blt_gram.grouped(strategy, scheme, 1)[0]
    error = np.abs(gram / (modes.T @ modes) - 1).max()
    assert error < blt_gram.relative_error(scheme) < 1e-10 * max(1, epochs / 100)
    # a control: a buffer that forgets a little faster is seen
    other = BLT(strategy.base.scale, strategy.base.decay * (1 - 1e-7), 1.7)
    moved = blt_gram.grouped(TimeScaled(other, strategy.rows, strategy.columns), scheme, 1)[0]
    wrong = np.abs(moved / (modes.T @ modes) - 1).max()
    assert wrong > blt_gram.relative_error(scheme) or scheme.iterations == 2


@pytest.mark.ci
@pytest.mark.parametrize(("epochs", "bins", "size"), before_release([(3, 7, 3), (2, 70, 1)], 1))
def test_groups_have_the_mean_modes_and_the_mean_norms(epochs, bins, size):
    strategy, scheme = _case(epochs, bins, [0.9, 0.3])
    gram = _modes(strategy, scheme).T @ _modes(strategy, scheme)
    grouped = blt_gram.grouped(strategy, scheme, size)
    cuts = np.arange(0, bins, size)
    counts = np.diff(np.append(cuts, bins))
    sums = np.add.reduceat(np.add.reduceat(gram, cuts, 0), cuts, 1)
    np.testing.assert_allclose(grouped[0], sums / np.outer(counts, counts), rtol=1e-12)
    np.testing.assert_allclose(
        grouped[1], np.add.reduceat(gram.diagonal(), cuts) / counts, rtol=1e-12
    )
    # the dense way that other kinds take, and both products
    dense = Strategy.grouped_gram(strategy, scheme, size)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11), tuple(dense), grouped)
    slopes = [np.random.default_rng(2).normal(size=part.shape) for part in grouped]
    with jax.enable_x64(True):
        fast = jax.jit(
            lambda slope, diagonal: blt_gram.product(slope, strategy, scheme, size, diagonal)
        )(*slopes)
        plain = Strategy.grouped_product(strategy, *slopes, scheme, size)
    expected = sum(np.sum(a * b) for a, b in zip(slopes, grouped, strict=True))
    np.testing.assert_allclose([fast, plain], expected, rtol=1e-10)


@pytest.mark.release
def test_the_product_and_its_gradient_are_those_of_the_dense_matrix():
    strategy, scheme = _case(3, 7, [0.9, 0.3, 0.05])
    slope = np.random.default_rng(1).normal(size=(7, 7))

    def fast(scale, decay, rows, columns):
        scaled = TimeScaled(BLT(scale, decay, 1.7), rows, columns)
        return blt_gram.product(jnp.asarray(slope), scaled, scheme)

    def plain(scale, decay, rows, columns):
        scaled = TimeScaled(BLT(scale, decay, 1.7), rows, columns)
        dense = jnp.asarray(scaled.materialize(21))
        modes = dense.reshape(21, 3, 7).sum(axis=1)
        return jnp.sum(slope * (modes.T @ modes))

    position = [strategy.base.scale, strategy.base.decay, strategy.rows, strategy.columns]
    with jax.enable_x64(True):
        all_arguments = (0, 1, 2, 3)
        actual, expected = (
            jax.jit(jax.value_and_grad(f, all_arguments))(*map(jnp.asarray, position))
            for f in (fast, plain)
        )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-11), actual, expected)


@pytest.mark.release
def test_many_epochs_need_no_modes():
    strategy, scheme = _case(200, 2, [0.999, 0.2])
    modes = _modes(strategy, scheme)
    assert strategy.has_structured_gram(scheme)
    assert not strategy.has_structured_gram(BallsInBins(bins=2, epochs=100))
    np.testing.assert_allclose(strategy.gram(scheme), modes.T @ modes, rtol=1e-11)

    def occupied(epochs):
        """Bytes that a program for G holds: those of modes would grow with the epochs squared."""
        scheme = BallsInBins(bins=2, epochs=epochs)
        program = jax.jit(lambda d: TimeScaled(strategy.base, jnp.ones(1), d).gram(scheme))
        return program.lower(jnp.ones(2 * epochs)).compile().memory_analysis().temp_size_in_bytes

    assert occupied(1200) < 2.2 * occupied(600)


@pytest.fixture
def few_blocks(monkeypatch):
    monkeypatch.setattr(time_scaled, "_MANY", 1)
    jax.clear_caches()
    yield
    monkeypatch.undo()
    jax.clear_caches()


@pytest.mark.ci
def test_the_certificates_pair_is_above_the_modes_and_by_a_hair(few_blocks):
    strategy, scheme = _case(4, 33, [0.999, 0.9, 0.5])
    modes = _modes(strategy, scheme)
    gram = modes.T @ modes
    pair = dominating_pair.exact(strategy, scheme)
    assert strategy.has_structured_gram(scheme)
    above = np.linalg.eigvalsh(pair.factor @ pair.factor.T - gram)
    largest = gram.diagonal().max()
    assert above.min() > 0 and above.max() < 1e-8 * largest
    # what has one mode less is no longer above: the comparison can fail
    less = np.delete(pair.factor, 5, axis=1)
    assert np.linalg.eigvalsh(less @ less.T - gram).min() < 0
    with jax.enable_x64(True):
        np.testing.assert_allclose(law(scheme).quadratic(strategy), gram, rtol=1e-11)


def test_a_matrix_that_is_barely_positive_is_raised_enough():
    # rank one: without room its Cholesky factor would not exist
    gram = np.ones((40, 40))
    pair = dominating_pair.check(dominating_pair.above(gram, 1e-12))
    assert np.linalg.eigvalsh(pair.factor @ pair.factor.T - gram).min() > 0
    assert dominating_pair.above(gram, 1e-9).gram[0, 0] > pair.gram[0, 0] > 1
