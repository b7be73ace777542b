"""The certificate's chain by clusters: its weights, partitions and ceiling against enumeration."""

import itertools
import math

import numpy as np
import pairs
import plain_monte_carlo as plain
import pytest

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import chunked, clusters
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Pilot, Point

K = 4.5
BINS = 4


def log_normalizers(smooth, count):
    return np.array([math.log(np.exp(p * smooth).mean(0).max()) for p in range(1, count + 1)])


def drawn(gram, order, known):
    """For every kind and every choice of its bins: (tuple of bins, what it counts as, log f there).

    The last is log (Π N)/q, by the definition.
    """
    diagonal = np.diagonal(gram)
    spikes = clusters.spikes(diagonal, np.diagonal(gram, 1))
    smooth, bins = gram - np.diag(spikes), len(gram)
    weights = clusters.log_weights(spikes, diagonal)
    given = clusters.clusters(
        spikes, weights, log_normalizers(smooth, known), order, float(smooth.max())
    )
    for number, kind in enumerate(clusters.partitions(order + 1)):
        for chosen in itertools.product(range(bins), repeat=len(kind)):
            weight, normalizers = math.log(clusters.count(kind)), float(given.log_over[number])
            before = np.zeros(bins)
            for size, k in zip(kind, chosen, strict=True):
                own = weights[size] + size * before
                weight += own[k]
                normalizers += np.logaddexp.reduce(own)
                before = before + size * smooth[k]
            places = [k for size, k in zip(kind, chosen, strict=True) for _ in range(size)]
            yield given, places, weight, normalizers


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_clusters_are_the_tuples_of_the_chain(order):
    """Σ over partitions and bins is Σ over tuples, by how often each bin is drawn; (1) to (3)."""
    gram = pairs.spiky(BINS, 0.8, 1.5).gram
    tuples, by_clusters = {}, {}
    for chosen in itertools.product(range(BINS), repeat=order + 1):
        total = sum(gram[i, k] for i, k in itertools.combinations(chosen, 2))
        counts = tuple(np.bincount(chosen, minlength=BINS))
        weight = math.exp(total) / BINS ** (order + 1)
        tuples[counts] = tuples.get(counts, 0) + weight
    for _, places, weight, _ in drawn(gram, order, 8):
        counts = tuple(np.bincount(places, minlength=BINS))
        by_clusters[counts] = by_clusters.get(counts, 0) + math.exp(weight)
    assert by_clusters == pytest.approx(tuples, rel=1e-12)


@pytest.mark.parametrize("known", [1, 8])
@pytest.mark.parametrize("order", [1, 3, 5])
def test_no_draw_exceeds_the_sum_of_bounds(order, known):
    """(5), also where the later R are extrapolated."""
    three = pairs.spiky(3, 0.8, 1.5).gram
    excess = [float(high - given.log_sum) for given, _, _, high in drawn(three, order, known)]
    assert max(excess) <= 1e-12
    if known == 8:
        assert max(excess) > -0.7  # and it is no empty bound


def seen(pair, point, kind, order, samples=2**15, change=lambda tilt: tilt):
    tilt = change(pairs.tilt(kind, order, pair, point))
    found = Pilot(tilt, *pairs.total(pair, tilt, point, samples, chunked.seed_key(1)))
    mean = math.exp(found.log_mean)
    return mean, mean * found.deviation / math.sqrt(found.samples), found


@pytest.mark.ci
@pytest.mark.parametrize("order", [1, 2, 4])
def test_the_estimator_is_unbiased(order):
    pair, point = pairs.spiky(BINS, 0.8, 1.5), Point(1.0, 1.5)
    expected = plain.delta(pair, 1.0, 1.5, samples=2**18, seed=2)
    mean, error, _ = seen(pair, point, "clusters", order)
    assert abs(mean - expected.value) < K * math.hypot(error, expected.standard_error)

    def fewer_pairs(tilt):
        # without what a bin has with itself a second time
        light = np.array(tilt.detail.log_weights)
        light[2:] -= 0.5
        return tilt._replace(detail=tilt.detail._replace(log_weights=light))

    mean, error, _ = seen(pair, point, "clusters", order, 2**18, change=fewer_pairs)
    assert abs(mean - expected.value) > K * math.hypot(error, expected.standard_error)


@pytest.mark.release
@float64
def test_the_ceiling_falls_and_the_mean_stays():
    pair, point = pairs.spiky(64, 0.8, 1.0), Point(0.8, 2.0)
    chain = pairs.least_chain(pair, point)
    found = pairs.remove_tilts(pair, point)[0]
    assert found.kind == "clusters"
    assert found.log_ceiling < chain.log_ceiling - 0.3
    one, error, before = seen(pair, point, "chain", chain.order, 2**14)
    other, other_error, after = seen(pair, point, "clusters", found.order, 2**14)
    assert abs(one - other) < K * math.hypot(error, other_error)
    assert after.deviation < before.deviation
    loss = BallsInBinsLoss(pair)
    here, there = (loss.at(found, Point(sigma, 2.0)) for sigma in (0.8, 0.85))
    assert there.kind == "clusters" and there.log_ceiling < here.log_ceiling


@float64
def test_an_order_beyond_the_tables_and_a_single_bin_take_the_chain():
    flat = DominatingPair(0.02 * np.eye(3) + 0.001, np.linalg.cholesky(0.02 * np.eye(3) + 0.001))
    found = pairs.remove_tilts(flat, Point(1.0, 0.5))[0]
    assert found.kind == "chain" and found.order > clusters.MOST
    one = DominatingPair(np.ones((1, 1)), np.ones((1, 1)))
    assert pairs.remove_tilts(one, Point(1.0, 0.5))[0].kind in ("chain", "shift")
