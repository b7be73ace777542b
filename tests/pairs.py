"""Estimators of bins that are kept, from a dominating pair: all of Y is sampled, nothing apart."""

from mfopt._runtime._float64 import float64
from mfopt.accounting.monte_carlo import importance, kept_bins
from mfopt.accounting.monte_carlo.kept_bins import KeptBins


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
    return importance.least_chain(ceilings(pair, point.noise_multiplier), point)


def mean_tilt(pair, point):
    return importance.mean_tilt(ceilings(pair, point.noise_multiplier), point)


def total(pair, built, point, samples, key):
    return importance.total(scaled(pair, point.noise_multiplier), built, point, samples, key)
