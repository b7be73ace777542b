"""Groups by the multisets of their bins: the recursion, its ceilings and bounds by enumeration."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import plain_monte_carlo as plain
import pytest
from scipy import special
from selection import before_release

from mfopt._runtime._float64 import float64
from mfopt.accounting import Mechanism, account
from mfopt.accounting.monte_carlo import chunked, multisets
from mfopt.accounting.monte_carlo.evidence import Point, Trial
from mfopt.accounting.monte_carlo.fresh_bins import FreshBinsLaw
from mfopt.accounting.monte_carlo.multisets import MultisetLoss
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import BandedToeplitz

KEY = chunked.seed_key(11)
COLUMN = np.array([1.0, 0.6, 0.3])
FRESH = FreshBins(bins=3, epochs=2)
SIGMA, EPSILON = 4.0, 1.0


def toeplitz(n: int) -> np.ndarray:
    return sum(c * np.eye(n, k=-k) for k, c in enumerate(COLUMN))


def ways(bins: int, rounds: int, group_size: int) -> np.ndarray:
    """C x of every way in which the units fall, all equally likely: (ways, n)."""
    c = toeplitz(bins * rounds)
    falls = itertools.product(range(bins), repeat=rounds * group_size)
    counts = np.array(
        [
            np.stack([np.bincount(part, minlength=bins) for part in np.reshape(fall, (rounds, -1))])
            for fall in falls
        ]
    )
    return counts.reshape(len(counts), -1) @ c.T


@pytest.fixture(scope="module")
def loss() -> MultisetLoss:
    strategy = BandedToeplitz(COLUMN)
    actual = MultisetLoss.of(FreshBinsLaw(FRESH).loss(strategy), 2)
    assert actual is not None
    return actual


@float64
def test_the_recursion_is_the_mixture_over_all_ways_to_fall(loss: MultisetLoss) -> None:
    modes = ways(3, 2, 2) / SIGMA
    scaled = loss.likelihood.scaled(SIGMA)
    z = np.random.default_rng(1).standard_normal((40, 6)) + modes[7]
    entries = scaled.noise(jax.numpy.asarray(z))
    for power in (1, 2.5):
        oracle = power * z @ modes.T - power**2 * np.sum(modes**2, axis=1) / 2
        oracle = special.logsumexp(oracle, axis=1) - math.log(len(modes))
        mine = np.asarray(jax.jit(scaled.log_ratio)(entries, power))
        np.testing.assert_allclose(mine, oracle, rtol=1e-10, atol=1e-10)
    other = special.logsumexp(z @ modes.T - np.sum(modes**2, axis=1) / 2, axis=1)
    assert not np.allclose(mine, other - math.log(len(modes)))  # a control: another power


def test_ceilings_are_maxima_over_all_ways_to_fall(loss: MultisetLoss) -> None:
    modes = ways(3, 2, 2) / SIGMA
    overlaps = modes @ modes.T
    ceilings = multisets.ceilings(loss.likelihood.scaled(SIGMA))
    expected = 0.0
    for order in (1, 2, 3):
        logs = special.logsumexp(order * overlaps, axis=0) - math.log(len(modes))
        expected += float(np.max(logs))
        assert math.isclose(ceilings.chain("chain", order)[0], expected, rel_tol=1e-10)
    assert math.isclose(ceilings.largest_square, np.max(np.diagonal(overlaps)), rel_tol=1e-12)
    assert math.isclose(ceilings.mean_square, np.mean(np.diagonal(overlaps)), rel_tol=1e-12)
    assert math.isclose(ceilings.square_of_mean, np.mean(overlaps), rel_tol=1e-12)


@pytest.mark.ci
@pytest.mark.parametrize("direction", ["remove", "add"])
def test_every_proposal_has_the_mean_of_the_mixture(loss: MultisetLoss, direction: str) -> None:
    truth, error = plain.mixture(ways(3, 2, 2), SIGMA, EPSILON)[direction]
    point = Point(SIGMA, EPSILON)
    tilts = loss._tilts(direction, point)
    assert tilts
    for tilt in tilts:
        pilot = loss.pilot(tilt, point, 2**13, KEY)
        spread = 4 * math.hypot(pilot.deviation / math.sqrt(pilot.samples) * truth, error)
        assert abs(math.exp(pilot.log_mean) - truth) < spread < 0.2 * truth
        bet, _ = pilot.expected(2**13, 1e-4)
        bound = loss.bound(tilt, point, bet, Trial(2**13, 1e-4, chunked.seed_key(3)))
        assert truth - 4 * error <= bound.value
    # the control: what 10% more noise gives is told apart
    other = plain.mixture(ways(3, 2, 2), 1.1 * SIGMA, EPSILON)[direction][0]
    assert abs(other - truth) > spread


def drawn(number: int) -> tuple[Mechanism, np.ndarray, np.ndarray, float, float]:
    """A random group: mechanism, modes of all ways to fall, their chances, σ and ε."""
    rng = np.random.default_rng([45, number])
    fresh, size = bool(rng.integers(2)), int(rng.integers(2, 5))
    bins = int(rng.integers(2, 8 - size if fresh else 9))
    rounds = 2 if fresh else int(rng.integers(1, 4))
    bands = int(rng.integers(1, bins + 1))
    column = np.array([1.0, *np.sort(rng.uniform(0.1, 0.9, bands - 1))[::-1]])
    n = bins * rounds
    c = sum(x * np.eye(n, k=-k) for k, x in enumerate(column))
    falls = list(itertools.combinations_with_replacement(range(bins), size))
    counts = np.array([np.bincount(fall, minlength=bins) for fall in falls])
    chances = np.exp(math.lgamma(size + 1) - special.gammaln(counts + 1).sum(axis=1))
    chances /= bins**size
    entry = c.reshape(n, rounds, bins)
    if fresh:
        modes = np.einsum("nrb,rmb->rmn", entry, np.stack([counts] * rounds))
        modes = (modes[0][:, None] + modes[1]).reshape(-1, n)
        chances = np.outer(chances, chances).ravel()
    else:
        modes = counts @ entry.sum(axis=1).T
    sigma = float(rng.uniform(0.5, 1.2)) * math.sqrt(np.max(np.sum(modes**2, axis=1)))
    epsilon = float(rng.uniform(0.3, 1.0) * 2.5)
    scheme = FreshBins(bins, rounds) if fresh else BallsInBins(bins, rounds)
    mechanism = Mechanism(scheme, BandedToeplitz(column), group_size=size)
    return mechanism, modes, chances, sigma, epsilon


def overshot(
    modes: np.ndarray, chances: np.ndarray, sigma: float, epsilon: float
) -> tuple[float, float]:
    """(δ, standard error): modes enumerated, X of modes of several lengths, all in one mixture."""
    rng, best = np.random.default_rng(9), []
    size = min(max(1_000_000 // len(modes), 5_000), 20_000)
    squares, logs = np.sum(modes**2, axis=1), np.log(chances)

    def log_ratio(x: np.ndarray, far: float) -> np.ndarray:
        return special.logsumexp((far * x @ modes.T - far**2 * squares / 2) / sigma**2 + logs, 1)

    for sign, fars in ((1, (1, 1.5, 2, 3, 4, 5)), (-1, (0, -0.5, -1, -1.5, -2, -3))):
        values = []
        for far in fars * 4:  # as many X of each
            x = sigma * rng.standard_normal((size, modes.shape[1]))
            x += far * modes[rng.choice(len(modes), len(x), p=chances)]
            y = log_ratio(x, 1.0)
            entry = [log_ratio(x, far) for far in fars]
            weights = (y if sign > 0 else 0.0) - special.logsumexp(entry, 0) + math.log(len(fars))
            values.append(np.maximum(-np.expm1(epsilon - sign * y), 0.0) * np.exp(weights))
        spread = float(np.std(values)) / math.sqrt(np.size(values))
        best.append((float(np.mean(values)), spread))
    return max(best)


@pytest.mark.ci
@pytest.mark.parametrize("number", before_release(range(22), 4))
def test_random_groups_are_within_five_percent_of_enumeration(number: int) -> None:
    mechanism, *mixture, sigma, epsilon = drawn(number)
    truth, error = overshot(*mixture, sigma, epsilon)
    assert error < 0.05 * truth
    guarantee = account(mechanism, noise_multiplier=sigma, epsilon=epsilon, seed=7)
    assert guarantee.status == "certified" and "bin counts" in guarantee.method
    assert truth - 4 * error <= guarantee.delta <= 1.05 * truth + 4 * error
    below, above = guarantee.details["bracket"]
    assert 0.85 * truth - 4 * error <= below <= truth + 4 * error and above == guarantee.delta
