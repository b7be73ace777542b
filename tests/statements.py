"""Factorizations with a guarantee that nobody proves, for tests of what is done with them."""

from mfopt.factorization import Factorization
from mfopt.guarantee import Guarantee
from mfopt.workloads import PrefixSums


def stated(strategy, sampling, sigma=25.0, **facts):
    """A factorization of prefix sums; ``facts`` of its guarantee, an estimate where they say no
    more. σ is so large that no sum of the steps refutes it."""
    facts = {"epsilon": 2.0, "delta": 1e-5, "noise_multiplier": sigma} | facts
    return Factorization(strategy, sigma, sampling, PrefixSums(), Guarantee(**facts))
