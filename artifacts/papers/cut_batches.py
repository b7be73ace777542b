"""Batches of random sampling cut to a fixed size, and what that costs: of the study of images.

A unit that enters a full batch pushes another one out. The remark in Choquette-Choo et al. (2024,
section 5.2.1), that a unit which is cut is one with gradient 0, covers the unit that is cut, and
not the unit that cuts.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
import scipy.stats

from mfopt.sampling import BallsInBins
from mfopt.training.secrets import uniform_hash


def cut_batch(units: np.ndarray, batch_size: int, seed: int, step: int) -> np.ndarray:
    """At most ``batch_size`` of the units of a step, increasing.

    By a priority per (step, unit) that is independent of the other units: one unit more displaces
    at most one, and no unit is cut in every pass.
    """
    if len(units) <= batch_size:
        return units
    priority = uniform_hash(seed, step, units)
    return np.sort(units[np.argsort(priority, kind="stable")[:batch_size]])


def displacement_probability(scheme: BallsInBins, population: int, batch_size: int) -> float:
    """Bound on the chance that a unit beside ``population`` others meets a batch they have filled.

    It meets one batch per assignment, with a binomial number of others in it.
    """
    others = scipy.stats.binom(population, 1 / scheme.bins)
    return min(1.0, scheme.throws * float(others.sf(batch_size - 1)))


def smallest_batch_size(scheme: BallsInBins, population: int, probability: float) -> int:
    """Smallest batch size whose :func:`displacement_probability` is at most ``probability``."""

    def rare(batch_size: int) -> bool:
        return displacement_probability(scheme, population, batch_size) <= probability

    # a batch that holds all displaces nobody
    return bisect.bisect_left(range(1, population + 1), True, key=rare) + 1


def charged_delta(epsilon: float, delta: float, displacement: float) -> float:
    """δ + (1 + e^ε) η, at most 1: the statement's δ with the price of cut batches in it.

    H(M(D), M(D')) <= H(M̃(D), M̃(D')) + TV(M(D), M̃(D)) + e^ε TV(M(D'), M̃(D')), where M̃ is the run
    in which the unit displaces nobody and each TV distance is at most η: for add-remove and
    zero-out adjacency.
    """
    if displacement == 0.0:
        return delta
    log_price = np.logaddexp(0.0, epsilon) + math.log(displacement)
    return float(min(1.0, delta + math.exp(min(log_price, 0.0))))
