"""A triangular factor in pieces: against the matrix, in every estimator, and above the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
import scipy

from mfopt.accounting.monte_carlo import chunked, dominating_pair, kept_bins, nested
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Point, Tilt
from mfopt.accounting.monte_carlo.kept_bins import KeptBins
from mfopt.sampling import BallsInBins
from mfopt.strategies import BLT, BandedToeplitz, SquareRoot, TimeScaled

EPOCHS, BINS = 3, 150
STEPS = np.linspace(0, 1, EPOCHS * BINS)
C = TimeScaled(
    BLT([0.2, 0.1, 0.02], [0.5, 0.95, 0.995]),
    np.exp(0.3 * np.cos(7 * STEPS)),
    np.exp(0.3 - 0.6 * STEPS),
)
MODES = C.materialize(EPOCHS * BINS).reshape(-1, EPOCHS, BINS).sum(axis=1)
GRAM = MODES.T @ MODES


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(nested, "LEAST", 100)
    monkeypatch.setattr(nested, "_LEAF", 20)
    monkeypatch.setattr(nested, "RANK", 16)


def _matrix(pieces):
    return np.concatenate([pieces.dense(number) for number in range(len(pieces.rows))])


@pytest.mark.parametrize("bins", [1, 20, 21, 97, 150])
def test_the_pieces_are_the_matrix_but_for_what_is_measured(small, bins):
    factor = np.linalg.cholesky(GRAM[:bins, :bins])
    pieces, separate = nested.nested(factor)
    dense = _matrix(pieces)
    assert not dense[bins:].any() and not dense[:, bins:].any()
    dense = dense[:bins, :bins]
    np.testing.assert_allclose(separate, np.linalg.norm(dense - factor), rtol=0.1, atol=1e-13)
    assert separate < 1e-9 * np.linalg.norm(factor)
    normal = np.random.default_rng(0).normal(size=(3, bins))
    with jax.enable_x64(True):
        actual = jax.jit(dominating_pair.coloured)(
            jnp.asarray(normal), jax.tree.map(jnp.asarray, pieces)
        )
    np.testing.assert_allclose(actual, normal @ dense.T, rtol=0, atol=1e-13)
    np.testing.assert_allclose(pieces.square(bins), dense @ dense.T, rtol=0, atol=1e-12)
    vector = normal[0]
    np.testing.assert_allclose(pieces.solve(vector), np.linalg.solve(dense, vector), rtol=1e-9)


def test_the_pair_in_pieces_is_above_the_modes_and_by_a_hair(small):
    pair = dominating_pair.above(GRAM, 1e-14)
    assert isinstance(pair.factor, nested.HierarchicalLowRank)
    gap = np.linalg.eigvalsh(pair.factor.square(BINS) - GRAM)
    assert gap.min() > 0 and gap.max() < 1e-8 * GRAM.diagonal().mean()
    np.testing.assert_allclose(pair.gram, pair.factor.square(BINS), rtol=0, atol=1e-14)


def test_what_has_no_small_rank_keeps_its_matrix(small):
    rng = np.random.default_rng(0)
    rough = np.eye(BINS) + 0.1 * rng.random((BINS, 40)) @ rng.random((40, BINS))
    gram = rough.T @ rough
    _, separate = nested.nested(np.linalg.cholesky(gram))
    assert separate > 1e-3  # what would be lost
    pair = dominating_pair.above(gram, 1e-14)
    assert not isinstance(pair.factor, nested.HierarchicalLowRank)
    assert np.linalg.eigvalsh(pair.factor @ pair.factor.T - gram).min() > 0
    dominating_pair.check(pair)


def test_normalizers_are_sums_over_rows():
    reference = KeptBins(GRAM, None).scaled(0.8)
    with jax.enable_x64(True):
        actual, largest = kept_bins._log_normalizers(reference, 3, 0.2)
    smooth = GRAM / 0.8**2 - 0.2 * np.eye(BINS)
    orders = np.arange(3, 3 + len(actual))
    sums = [scipy.special.logsumexp(l * smooth, axis=0).max() for l in orders]
    np.testing.assert_allclose(actual, np.array(sums) - np.log(BINS), rtol=1e-12)
    beside = smooth.copy()
    beside[np.diag_indices(BINS)] = -np.inf
    assert float(largest) == pytest.approx(beside.max(), rel=1e-7)


@pytest.mark.release
def test_every_estimator_says_the_same_of_both_forms(small):
    """On the same seed; a factor that is a little off is told apart."""
    pieces = dominating_pair.check(dominating_pair.above(GRAM, 1e-14))
    dense = DominatingPair(pieces.gram, _matrix(pieces.factor)[:BINS, :BINS])
    off = DominatingPair(pieces.gram, dense.factor * (1 + 1e-6))
    point, key = Point(0.8, 2.0), chunked.seed_key(0)

    def recorded(pair):
        for kind, order in (("chain", 3.0), ("shift", 2.0), ("mean", 2.0)):
            tilt = pairs.tilt(kind, order, pair, point)
            sums, _ = pairs.total(pair, tilt, point, 512, key)
            yield from (float(sums.total), float(sums.square))
        # beside the shared component
        loss = BallsInBinsLoss.__new__(BallsInBinsLoss)
        object.__setattr__(loss, "pair", pair)  # unchecked: that is what is told apart
        tilt = loss.at(Tilt("chain", 2.0, 0.0), point)
        yield float(loss.pilot(tilt, point, 512, key).sums.total)

    nested_values, two, other = (np.array(list(recorded(pair))) for pair in (pieces, dense, off))
    np.testing.assert_allclose(nested_values[:-1], two[:-1], rtol=1e-9)
    # the direction of the common part comes from L̃ here and from a factor of G there
    np.testing.assert_allclose(nested_values[-1], two[-1], rtol=1e-6)
    assert np.all(np.abs(other / two - 1) > 1e-8)


def test_a_pair_in_pieces_is_refused_where_it_is_not_that_of_its_matrix(small):
    pair = dominating_pair.above(GRAM, 1e-14)
    dominating_pair.check(pair)
    for wrong in (
        pair._replace(gram=pair.gram * (1 + 1e-6)),
        pair._replace(factor=jax.tree.map(lambda part: part / 2, pair.factor)),
    ):
        with pytest.raises(ValueError, match="L Lᵀ = G"):
            dominating_pair.check(wrong)
    broken = pair.factor._replace(rows=(pair.factor.rows[0] * np.nan, *pair.factor.rows[1:]))
    with pytest.raises(ValueError, match="finite"):
        dominating_pair.check(pair._replace(factor=broken))


@pytest.mark.parametrize(
    ("strategy", "in_pieces"),
    [(C, True), (BandedToeplitz([1, 0.5, 0.2]), True), (SquareRoot(), False)],
)
def test_the_strategy_is_taken_in_pieces_where_bins_are_many(small, strategy, in_pieces):
    pair = dominating_pair.exact(strategy, BallsInBins(bins=BINS, epochs=EPOCHS))
    assert isinstance(pair.factor, nested.HierarchicalLowRank) == in_pieces
    assert (BallsInBinsLoss(pair).work == nested.WORK) == in_pieces
    modes = strategy.widened().materialize(EPOCHS * BINS)
    modes = modes.reshape(-1, EPOCHS, BINS).sum(axis=1)
    above = np.linalg.eigvalsh(pair.gram - modes.T @ modes)
    assert above[0] > 0 and above[-1] < 1e-6 * np.trace(pair.gram) / BINS
