"""Estimators of bins that are kept, from a dominating pair: all of Y is sampled, nothing apart."""

import numpy as np

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import importance, kept_bins
from mfopt.accounting.monte_carlo.dominating_pair import DominatingPair
from mfopt.accounting.monte_carlo.kept_bins import KeptBins


def spiky(bins, spike):
    """A pair in noise units of modes that overlap a little."""
    rng = np.random.default_rng(0)
    diagonal = np.diag(np.sqrt(spike * (0.7 + 0.6 * rng.random(bins))))
    modes = np.concatenate([0.8 / bins**0.5 * rng.random((bins, bins)), diagonal])
    gram = modes.T @ modes
    return DominatingPair(gram, np.linalg.cholesky(gram))


def scaled(pair, sigma):
    return KeptBins(*pair).scaled(sigma)


@float64
def ceilings(pair, sigma):
    return kept_bins.ceilings(scaled(pair, sigma))


def tilt(kind, order, pair, point):
    return importance.tilt(kind, order, ceilings(pair, point.noise_multiplier), point)


def remove_tilts(pair, point):
    return importance.remove_tilts(ceilings(pair, point.noise_multiplier), point)


def least_chain(pair, point):
    reference = ceilings(pair, point.noise_multiplier)
    return importance.least_chain("chain", reference.chains["chain"].most, reference, point)


def mean_tilt(pair, point):
    return importance.mean_tilt(ceilings(pair, point.noise_multiplier), point)


def total(pair, built, point, samples, key):
    return importance.total(scaled(pair, point.noise_multiplier), built, point, samples, key)
