"""The certificate's chain by clusters: its weights, partitions and ceiling against enumeration."""

import itertools
import math

import numpy as np
import pairs
import pytest

from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import chunked, clusters
from mfopt.accounting.monte_carlo.balls_in_bins import BallsInBinsLoss
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.evidence import Pilot, Point
from mfopt.sampling import BallsInBins
from mfopt.strategies import BandedSquareRoot

K = 4.5
BINS = 4


def log_normalizers(smooth, count):
    return np.array([math.log(np.exp(p * smooth).mean(0).max()) for p in range(1, count + 1)])


def drawn(gram, order, reference):
    """For every kind and every choice of its bins: (tuple of bins, what it counts as, log f there).

    The last is log (Π N)/q, by the definition.
    """
    diagonal = np.diagonal(gram)
    spikes = clusters.spikes(diagonal, np.diagonal(gram, 1))
    smooth, bins = gram - np.diag(spikes), len(gram)
    weights = clusters.log_weights(spikes, diagonal)
    arguments = clusters.clusters(
        spikes, weights, log_normalizers(smooth, reference), order, float(smooth.max())
    )
    for number, kind in enumerate(clusters.partitions(order + 1)):
        for chosen in itertools.product(range(bins), repeat=len(kind)):
            weight, normalizers = math.log(clusters.count(kind)), float(arguments.log_over[number])
            flags = np.zeros(bins)
            for size, k in zip(kind, chosen, strict=True):
                log_terms = weights[size] + size * flags
                weight += log_terms[k]
                normalizers += np.logaddexp.reduce(log_terms)
                flags = flags + size * smooth[k]
            places = [k for size, k in zip(kind, chosen, strict=True) for _ in range(size)]
            yield arguments, places, weight, normalizers


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_clusters_are_the_tuples_of_the_chain(order):
    """Σ over partitions and bins is Σ over tuples, by how often each bin is drawn; (1) to (3)."""
    gram = pairs.spiky(BINS, 1.5).gram
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


@pytest.mark.parametrize("reference", [1, 8])
@pytest.mark.parametrize("order", [1, 3, 5])
def test_no_draw_exceeds_the_sum_of_bounds(order, reference):
    """(5), also where the later R are extrapolated."""
    three = pairs.spiky(3, 1.5).gram
    excess = [
        float(high - arguments.log_sum) for arguments, _, _, high in drawn(three, order, reference)
    ]
    assert max(excess) <= 1e-12
    if reference == 8:
        assert max(excess) > -0.7  # and it is no empty bound


def observed(pair, point, kind, order, samples=2**15):
    tilt = pairs.tilt(kind, order, pair, point)
    actual = Pilot(tilt, *pairs.total(pair, tilt, point, samples, chunked.seed_key(1)))
    mean = math.exp(actual.log_mean)
    return mean, mean * actual.deviation / math.sqrt(actual.samples), actual


@pytest.mark.release
@float64
def test_the_ceiling_falls_and_the_mean_stays():
    pair, point = pairs.spiky(64, 1.0), Point(0.8, 2.0)
    chain = pairs.least_chain(pair, point)
    actual = pairs.remove_tilts(pair, point)[0]
    assert actual.kind == "clusters"
    assert actual.log_ceiling < chain.log_ceiling - 0.3
    chain_mean, error, chain_ceiling = observed(pair, point, "chain", chain.order, 2**14)
    other, other_error, clusters_ceiling = observed(pair, point, "clusters", actual.order, 2**14)
    assert abs(chain_mean - other) < K * math.hypot(error, other_error)
    assert clusters_ceiling.deviation < chain_ceiling.deviation
    loss = BallsInBinsLoss(pair)
    law, target = (loss.at(actual, Point(sigma, 2.0)) for sigma in (0.8, 0.85))
    assert target.kind == "clusters" and target.log_ceiling < law.log_ceiling


@float64
def test_an_order_beyond_the_tables_and_a_single_bin_take_the_chain():
    flat = DominatingPair(0.02 * np.eye(3) + 0.001, np.linalg.cholesky(0.02 * np.eye(3) + 0.001))
    actual = pairs.remove_tilts(flat, Point(1.0, 0.5))[0]
    assert actual.kind == "chain" and actual.order > clusters.MOST
    pair = DominatingPair(np.ones((1, 1)), np.ones((1, 1)))
    assert pairs.remove_tilts(pair, Point(1.0, 0.5))[0].kind in ("chain", "shift")


def test_two_bands_at_a_small_delta_are_accounted_for_closely():
    """Modes hardly overlap: drawn bin by bin, ε is 2.26 and its lower end 1.81 here."""
    mechanism = Mechanism(BallsInBins(bins=16, epochs=4), BandedSquareRoot(2))
    answer = account(mechanism, noise_multiplier=3.1735, delta=1e-10, samples=2**14, seed=0)
    assert answer.lower_bound is not None
    assert 1.95 < answer.lower_bound < answer.epsilon < 2.05
