"""Ranking of one quantity by another: a rank correlation, and pairs counted in words."""

from __future__ import annotations

import itertools

import numpy as np
import scipy.stats

from mfopt.experiments.studies.rows import interval

APART = 0.02  # relative difference of RMSE below which two mechanisms count as equal
RESAMPLED = 2000  # sets of seeds behind an interval


def correlation(error: np.ndarray, losses: np.ndarray) -> tuple[float, float, float]:
    """Spearman's rank correlation of errors and mean losses, with a 95% interval over seeds.

    Args:
      error: (mechanisms,).
      losses: (mechanisms, seeds); seeds are drawn again for the interval, the same for all.
    """
    random = np.random.default_rng(0)
    ranks = scipy.stats.rankdata(error)

    def of(values: np.ndarray) -> float:
        return float(np.corrcoef(ranks, scipy.stats.rankdata(values))[0, 1])

    seeds = losses.shape[1]
    drawn = [
        of(losses[:, random.integers(seeds, size=seeds)].mean(axis=1)) for _ in range(RESAMPLED)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return of(losses.mean(axis=1)), float(low), float(high)


def pairs(error: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Numbers of pairs (in the order of RMSE, not significantly different, against it), shape (3,).

    Args:
      error: (mechanisms,).
      losses: (mechanisms, seeds); a pair is compared seed by seed.
    """
    counts = np.zeros(3, int)
    for i, j in itertools.permutations(range(len(error)), 2):
        if error[i] < error[j] * (1 - APART):
            mean, half = interval(losses[i] - losses[j])
            counts += mean + half < 0, abs(mean) <= half, mean - half > 0
    return counts


def answer(agree: int, tied: int, against: int) -> str:
    """The answer in words, from counts of pairs that differ in RMSE by more than 2%.

    >>> answer(8, 2, 0).partition(":")[0]
    'Less RMSE trained better'
    """
    pairs = agree + tied + against
    if against == 0 and agree:
        word = "Less RMSE trained better" if agree >= tied else "Less RMSE never trained worse"
    elif agree > 4 * against:
        word = "Less RMSE mostly trained better"
    else:
        word = "Less RMSE did not tell what trains better"
    return (
        f"{word}: of {pairs} pairs at least {APART:.0%} apart, the lower RMSE had less loss in "
        f"{agree}, more in {against}, and {tied} are not significantly different."
    )
