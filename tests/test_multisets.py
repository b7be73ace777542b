"""Groups by the multisets of their bins: the recursion, its ceilings and bounds by enumeration."""

import itertools
import math

import numpy as np
import pytest
from plain_monte_carlo import log_sums
from scipy import special
from selection import before_release

from mfopt.accounting import Mechanism, account
from mfopt.sampling import BallsInBins, FreshBins
from mfopt.strategies import BandedToeplitz

SIGMA, EPSILON = 4.0, 1.0


def drawn(number):
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


def overshot(modes, chances, sigma, epsilon):
    """(δ, standard error): modes enumerated, X of modes of several lengths, all in one mixture."""
    rng, best = np.random.default_rng(9), []
    size = min(max(1_000_000 // len(modes), 5_000), 20_000)
    squares, logs = np.sum(modes**2, axis=1), np.log(chances)

    def log_ratio(x, far):
        return log_sums((far * x @ modes.T - far**2 * squares / 2) / sigma**2 + logs)

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
def test_random_groups_are_within_five_percent_of_enumeration(number):
    mechanism, *mixture, sigma, epsilon = drawn(number)
    truth, error = overshot(*mixture, sigma, epsilon)
    assert error < 0.05 * truth
    guarantee = account(mechanism, noise_multiplier=sigma, epsilon=epsilon, seed=7)
    assert guarantee.status == "certified" and "bin counts" in guarantee.method
    assert truth - 4 * error <= guarantee.delta <= 1.05 * truth + 4 * error
    below, above = guarantee.details["bracket"]
    assert 0.85 * truth - 4 * error <= below <= truth + 4 * error and above == guarantee.delta
