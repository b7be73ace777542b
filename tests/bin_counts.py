"""K units of one user under balls-in-bins with C = I: the exact mixture over how they fall.

With independent noise the modes of different bins are orthogonal, so the likelihood ratio of a
given way to fall, counts n_1..n_b, factorizes over bins. With g = E/σ² (E epochs) and
a_i = <m_i, X>/σ²,

    P/Q = Σ_n multinomial(n) Π_i e^{n_i a_i - n_i² g/2}
        = (K!/b^K) [z^K] Π_i Σ_j z^j/j! e^{j a_i - j² g/2},

the K-th coefficient of a product of b polynomials. (That P dominates follows as for one unit:
Choquette-Choo et al. 2024, proof of Lemma 3.2, with the ways to fall as the mixture.)

δ is sampled plainly, in numpy: the oracle of
:mod:`mfopt.accounting.monte_carlo.count_mixture`, whose values have a proven ceiling.
"""

import math

import numpy as np
import scipy
from plain_monte_carlo import Estimate


def log_ratio(exponents, gram, group_size):
    """log P/Q from a_i = <m_i, X>/σ², shape (samples, bins) -> (samples,); ``gram`` is g.

    All terms are positive, so the product keeps full relative precision; the state is
    rescaled after each bin.
    """
    samples, bins = exponents.shape
    count = np.arange(group_size + 1)
    rate = math.log(group_size / bins)
    base = count * rate - 0.5 * count**2 * gram - scipy.special.gammaln(count + 1)
    state = np.zeros((samples, group_size + 1))
    state[:, 0] = 1.0
    log_scale = np.zeros(samples)
    for i in range(bins):
        powers = base + exponents[:, i, None] * count
        top = powers.max(axis=1, keepdims=True)
        factors = np.exp(powers - top)
        # counts that no sample gives a share of 1e-20 of the largest are left out
        degree = int(np.max(np.flatnonzero(factors.max(axis=0) > 1e-20)))
        following = state * factors[:, :1]
        for j in range(1, degree + 1):
            following[:, j:] += state[:, :-j] * factors[:, j, None]
        largest = following.max(axis=1)
        state = following / largest[:, None]
        log_scale += top[:, 0] + np.log(largest)
    with np.errstate(divide="ignore"):
        coefficient = np.log(state[:, -1])
    return coefficient + log_scale + _log_constant(group_size)


def _log_constant(group_size):
    """log K!/K^K: what is left of K!/b^K once every count carries a factor K/b."""
    return math.lgamma(group_size + 1) - group_size * math.log(group_size)


def estimate(
    bins,
    group_size,
    gram,
    epsilon,
    *,
    direction="remove",
    samples=2**18,
    seed=0,
):
    """H_{e^ε}(P, Q) ("remove") or H_{e^ε}(Q, P) ("add") of the exact mixture, g = |m_i|²/σ²."""
    rng = np.random.default_rng(seed)
    a = math.sqrt(gram) * rng.standard_normal((samples, bins))
    if direction == "remove":
        a += gram * rng.multinomial(group_size, np.full(bins, 1 / bins), size=samples)
    sign = 1 if direction == "remove" else -1
    values = np.maximum(-np.expm1(epsilon - sign * log_ratio(a, gram, group_size)), 0)
    return Estimate(float(values.mean()), float(values.std() / math.sqrt(samples)), samples)
